"""The token server that the made-up service-account key names, and the check of its tokens."""

import time
import uuid

import grpc
from google.auth import jwt

from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import json_answer, start_http_server


class TokenServer:
    """Issues access tokens over HTTP; knows which are good."""

    def __init__(self, lifetime_seconds: int = 3600) -> None:
        self.lifetime_seconds = lifetime_seconds
        self.issued = 0
        self.public_pem = b""
        self.revoked = False
        """Whether the key was deleted: no token that it signs or was given for is good any more."""
        self._expiry: dict[str, float] = {}
        self._server = start_http_server(lambda *request: json_answer(200, self.issue()))
        self.uri = f"{self._server.url}/token"

    def stop(self) -> None:
        self._server.stop()

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
        if not self.revoked and self._expiry.get(token, 0) > time.time():
            return
        try:
            if self.revoked:
                raise ValueError("the key was revoked")
            jwt.decode(token, certs=self.public_pem)
        except Exception as error:
            raise RpcFailed(
                grpc.StatusCode.UNAUTHENTICATED,
                "Request had invalid authentication credentials. Expected OAuth 2 access token.",
            ) from error
