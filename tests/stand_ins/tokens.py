"""The token server that the made-up service-account key names, and the check of its tokens."""

import time
import urllib.parse
import uuid

import grpc
from google.auth import jwt

from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, json_answer, start_http_server
from tests.stand_ins.identity import SERVICE_ACCOUNT

LIFETIME_SECONDS = 3600


class TokenServer:
    """Issues access tokens over HTTP; knows which are good."""

    def __init__(self) -> None:
        self.public_pems: dict[str, bytes] = {}
        """Account to the public half of its key."""
        self.revoked = False
        """Whether the key was deleted: no token that it signs or was given for is good any more."""
        self._issued: dict[str, tuple[str, float]] = {}
        """Token to its account and when it ends."""
        self._server = start_http_server(lambda *request: self._answer(request[3]))
        self.uri = f"{self._server.url}/token"

    def stop(self) -> None:
        self._server.stop()

    def _answer(self, body: bytes) -> Answer:
        assertion = urllib.parse.parse_qs(body.decode())["assertion"][0]
        return json_answer(200, self.issue(self._signer(assertion)))

    def issue(self, account: str = SERVICE_ACCOUNT) -> dict[str, object]:
        """A new token, as the token endpoint words it."""
        token = f"token-{uuid.uuid4().hex}"
        self._issued[token] = (account, time.time() + LIFETIME_SECONDS)
        return {"access_token": token, "expires_in": LIFETIME_SECONDS, "token_type": "Bearer"}

    def authorize(self, authorization: str | None) -> str:
        """The account of a token issued here or signed with an account's key; refuses others."""
        token = (authorization or "").removeprefix("Bearer ")
        account, ends = self._issued.get(token, ("", 0))
        if not self.revoked and ends > time.time():
            return account
        try:
            if self.revoked:
                raise ValueError("the key was revoked")
            return self._signer(token)
        except Exception as error:
            raise RpcFailed(
                grpc.StatusCode.UNAUTHENTICATED,
                "Request had invalid authentication credentials. Expected OAuth 2 access token.",
            ) from error

    def _signer(self, token: str) -> str:
        """The account whose key signed a token; raises ValueError."""
        account = str(jwt.decode(token, verify=False)["iss"])
        jwt.decode(token, certs=self.public_pems[account])
        return account
