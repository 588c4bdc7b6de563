"""The sensor that looks whether what serves is as good as it was, beside a real endpoint."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance

from artifacts.errors import UserError
from artifacts.store import layout
from llm_assets.automation import notifications, sensors
from llm_assets.config import load_settings
from llm_assets.endpoint import base
from llm_assets.endpoint.base import (
    TIMED_ANSWERS,
    LiveEndpoint,
    Requests,
    judged_documents,
)
from llm_assets.endpoint.folder import endpoint_status
from llm_assets.registry.base import LocalRegistry
from serving.api.dispatcher import Metrics
from serving.comparison import EngineComparison, JudgedDocument
from serving.settings import EndpointSettings
from serving.state import RouteStatus, Status
from tests.conftest import Project
from tests.llm_assets.automation.conftest import Automated
from tests.stand_ins.http_server import Answer, json_answer, start_http_server

SENSOR = "serving_quality"


@dataclass
class Live:
    """The endpoint that serves, and the documents its version was judged by."""

    endpoint: LiveEndpoint
    documents: list[JudgedDocument]


@pytest.fixture(scope="module")
def live(made: Project) -> Iterator[Live]:
    settings = load_settings(made.config)
    status = endpoint_status(settings)
    champion = LocalRegistry(made.folder / "store", "manual").find("champion")
    assert status is not None and champion is not None
    with LiveEndpoint(status) as endpoint:
        yield Live(endpoint, judged_documents(made.record.store, champion))


def test_failed_requests_are_those_that_the_endpoint_is_to_blame_for() -> None:
    metrics = Metrics()
    for status, count in ((200, 7), (400, 2), (429, 1), (500, 1), (503, 2)):
        for _ in range(count):
            metrics.request("/v1/completions", status, "1", 0.1)
    assert Requests.counted(metrics.render([])) == Requests(all=13, failed=3)


def test_counts_begin_again_with_an_endpoint_that_was_started_again() -> None:
    now = Requests(all=50, failed=5)
    assert now.since(Requests(all=20, failed=1)) == Requests(all=30, failed=4)
    assert now.since(Requests(all=900, failed=40)) == now
    assert now.since(None) == now


def test_bits_asked_for_as_a_client_are_those_of_the_evaluation(live: Live) -> None:
    assert live.documents and live.endpoint.deviations(live.documents) == []
    others = [one.model_copy(update={"bits": one.bits * 0.9}) for one in live.documents]
    (told,) = live.endpoint.deviations(others)
    assert "Its bits are not those it was judged by" in told


@dataclass
class Asked:
    """An endpoint that finds one bit in each token after a prompt's first."""

    limit: int = 10_000
    """Of a body, in bytes."""
    refusals: int = 0
    """Requests that come while it has too many others."""
    statuses: list[int] = field(default_factory=list)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        busy = len(self.statuses) < self.refusals
        self.statuses.append(429 if busy else 413 if len(body) > self.limit else 200)
        bits = [None, *(-math.log(2) for _ in json.loads(body)["prompt"][1:])]
        choice = {"logprobs": {"token_logprobs": bits}}
        return json_answer(self.statuses[-1], {"choices": [choice]})

    def deviations(self, *sizes: int) -> list[str]:
        """Of documents of so many tokens, which the evaluation found the same bits in."""
        server = start_http_server(self.answer)
        found: dict[str, Any] = {"documents": 1, "evaluated": 1, "served": 1, "largest": 0}
        comparison = EngineComparison(**found, largest_in="", weights="f32")
        one: dict[str, Any] = {"version": "1", "fingerprint": "1", "engine_pid": 1, "restarts": 0}
        status = Status(
            **{"pid": 1, "process_started": None, "api_server_pid": 1, "phase": "serving"},
            host="127.0.0.1",
            port=server.server_port,
            settings=EndpointSettings(max_body_bytes=self.limit),
            routes=[RouteStatus(**one, share=1.0, ready=True, comparison=comparison)],
        )
        documents = [
            JudgedDocument(id=str(size), bytes=size, bits=size - 1, windows=[[10_000] * size])
            for size in sizes
        ]
        with LiveEndpoint(status) as endpoint:
            told = endpoint.deviations(documents)
        server.stop()
        return told


def test_text_that_the_endpoint_is_set_to_refuse_is_not_asked_for() -> None:
    endpoint = Asked(limit=1_024)
    assert endpoint.deviations(20, 500) == endpoint.deviations(500) == []
    assert endpoint.statuses == [200]


def test_an_endpoint_that_has_too_many_requests_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "RETRY_SECONDS", 0.01)
    endpoint = Asked(refusals=2)
    assert endpoint.deviations(20) == []
    assert endpoint.statuses == [429, 429, 200]
    monkeypatch.setattr(base, "BUSY_SECONDS", 0.05)
    with pytest.raises(UserError, match="429"):
        Asked(refusals=1_000).deviations(20)


def test_latency_is_what_a_client_waits_for(live: Live) -> None:
    before = live.endpoint.requests()
    began = time.monotonic()
    latency = live.endpoint.latency()
    assert 0 < latency < time.monotonic() - began
    assert live.endpoint.requests().since(before).all >= TIMED_ANSWERS


@pytest.fixture
def automated(made: Project, tmp_path: Path) -> Iterator[Automated]:
    """Settings of its own beside the made project's store and endpoint."""
    project = Project(tmp_path)
    shutil.copy(made.config, project.config)
    told = made.folder / "store" / layout.automation("manual") / "told.json"
    told.unlink(missing_ok=True)
    with DagsterInstance.ephemeral() as instance:
        yield Automated(project, instance)


