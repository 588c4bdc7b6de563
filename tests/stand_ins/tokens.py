"""The token server that the made-up service-account key names, and the check of its tokens."""

import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from google.auth import jwt

from tests.stand_ins.faults import RpcFailed


class TokenServer:
    """Issues access tokens over HTTP; knows which are good."""

    def __init__(self, lifetime_seconds: int = 3600) -> None:
        self.lifetime_seconds = lifetime_seconds
        self.issued = 0
        self.public_pem = b""
        self._expiry: dict[str, float] = {}
        tokens = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                body = json.dumps(tokens.issue()).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}/token"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def issue(self) -> dict[str, object]:
        """A new token, as the token endpoint words it."""
        token = f"token-{uuid.uuid4().hex}"
        self._expiry[token] = time.time() + self.lifetime_seconds
        self.issued += 1
        return {
            "access_token": token,
            "expires_in": self.lifetime_seconds,
            "token_type": "Bearer",
        }

    def authorize(self, authorization: str | None) -> None:
        """Refuse anything but a token issued here, or one signed with the service account's key."""
        token = (authorization or "").removeprefix("Bearer ")
        if self._expiry.get(token, 0) > time.time():
            return
        try:
            jwt.decode(token, certs=self.public_pem)
        except Exception as error:
            raise RpcFailed(
                grpc.StatusCode.UNAUTHENTICATED,
                "Request had invalid authentication credentials. Expected OAuth 2 access token.",
            ) from error
