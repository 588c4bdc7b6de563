"""The few REST calls that a check makes: enabled APIs, quotas, images in the registry."""

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.stand_ins.tokens import TokenServer


class RestServer:
    """What is enabled, allowed and pushed; tests change the fields."""

    def __init__(self, tokens: TokenServer, region: str) -> None:
        self.region = region
        self.disabled: set[str] = set()
        """APIs that are not enabled."""
        self.quotas: dict[str, int] = {}
        """Metric to limit in the region."""
        self.images: set[str] = set()
        """`project/repository/name:tag`."""
        rest = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*rest.answer(self.path))

            do_HEAD = do_GET

            def _answer(self, status: int, content: Any) -> None:
                try:
                    tokens.authorize(self.headers.get("authorization"))
                except Exception:
                    status, content = 401, {}
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Everything enabled, nothing allowed or pushed."""
        self.disabled.clear()
        self.quotas.clear()
        self.images.clear()

    def answer(self, target: str) -> tuple[int, Any]:
        """Status and JSON content for a request."""
        parts = urllib.parse.urlparse(target)
        query = urllib.parse.parse_qs(parts.query)
        if parts.path.endswith("/services:batchGet"):
            return 200, {"services": [self._service(name) for name in query["names"]]}
        if parts.path.endswith("/consumerQuotaMetrics"):
            return 200, {"metrics": [self._metric(m, v) for m, v in self.quotas.items()]}
        if parts.path.startswith("/v2/") and "/manifests/" in parts.path:
            image = parts.path.removeprefix("/v2/").replace("/manifests/", ":")
            return (200 if image in self.images else 404), {}
        return 404, {}

    def _service(self, name: str) -> dict[str, str]:
        disabled = name.rsplit("/", 1)[1] in self.disabled
        return {"name": name, "state": "DISABLED" if disabled else "ENABLED"}

    def _metric(self, metric: str, limit: int) -> dict[str, Any]:
        bucket = {"effectiveLimit": str(limit), "dimensions": {"region": self.region}}
        return {"metric": metric, "consumerQuotaLimits": [{"quotaBuckets": [bucket]}]}
