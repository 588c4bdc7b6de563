"""What answers at a dedicated endpoint's address: each request goes to a version by its share."""

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.stand_ins.faults import RpcFailed

REQUEST_SECONDS = 60


class PredictionServer:
    """`POST /v1/<endpoint>:predict` over HTTP."""

    def __init__(
        self,
        find_endpoint: Callable[[str], Any],
        find_replica: Callable[[str, str], Any],
        authorize: Callable[[str | None], None],
    ) -> None:
        self.answers: list[tuple[str, int]] = []
        """Deployed model and status of every request, oldest first."""
        self._find_endpoint = find_endpoint
        self._find_replica = find_replica
        self._random = random.Random(0)
        prediction = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                try:
                    authorize(self.headers.get("authorization"))
                    status, content = prediction.predict(self.path, body)
                except RpcFailed as failure:
                    status, content = 401, _error(401, failure.message)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Forget who answered."""
        self.answers.clear()

    def predict(self, target: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer; a container's error is passed on."""
        name = target.split("?")[0].removeprefix("/v1/").removesuffix(":predict")
        try:
            endpoint = self._find_endpoint(name)
        except RpcFailed as failure:
            return 404, _error(404, failure.message)
        shares = {key: share for key, share in endpoint.traffic_split.items() if share}
        if not shares:
            return 400, _error(400, f"{name} has no deployed model with traffic.")
        (chosen,) = self._random.choices(list(shares), list(shares.values()))
        status, content = self._ask(self._find_replica(name, chosen), body)
        self.answers.append((chosen, status))
        if status != 200:
            return status, _error(status, content.decode(errors="replace"))
        deployed = next(d for d in endpoint.deployed_models if d.id == chosen)
        answer = {
            "predictions": json.loads(content)["predictions"],
            "deployedModelId": chosen,
            "model": deployed.model,
            "modelVersionId": deployed.model_version_id,
        }
        return 200, json.dumps(answer).encode()

    def _ask(self, replica: Any, body: bytes) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{replica.port}{replica.predict_route}"
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError as error:
            return 503, str(error).encode()


def _error(code: int, message: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": message}}).encode()
