"""A board on small stores, the endpoint that it asks, and who signs in to decide."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import axe_core_python
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from artifacts.leases import process_started
from artifacts.shards.shard_set import text_numbers
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.board.pages import Board
from llm_assets.board.server import build_app
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.operation_settings import AutomationSettings
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.state import ModelVersion
from llm_assets.study.rows import DERIVATION_SCHEMA, DERIVATIONS_NAME
from recipes.causal.settings import ContinuedPretrainingSettings
from recipes.data.records import SEEN_NAME, TRAINED_NAME, TRAINED_SCHEMA, LineageRecord
from recipes.evaluation.exam import CLOSED_BOOK, QUESTIONS_NAME
from recipes.evaluation.settings import SAMPLES_NAME, SCORES_NAME, TASK_SCORES_NAME
from scripts.screenshots import click
from serving.settings import EndpointSettings, listen
from serving.state import RouteStatus, StateFolder, Status
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA
from spark_jobs.read.document import document_of
from tests.browser import Browser
from tests.llm_assets.registry.conftest import base_entry, entry, verdict

HOSTILE = '<script>window.ran=1</script><img src=x onerror="window.ran=1">"\'{{7*7}}\u202e'
AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text()
AUDIT = """axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})
    .then((found) => JSON.stringify(found.violations.map((one) => [one.id, one.nodes[0].html])))"""
BEARER = {"authorization": "Bearer the key"}
NOTHING: dict[str, Any] = {
    "served": None,
    "wanted": None,
    "champion": None,
    "running": [f"run {HOSTILE}"],
    "making": [],
    "waiting": [f"a sensor waits: {HOSTILE}"],
    "services": None,
    "machines": [],
    "alarms": [],
}


class SmallStore:
    """A store whose corpora and records are written by hand, its registry and its pipeline."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(str(folder / "store"))
        self.record = Pipeline(self.store, "manual")
        self.registry = LocalRegistry(Path(self.store.root), "manual")
        self.registry.register_base(base_entry())

    def make(
        self, kind: str, name: str, build: Any, settings: Any = None, **inputs: str
    ) -> Artifact:
        """An artifact of a name that is the current one."""
        given = {"settings": settings or {}, "inputs": inputs}
        identity = Identity(kind=kind, code_version=name, **given)
        made, _ = self.store.make(identity, build)
        self.record.advance(made)
        return made

    def clean(
        self,
        name: str,
        texts: dict[str, str],
        duplicates: Any = None,
        kind: str = "clean_corpus",
        **inputs: str,
    ) -> Artifact:
        """A clean corpus of texts by their ids; a text's hash is the text itself."""
        columns = {
            "id": list(texts),
            "text": list(texts.values()),
            "source": ["manual"] * len(texts),
            "split": ["train"] * len(texts),
            "slice": [0] * len(texts),
            "text_hash": list(texts.values()),
            "cluster": list(texts.values()),
        }

        def build(draft: Draft) -> None:
            pq.write_table(pa.table(columns), draft.path / "part-00000.parquet")
            copies = pa.Table.from_pylist(duplicates or [], DUPLICATE_SCHEMA)
            pq.write_table(copies, draft.path / "duplicates.parquet")
            if kind == "study":
                made = [{"id": one, "document": document_of(one)} for one in texts]
                made_of = pa.Table.from_pylist(made, DERIVATION_SCHEMA)
                pq.write_table(made_of, draft.path / DERIVATIONS_NAME)
            draft.stats |= {"documents": len(texts), "dropped": {}}
            draft.stats |= {"splits": {"train": len(texts)}}

        return self.make(kind, name, build, **inputs)

    def examine(
        self, won: int, lost: int, unit: str = "bits per byte", edited: int = 0
    ) -> Artifact:
        """An evaluation in which so many questions were won by the candidate, or lost.

        Of the first `edited` ones Oslo is the right answer, and Riga of the others.
        """
        choices = ["Riga", "Oslo"]
        asked = [
            {"id": str(number), "question": f"Where is lamp {number}?", "choices": choices}
            | {"value": "Oslo" if number < edited else "Riga"}
            | {"subject": f"lamp {number}", "relation": "place"}
            | {"placebo": False}
            | {"passage": {"document": f"lamp {number}", "text": f"Lamp {number} is from Riga."}}
            for number in range(won + lost)
        ]
        right = [float(number < won) for number in range(won + lost)]

        def write_exam(draft: Draft) -> None:
            lines = "".join(f"{json.dumps(one)}\n" for one in asked)
            (draft.path / QUESTIONS_NAME).write_text(lines)

        exam = self.make("exam", f"{won} {lost}", write_exam)

        def write(draft: Draft) -> None:
            rows = {
                "task": [CLOSED_BOOK] * len(asked),
                "metric": ["acc"] * len(asked),
                "sample": [one["id"] for one in asked],
                "score_candidate": right,
                "score_base": [1 - one for one in right],
                "chosen_candidate": [int(1 - one) for one in right],
                "chosen_base": [int(one) for one in right],
            }
            pq.write_table(pa.table(rows), draft.path / TASK_SCORES_NAME)
            scores = {"document": ["manual/8"], "source": ["manual"], "task": ["held_out"]}
            figures = {"score_base": [2.0], "score_candidate": [3.0], "size": [1]}
            pq.write_table(pa.table(scores | figures), draft.path / SCORES_NAME)
            (draft.path / SAMPLES_NAME).write_text("{}")
            metric = {"name": unit.replace(" ", "_"), "unit": unit}
            draft.stats |= {"metric": metric, "metrics": {}, "exam": {"facts": len(asked)}}

        return self.make("eval_metrics", f"{won} {lost}", write, exam=exam.fingerprint)

    def train(
        self,
        corpus: Artifact,
        texts: Sequence[str],
        step: int = 3,
        settings: dict[str, Any] | None = None,
        promoted: bool = True,
        **lineage: str,
    ) -> ModelVersion:
        """A version of a run that was trained on texts in one step; it serves.

        Where the gate does not promote it, Ada lets it serve.
        """
        newest = self.registry.state().versions[-1]
        read = {"text": text_numbers(texts), "start": [0] * len(texts), "end": [7] * len(texts)}
        read |= {"step": [step] * len(texts), "row": list(range(len(texts)))}
        table = pa.table(read).cast(TRAINED_SCHEMA).sort_by("text")

        def build(draft: Draft) -> None:
            pq.write_table(table, draft.path / TRAINED_NAME)
            # A classifier counts an example as one token that it is trained on.
            draft.stats |= {"tokens_seen": 480, "tokens_per_second": 1_000.0}
            draft.stats |= {"training_seconds": 7_200.0}
            numbers, times = np.unique(table["text"].to_numpy(), return_counts=True)
            starts, ends = (np.full(len(numbers), at) for at in (0, 7))
            seen = LineageRecord(numbers, starts, ends, times)
            seen.write(str(draft.path / SEEN_NAME))

        name, started = f"weights-{newest.version + 1}", {"start": newest.model_fingerprint}
        inputs = {} if newest.is_base else started
        made = self.make("checkpoint", name, build, settings, **inputs)
        lineage |= {"checkpoint": made.fingerprint, "clean_corpus": corpus.fingerprint}
        measured = {"models": {"candidate": name, "incumbent": newest.weights}}
        changes: dict[str, Any] = {"model_fingerprint": made.fingerprint, "lineage": lineage}
        changes["evaluation"] = entry(name).evaluation | measured
        found = entry(name).model_copy(update=changes)
        look = self.registry.state().look_of(name, newest.weights)
        version = self.registry.enter(found, verdict(name, newest.weights, promoted, look=look))
        if not promoted:
            self.registry.approve(version.version, "Ada", "It knows lamp 1")
        self.registry.confirm(version.version)
        return version


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    return SmallStore(tmp_path)


