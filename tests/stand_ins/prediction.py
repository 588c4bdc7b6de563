"""What answers at a dedicated endpoint's address: each request goes to a version by its share."""

import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, json_answer, start_http_server

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
        self._authorize = authorize
        self._server = start_http_server(self._answer)
        self.url = self._server.url

    def stop(self) -> None:
        self._server.stop()

    def reset(self) -> None:
        """Forget who answered."""
        self.answers.clear()

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        try:
            self._authorize(headers.get("authorization"))
        except RpcFailed as failure:
            return _error(401, failure.message)
        return self._predict(target, body)

    def _predict(self, target: str, body: bytes) -> Answer:
        """The answer of a version chosen by its share; a container's error is passed on."""
        name = target.split("?")[0].removeprefix("/v1/").removesuffix(":predict")
        try:
            endpoint = self._find_endpoint(name)
        except RpcFailed as failure:
            return _error(404, failure.message)
        shares = {key: share for key, share in endpoint.traffic_split.items() if share}
        if not shares:
            return _error(400, f"{name} has no deployed model with traffic.")
        (chosen,) = self._random.choices(list(shares), list(shares.values()))
        status, content = self._ask(self._find_replica(name, chosen), body)
        self.answers.append((chosen, status))
        if status != 200:
            return _error(status, content.decode(errors="replace"))
        deployed = next(d for d in endpoint.deployed_models if d.id == chosen)
        answer = {
            "predictions": json.loads(content)["predictions"],
            "deployedModelId": chosen,
            "model": deployed.model,
            "modelVersionId": deployed.model_version_id,
        }
        return json_answer(200, answer)

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


def _error(code: int, message: str) -> Answer:
    return json_answer(code, {"error": {"code": code, "message": message}})
