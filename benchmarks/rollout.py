"""Five minutes of constant load with two rollouts and a killed engine, against replacing a server.

Eight clients ask without pause, half of them for streams. An answer counts as kept when it has
status 200 and is complete: a stream must reach its end without an error. The peer does what the
pipelines of today do: it ends the old server and starts the new one.
"""

import json
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil

from benchmarks.harness import at_least, at_most, crowd, record
from benchmarks.models import small_model
from serving import endpoint as process
from serving.settings import EndpointSettings, RolloutSettings
from serving.state import Desired, StateFolder

CLIENTS = 8
TOKENS = 16
SECONDS = 300
PEER_SECONDS = 90
ROLLOUT = RolloutSettings(steps=(0.1, 0.5), step_seconds=10, min_requests=20)
SETTINGS = EndpointSettings(port=8_799, rollout=ROLLOUT)


def version(model: Path, name: str) -> Desired:
    """One of the versions, which are one model."""
    return Desired(model_folder=model, version=name, fingerprint=name, settings=SETTINGS)


class Load:
    """What clients got of an endpoint."""

    def __init__(self, url: str) -> None:
        self.counts: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.slowest = 0.0
        self._url = url
        self._lock = threading.Lock()

    def running(self) -> AbstractContextManager[None]:
        """Keep the load up while the block runs."""
        return crowd(CLIENTS, self._ask, self._url)

    @property
    def kept(self) -> float:
        """Share of requests that were answered completely."""
        return self.counts["kept"] / max(sum(self.counts.values()), 1)

    def _ask(self, http: httpx.Client, number: int) -> None:
        started = time.monotonic()
        outcome, version = self._request(http, stream=number % 2 == 0)
        with self._lock:
            self.counts[outcome] += 1
            self.versions[version] += 1
            self.slowest = max(self.slowest, time.monotonic() - started)
        if outcome != "kept":
            time.sleep(0.2)

    def _request(self, http: httpx.Client, stream: bool) -> tuple[str, str]:
        body = {"prompt": "The function numpy.dot", "max_tokens": TOKENS, "stream": stream}
        try:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                version = answer.headers.get("x-model-version", "")
                text = answer.read().decode()
        except httpx.HTTPError as error:
            return type(error).__name__, ""
        if answer.status_code != 200:
            return str(answer.status_code), version
        if not stream:
            reason = json.loads(text)["choices"][0]["finish_reason"]
            return ("kept" if reason else "cut"), version
        return ("kept" if text.endswith("data: [DONE]\n\n") else "cut"), version


def soak(model: Path, state: Path) -> Load:
    """Two rollouts and one killed engine under load."""
    endpoint = process.start(state, version(model, "1"), print)
    load = Load(endpoint.status.url)
    started = time.monotonic()
    with load.running():
        time.sleep(20)
        process.start(state, version(model, "2"), print)
        time.sleep(20)
        status = StateFolder(state).running
        assert status is not None and status.routes[0].engine_pid
        psutil.Process(status.routes[0].engine_pid).kill()
        time.sleep(20)
        process.start(state, version(model, "3"), print)
        time.sleep(max(0.0, SECONDS - (time.monotonic() - started)))
    process.stop(state)
    return load


def replace(model: Path, state: Path) -> Load:
    """End the old server, then start the new one, under the same load."""
    endpoint = process.start(state, version(model, "1"), print)
    load = Load(endpoint.status.url)
    started = time.monotonic()
    with load.running():
        time.sleep(20)
        process.stop(state)
        process.start(state, version(model, "2"), print)
        time.sleep(max(0.0, PEER_SECONDS - (time.monotonic() - started)))
    process.stop(state)
    return load


def main() -> None:
    """Soak, replace, and record the shares of answers kept."""
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch) / "model")
        try:
            ours = soak(model, Path(scratch) / "ours")
            peer = replace(model, Path(scratch) / "peer")
        finally:
            process.stop(Path(scratch) / "ours")
            process.stop(Path(scratch) / "peer")
    print("ours:", dict(ours.counts), dict(ours.versions), f"slowest {ours.slowest:.1f} s")
    print("peer:", dict(peer.counts), dict(peer.versions), f"slowest {peer.slowest:.1f} s")
    lost = sum(ours.counts.values()) - ours.counts["kept"]
    record(
        "rollout",
        [ours.kept],
        [peer.kept],
        "share of requests answered completely",
        "ending the old server before the new one is started",
        "higher",
        ["openvino-genai", "torch", "transformers", "starlette"],
        {
            "requests_lost": at_most(lost, 0),
            "requests": at_least(sum(ours.counts.values()), 100),
            "versions_that_answered": at_least(len(ours.versions), 3),
        },
    )


if __name__ == "__main__":
    main()
