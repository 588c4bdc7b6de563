"""How the local endpoint answers just now, asked from outside as its clients ask."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from serving.comparison import JudgedDocument, compared
from serving.settings import bearer_token
from serving.state import Status

SECONDS = 60.0
TIMED_ANSWERS, TIMED_TOKENS = 3, 8
COUNTED = "serving_requests_total"
FAILED = 500
"""This status and those above are the endpoint's own faults."""


class Requests(BaseModel):
    """How many requests the endpoint has answered since it was started."""

    model_config = ConfigDict(extra="forbid")

    all: int
    failed: int

    @classmethod
    def counted(cls, metrics: str) -> "Requests":
        """What metrics in Prometheus' text format count."""
        counts = [
            (int(sample.labels["status"]), int(sample.value))
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == COUNTED
        ]
        return cls(
            all=sum(count for _, count in counts),
            failed=sum(count for status, count in counts if status >= FAILED),
        )

    def since(self, before: "Requests | None") -> "Requests":
        """Those that came after; all where the endpoint was started again in between."""
        if before is None or before.all > self.all or before.failed > self.failed:
            return self
        return Requests(all=self.all - before.all, failed=self.failed - before.failed)


class LiveEndpoint:
    """An endpoint that runs on this machine."""

    def __init__(self, status: Status) -> None:
        """Raises UserError where it asks for a token that is not set here."""
        token = bearer_token(status.settings)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=status.url, headers=headers, timeout=SECONDS)
        self._status = status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def requests(self) -> Requests:
        """What its metrics count; raises UserError where it does not answer."""
        return Requests.counted(self._ask("GET", "/metrics").text)

    def latency(self) -> float:
        """Median seconds that a client waits for a short answer to the rollout's probe.

        Raises:
            UserError: it does not answer.
        """
        probe = {"prompt": self._status.settings.rollout.probe, "max_tokens": TIMED_TOKENS}
        waited = []
        for _ in range(TIMED_ANSWERS):
            began = time.perf_counter()
            self._ask("POST", "/predict", {"instances": [probe]})
            waited.append(time.perf_counter() - began)
        return statistics.median(waited)

    def deviations(self, documents: Sequence[JudgedDocument]) -> list[str]:
        """What is wrong with its bits on documents that its version was judged by, in words.

        Nothing is where they are what the evaluation found, as far as the weights' format allows,
        and where nothing can be compared.

        Raises:
            UserError: it does not answer.
        """
        route = next((one for one in self._status.routes if one.share == 1), None)
        most = self._status.settings.max_prompt_tokens
        fitting = [one for one in documents if max(map(len, one.windows)) <= most]
        if route is None or route.comparison is None or not fitting:
            return []
        bits = [sum(map(self._bits, document.windows)) for document in fitting]
        found = compared(fitting, bits, route.comparison.weights)
        return [] if found.fits else [f"Its bits are not those it was judged by: {found}."]

    def _bits(self, tokens: list[int]) -> float:
        """Of a stretch of text after its first token."""
        asked = {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = self._ask("POST", "/v1/completions", asked).json()
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        return -sum(logprobs) / math.log(2)

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise UserError(
                f"The endpoint at {self._status.url} does not answer {path}: {error}. Its log, "
                "`endpoint.log` in its folder of the store, says more."
            ) from error