def board_of(shop: Any, **changes: Any) -> Board:
    settings = SimpleNamespace(
        name="manual",
        description=HOSTILE,
        platform="local",
        store=shop.store.root,
        checkpoint=ContinuedPretrainingSettings(),
        endpoint=EndpointSettings(),
        automation=AutomationSettings(),
    )
    key = {"key": "the key", "key_name": "a file", "is_open": True}
    named = {"settings": settings, "record": shop.record, "registry": shop.registry}
    return Board(**(named | {"status": lambda: NOTHING, "command": ["false"]} | key | changes))


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serve an application on loopback; gives its address."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def client_of(board: Board) -> Iterator[TestClient]:
    address = "http://127.0.0.1:8012"
    with TestClient(build_app(board), base_url=address, follow_redirects=False) as client:
        yield client


def page_of(shop: Any, path: str = "/", **changes: Any) -> str:
    with client_of(board_of(shop, **changes)) as client:
        answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


@contextmanager
def endpoint(
    board: Board,
    pieces: list[str],
    may_go_on: threading.Event | None = None,
    token_variable: str | None = None,
    scores: dict[str, float] | None = None,
) -> Iterator[None]:
    """An endpoint that streams these pieces as version 1 does, as its state file tells it.

    Args:
        may_go_on: what it waits for after the first piece.
        scores: of the classes that it tells where it is asked for one.
    """

    async def classify(request: Request) -> JSONResponse:
        assert list(await request.json()) == ["instances"]
        told = {"label": max(scores), "scores": scores} if scores else "".join(pieces)
        return JSONResponse({"predictions": [told]}, headers=headers)

    async def answer(request: Request) -> StreamingResponse:
        asked, is_chat = await request.json(), "chat" in request.url.path
        asked_for = {"model", "max_tokens", "temperature", "stop", "stream"}
        assert set(asked) == asked_for | {"messages" if is_chat else "prompt"}
        said = pieces[:1] if asked["stop"] else pieces

        async def stream() -> AsyncIterator[str]:
            if is_chat:
                yield event({"delta": {"role": "assistant"}})
            for piece in said:
                yield event({"delta": {"content": piece}} if is_chat else {"text": piece})
                while may_go_on and not may_go_on.is_set():
                    await asyncio.sleep(0.01)
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    def event(choice: dict[str, Any]) -> str:
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    headers = {"X-Model-Version": "1", "X-Request-Id": "request"}
    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [Route(path, answer, methods=["POST"]) for path in paths]
    routes += [Route("/predict", classify, methods=["POST"])]
    with served(Starlette(routes=routes)) as address:
        of_version = {"version": "1", "fingerprint": "f", "restarts": 0}
        status = Status(
            pid=os.getpid(),
            process_started=process_started(os.getpid()),
            api_server_pid=os.getpid(),
            host="127.0.0.1",
            port=int(address.rpartition(":")[2]),
            settings=EndpointSettings(token_variable=token_variable),
            phase="serving",
            routes=[RouteStatus(**of_version, share=1, engine_pid=None, ready=True)],
        )
        StateFolder(endpoint_folder(board.settings)).status.write(status)
        yield