@pytest.fixture
def heard(automated: Automated, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What people are told."""
    told: list[str] = []
    monkeypatch.setattr(notifications, "send", lambda _, text, report: told.append(text))
    automated.project.configure(notifications={"webhook_variable": "WEBHOOK"})
    return told


@contextmanager
def in_its_place(automated: Automated, answer: Callable[..., Answer]) -> Iterator[None]:
    """Another server than the endpoint's answers while the block runs."""
    status = endpoint_status(load_settings(automated.project.config))
    assert status is not None
    server = start_http_server(answer)
    other = status.model_copy(update={"port": server.server_port})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensors, "endpoint_status", lambda _: other)
        yield
    server.stop()


def half_failed(live: Live, failed: int = 50) -> str:
    """A cursor since which about half of 100 requests failed."""
    counted = live.endpoint.requests()
    return json.dumps({"all": counted.all - 100, "failed": counted.failed - failed})


def test_what_failed_is_said_once_and_well_again_after_it(
    automated: Automated, live: Live, heard: list[str]
) -> None:
    assert "serves well" in str(automated.tick(SENSOR)) and not heard
    for _ in range(2):
        automated.cursor = half_failed(live, failed=50 + 9 * len(heard))
        told = str(automated.tick(SENSOR))
        assert "performs worse than before: 5" in told and "most_failures" in told
    assert len(heard) == 1 and "performs worse" in heard[0]
    for few, messages in ((True, 1), (False, 2)):
        # Without requests nobody knows whether it is well again.
        automated.cursor = half_failed(live, failed=0) if not few else automated.cursor
        assert "serves well" in str(automated.tick(SENSOR))
        automated.cursor = half_failed(live)
        automated.tick(SENSOR)
        assert len(heard) == messages


def test_requests_of_several_looks_add_up_and_those_of_the_looks_do_not_count(
    automated: Automated, live: Live
) -> None:
    automated.tick(SENSOR)
    for _ in range(3):
        before = live.endpoint.requests()
        automated.tick(SENSOR)
        asked = live.endpoint.requests().since(before)
        assert asked.all > 0 and automated.cursor
        since = live.endpoint.requests().since(Requests.model_validate_json(automated.cursor))
        assert since.all == 0
    counted = live.endpoint.requests()
    automated.cursor = Requests(all=counted.all - 15, failed=counted.failed - 15).model_dump_json()
    assert "serves well" in str(automated.tick(SENSOR))
    for _ in range(5):
        live.endpoint.latency()
    assert "15 of 30 requests failed" in str(automated.tick(SENSOR))


@pytest.mark.parametrize("is_counting", [True, False], ids=["engine", "server"])
def test_an_endpoint_that_does_not_answer_is_told_of_once_and_not_trained_for(
    automated: Automated, heard: list[str], is_counting: bool
) -> None:
    metrics = Metrics()
    for code in (200, 503) * 20:
        metrics.request("/v1/completions", code, "1", 0.1)

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if path == "/metrics" and is_counting:
            return 200, [], metrics.render([]).encode()
        return json_answer(503, {})

    automated.automate(quality={"then": "tell" if is_counting else "retrain"})
    with in_its_place(automated, answer):
        for _ in range(2):
            automated.cursor = None
            told = str(automated.tick(SENSOR))
            assert "cannot be checked" in told and "503" in told
            assert ("20 of 40 requests failed" in told) is is_counting
            assert len(heard) == 1 + is_counting


def test_a_look_ends_long_before_dagster_ends_its_tick(
    automated: Automated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensors, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(sensors, "LOOK_SECONDS", 3.0)

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if path == "/metrics":
            return 200, [], Metrics().render([]).encode()
        return json_answer(429, {})

    with in_its_place(automated, answer):
        began = time.monotonic()
        assert "429" in str(automated.tick(SENSOR))
        assert time.monotonic() - began < base.BUSY_SECONDS / 2


def test_a_version_that_is_about_to_be_replaced_is_not_trained_further(
    automated: Automated, live: Live, made: Project
) -> None:
    automated.automate(quality={"then": "retrain"})
    store = made.folder / "store"
    names = ("registry", "decisions", layout.PIPELINES_FOLDER)
    kept = [store / name for name in names]
    for folder in filter(Path.exists, kept):
        shutil.copytree(folder, automated.project.folder / folder.name)
    try:
        LocalRegistry(store, "manual").reject(1, "Ada", "it rambles")
        automated.cursor = half_failed(live)
        told = str(automated.tick(SENSOR))
    finally:
        for folder in kept:
            shutil.rmtree(folder, ignore_errors=True)
            if (before := automated.project.folder / folder.name).exists():
                shutil.move(before, folder)
    assert "Version 1 performs worse" in told and "It is not trained further, since" in told


def test_a_version_that_got_worse_is_trained_further_and_longer_if_that_did_not_help(
    automated: Automated, live: Live
) -> None:
    automated.automate(quality={"then": "retrain"}, retry_minutes=0)
    for longer, succeeds in ((1, False), (1, True), (2, True), (4, True)):
        automated.cursor = half_failed(live)
        request = automated.expect_run(SENSOR)
        assert request.run_config["ops"]["checkpoint"]["config"] == {
            "continue_from_champion": True,
            "from_version": 1,
            "longer": longer,
        }
        run = automated.launch(request)
        automated.cursor = half_failed(live)
        assert "is under way" in str(automated.tick(SENSOR))
        automated.end(run, succeeds)
    automated.cursor = half_failed(live)
    assert "did not resolve this" in str(automated.tick(SENSOR))
