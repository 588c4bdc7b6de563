"""HTTP servers on loopback that answer by a function, some of them by asking another server."""

import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OF_ONE_CONNECTION = ("transfer-encoding", "connection", "content-length")

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


def json_answer(status: int, content: Any) -> Answer:
    """An answer whose body is JSON."""
    return status, [("content-type", "application/json")], json.dumps(content).encode()


def forward(port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
    """Pass a request on to the server on a port of loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body or None, headers)
        reply = connection.getresponse()
        return reply.status, reply.getheaders(), reply.read()
    finally:
        connection.close()


class HttpServer(ThreadingHTTPServer):
    """A server of this process, on a port of its own."""

    daemon_threads = True

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        """Answer nobody any more."""
        self.shutdown()
        self.server_close()

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        """Clients cut connections as they please; that is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def start_http_server(
    answer: Callable[[str, str, dict[str, str], bytes], Answer | None], port: int = 0
) -> HttpServer:
    """Start a server whose every request (method, path, headers with lower-case names, body) is
    answered by the function; None cuts the connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def respond(self) -> None:
            body = self._read_body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            kept = {name: value for name, value in headers.items() if name not in OF_ONE_CONNECTION}
            answered = answer(self.command, self.path, kept, body)
            if answered is None:
                self.close_connection = True
                self.connection.close()
            else:
                self._write(*answered)

        def _write(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in OF_ONE_CONNECTION:
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

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = respond

    server = HttpServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