def sign_in(page: Browser, address: str, path: str) -> None:
    page.open(f"{address}/sign-in?next={path}")
    page.evaluate("document.getElementById('key').value = 'the key'")
    click(page, "main button")


def sign_in_to_decide(page: Browser, address: str) -> None:
    sign_in(page, address, "/decide")
    page.wait_for("document.querySelector('fieldset:enabled #reason')")


def fill_in(page: Browser, fields: dict[str, str]) -> None:
    for name, value in fields.items():
        page.evaluate(f"document.getElementById('{name}').value = {json.dumps(value)}")


def confirm_and_wait(page: Browser) -> str:
    """Make the decision that is shown; gives what the command line said of it."""
    click(page, "main form button")
    page.wait_for("/: (not )?done/.test(document.querySelector('h1')?.textContent)")
    return str(page.evaluate("document.querySelector('main').innerText"))


def audit(page: Browser, *schemes: str) -> None:
    """Assert that what is shown passes axe; in both schemes, where none is named."""
    page.evaluate(f"{AXE}; 0")
    for scheme in schemes or ("light", "dark"):
        page.set_scheme(scheme)
        found = json.loads(page.evaluate(AUDIT))
        assert found == [], (scheme, page.evaluate("location.href"))


def tab_to(page: Browser, selector: str) -> None:
    """Press Tab until the focus is there."""
    for _ in range(60):
        page.press("Tab")
        if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
            return
    raise AssertionError(f"the keyboard does not reach {selector}")
