"""What answers at a dedicated endpoint's address: each request goes to a version by its share."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, forward, json_answer, start_http_server

MOST_BYTES = 10_000_000
"""Of a request to a dedicated endpoint: page "Choose an endpoint type", table of limits."""
METHODS = re.compile(
    r"/v1/(?P<name>projects/[^/]+/locations/[^/]+/endpoints/[^/:]+)"
    r"(:(?P<method>predict|rawPredict|streamRawPredict)"
    r"|(/deployedModels/(?P<chosen>[^/]+))?/invoke(?P<route>/.+))"
)


class PredictionServer:
    """`:predict`, the raw predictions and `/invoke` over HTTP, as `aiplatform.v1.json` has them."""

    def __init__(
        self,
        find_endpoint: Callable[[str], Any],
        find_replica: Callable[[str, str], Any],
        authorize: Callable[[str | None], None],
    ) -> None:
        self._find_endpoint = find_endpoint
        self._find_replica = find_replica
        self._random = random.Random(0)
        self._authorize = authorize
        self._server = start_http_server(self._answer)
        self.url = self._server.url

    def stop(self) -> None:
        self._server.stop()

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        try:
            self._authorize(headers.get("authorization"))
        except RpcFailed as failure:
            return _error(401, failure.message)
        if len(body) > MOST_BYTES:
            return _error(413, f"Request payload size exceeds the limit: {MOST_BYTES} bytes.")
        asked = METHODS.fullmatch(target.split("?")[0])
        if not asked or method != "POST":
            return _error(404, f"There is no {method} {target}.")
        try:
            endpoint = self._find_endpoint(asked["name"])
        except RpcFailed as failure:
            return _error(404, failure.message)
        return self._pass_on(endpoint, asked, headers, body)

    def _pass_on(
        self, endpoint: Any, asked: re.Match[str], headers: dict[str, str], body: bytes
    ) -> Answer:
        """The answer of the version that was named, or else of one chosen by its share."""
        shares = {key: share for key, share in endpoint.traffic_split.items() if share}
        known = {deployed.id: deployed for deployed in endpoint.deployed_models}
        chosen = asked["chosen"]
        if chosen is None and shares:
            (chosen,) = self._random.choices(list(shares), list(shares.values()))
        if chosen not in known:
            return _error(400, f"{endpoint.name} has no deployed model with traffic, or {chosen}.")
        replica = self._find_replica(endpoint.name, chosen)
        if bool(replica.predict_route) == bool(asked["route"]):
            return _error(400, f"Deployed model {chosen} does not take {asked[0]}.")
        kept = {"content-type": headers.get("content-type", "application/json")}
        try:
            reply = forward(
                replica.port, "POST", asked["route"] or replica.predict_route, kept, body
            )
        except OSError as error:
            reply = _error(503, str(error))
        if asked["method"] != "predict":
            return reply
        if reply[0] != 200:
            return _error(reply[0], reply[2].decode(errors="replace"))
        answer = {
            "predictions": json.loads(reply[2])["predictions"],
            "deployedModelId": chosen,
            "model": known[chosen].model,
            "modelVersionId": known[chosen].model_version_id,
        }
        return json_answer(200, answer)


def _error(code: int, message: str) -> Answer:
    return json_answer(code, {"error": {"code": code, "message": message}})
