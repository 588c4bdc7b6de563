"""An HTTP server on loopback that answers by a function, mostly by asking another server."""

import http.client
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NOT_RELAYED = ("transfer-encoding", "connection", "content-length")

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


def forward(port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
    """Pass a request on to the server on a port of loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body or None, headers)
        reply = connection.getresponse()
        return reply.status, reply.getheaders(), reply.read()
    finally:
        connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients cut connections as they please; that is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def start_relay(
    answer: Callable[[str, str, dict[str, str], bytes], Answer | None],
) -> ThreadingHTTPServer:
    """Start a server whose every request (method, path, headers with lower-case names, body) is
    answered by the function; None cuts the connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def relay(self) -> None:
            body = self._read_body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            kept = {name: value for name, value in headers.items() if name not in NOT_RELAYED}
            answered = answer(self.command, self.path, kept, body)
            if answered is None:
                self.close_connection = True
                self.connection.close()
            else:
                self._write(*answered)

        def _write(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in NOT_RELAYED:
                    self.send_header(name, value)
            length = next((v for k, v in headers if k.lower() == "content-length"), len(body))
            self.send_header("content-length", str(length if self.command == "HEAD" else len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.wfile.flush()

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

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
