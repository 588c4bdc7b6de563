"""A registry of images on loopback, as anyone may read Docker Hub: with a token that it gives away.

Rules: https://distribution.github.io/distribution/spec/auth/token and the distribution spec of OCI,
"Pulling manifests".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlparse

from tests.stand_ins.http_server import Answer, HttpServer, json_answer, start_http_server

INDEX = "application/vnd.oci.image.index.v1+json"


class Registry:
    """Images by `name:tag`; every manifest that was asked for."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.asked: list[str] = []
        self.token_answer: object = None
        """What is answered to who asks for a token; None for a token."""
        self._server: HttpServer = start_http_server(self._answer)
        self.host = self._server.url.removeprefix("http://")

    def stop(self) -> None:
        self._server.stop()

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = urlparse(target)
        if parts.path == "/token":
            query = parse_qs(parts.query)
            if self.token_answer is not None:
                return json_answer(200, self.token_answer)
            return json_answer(200, {"token": f"{query['service'][0]} {query['scope'][0]}"})
        name, _, tag = parts.path.removeprefix("/v2/").partition("/manifests/")
        scope = f"repository:{name}:pull"
        if headers.get("authorization") != f"Bearer local {scope}":
            asks = f'Bearer realm="{self._server.url}/token",service="local",scope="{scope}"'
            return 401, [("www-authenticate", asks)], b""
        self.asked.append(f"{name}:{tag}")
        digest = self.digests.get(f"{name}:{tag}")
        if digest is None or method != "HEAD" or INDEX not in headers["accept"]:
            return json_answer(404, {})
        return 200, [("docker-content-digest", digest), ("content-type", INDEX)], b""


@contextmanager
def running_registry() -> Iterator[Registry]:
    """A registry while the block runs."""
    registry = Registry()
    try:
        yield registry
    finally:
        registry.stop()
