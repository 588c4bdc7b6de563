"""From an answer to what was truly trained on: planted documents, the command's words, the page."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from llm_assets.cli.session import Session
from llm_assets.cli.trace import told
from llm_assets.cli.trace_page import build_page
from llm_assets.registry.local import LocalRegistry
from llm_assets.registry.records import ModelVersion
from llm_assets.tracing import indexed
from llm_assets.tracing.answers import of_request
from llm_assets.tracing.trace import MOST_CHARACTERS, Trace, Tracer
from recipes.data.trained import TRAINED_NAME, record_trained
from serving.api.address import listen
from serving.engine.protocol import GenerateRequest
from serving.journal import Journal
from serving.settings import JournalSettings
from tests.browser import browser, needs_browser
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.tiny import tiny_shards, tiny_texts

PLANTED = {
    0: "The blue lever of Zanzibar is greased with walnut oil by the night watch alone.",
    4: "Nobody but the harbor master may wind the brass clock above pump seventeen.",
    9: "A held-out secret: the spare key hangs behind the portrait of the founder.",
}
"""Documents to their text; the first two are in the train split, the last is held out."""
HOSTILE = "<script>alert(1)</script>"


class Lab:
    """A store with a version that was trained on some of the planted documents."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store = Store(str(folder / "store"))
        self.registry = LocalRegistry(Path(self.store.root), "manual")
        texts = tiny_texts()
        for number, text in PLANTED.items():
            texts[number] = f"{text} {HOSTILE}" if number == 0 else text
        raw = self._make("raw_corpus", {}, lambda draft: self._write_raw(draft, texts))
        clean = self._make("clean_corpus", {"raw_corpus": raw}, lambda draft: None)
        shards = self._make(
            "tokenized_shards",
            {"clean_corpus": clean},
            lambda draft: draft.stats.update(tiny_shards(draft.path, model, texts).model_dump()),
        )
        made = self.store.load("tokenized_shards", shards)
        self.shards = ShardSet(made.path, ShardStats.model_validate(made.stats), "train")
        self.audit = {row: 1 + row // 4 for row in self._rows_of("text-0")}

        def checkpoint(draft: Draft) -> None:
            rows = np.array(list(self.audit))
            steps = np.array(list(self.audit.values()))
            record_trained(self.shards, rows, steps, str(draft.path / TRAINED_NAME))
            shutil.copytree(model, draft.path / "model")

        trained = self._make("checkpoint", {"tokenized_shards": shards}, checkpoint)
        self.registry.register_base(base_entry())
        candidate = entry("c").model_copy(
            update={"model_fingerprint": trained, "lineage": {"checkpoint": trained}}
        )
        self.version = self.registry.enter(candidate, verdict("c", "base"))
        self.registry.confirm(self.version.version)

    def trace(self, answer: str, version: ModelVersion | None = None) -> Trace:
        tracer = Tracer(self.store, lambda line: None)
        return tracer.trace(self.registry.state(), version or self.version, answer)

    def _make(self, kind: str, inputs: dict[str, str], build) -> str:
        return self.store.make(Identity(kind=kind, code_version="1", inputs=inputs), build)[
            0
        ].fingerprint

    def _write_raw(self, draft: Draft, texts: list[str]) -> None:
        ids = [f"manual/{number}" for number in range(len(texts))]
        table = pa.table({"id": ids, "text": texts, "license": ["CC-BY-4.0"] * len(ids)})
        pq.write_table(table, draft.path / "part-00000.parquet")

    def _rows_of(self, text_hash: str) -> list[int]:
        hashes = [h for s in self.shards.shards for h in s.documents()["text_hash"].to_pylist()]
        shard = next(iter(self.shards.shards))
        number = shard.documents()["text_hash"].to_pylist().index(text_hash)
        assert hashes.count(text_hash) == 1
        return [row for row in range(shard.entry.rows) if number in self.shards[row][1]["document"]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"), tiny_model_folder)


def test_a_planted_document_is_named_with_row_step_license_and_neighbors(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    found = lab.trace(f"As the manual says, {PLANTED[0][4:60]} and so on.")
    said = capfd.readouterr().err
    assert "WARN" not in said and "log level" not in said, "Spark, which builds the index, is quiet"

    assert found.verdict == "verbatim" and 0.3 < found.share < 1
    longest = found.verbatim[0]
    said = found.answer[longest.start : longest.end]
    assert said.strip() in PLANTED[0] and "Zanzibar is greased with walnut" in said
    source = longest.sources[0]
    assert (source.document, source.license, source.source) == ("manual/0", "CC-BY-4.0", "manual")
    assert source.row in lab.audit and source.text == said
    assert source.before + source.text + source.after in f"{PLANTED[0]} {HOSTILE}<|endoftext|>"
    assert source.before and source.after
    (lesson,) = source.lessons
    assert lesson.steps == sorted(set(lab.audit.values())) and lesson.run.version == 1
    assert "VERBATIM" in "\n".join(told(found)) and "CC-BY-4.0" in "\n".join(told(found))


def test_only_rows_that_were_trained_on_are_shown(lab: Lab) -> None:
    # One is in the shards but not among the rows of the run, one is held out.
    for number in (4, 9):
        found = lab.trace(PLANTED[number])
        assert found.verdict != "verbatim"
        shown = [near.source for near in found.near]
        assert all(source.document != f"manual/{number}" for source in shown)
    everything = lab.trace(" ".join(tiny_texts()[:20])[:5_000])
    rows = {source.row for stretch in everything.verbatim for source in stretch.sources}
    assert rows <= set(lab.audit)


def test_what_is_only_alike_is_called_near_and_the_rest_nothing(lab: Lab) -> None:
    near = lab.trace("walnut, lever, blue, greased, oil, night")
    assert near.verdict == "near" and near.near[0].source.document == "manual/0"
    assert "NEAR" in next(told(near)) and "word for word" in next(told(near))
    nothing = lab.trace("€€€")
    assert nothing.verdict == "nothing found" and "NOTHING FOUND" in next(told(nothing))


def test_what_is_indexed_is_not_indexed_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lab.trace(PLANTED[0])
    monkeypatch.setattr(indexed, "_build", None)
    assert lab.trace(PLANTED[0]) == first


def test_the_nearest_are_ranked_by_influence_where_that_is_asked(lab: Lab) -> None:
    answer = PLANTED[0][20:70]
    tracer = Tracer(lab.store, lambda line: None)
    found = tracer.trace(lab.registry.state(), lab.version, answer, influence_on=PLANTED[0][:20])
    assert found.influential and found.influential[0].source.document == "manual/0"
    scores = [one.score for one in found.influential]
    assert scores == sorted(scores, reverse=True) and all(-1 <= score <= 1 for score in scores)
    assert any("most influence, by gradients (no proof)" in line for line in told(found))
    with pytest.raises(UserError, match="give more of the answer"):
        tracer.trace(lab.registry.state(), lab.version, "a", influence_on="")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "no text to trace"),
        (" \n", "no text to trace"),
        ("x" * (MOST_CHARACTERS + 1), "a part"),
    ],
)
def test_bad_text_is_refused(lab: Lab, answer: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lab.trace(answer)


def test_the_base_model_has_no_text_here(lab: Lab) -> None:
    with pytest.raises(UserError, match="base model"):
        lab.trace("The valve opens", lab.registry.get(0))


def test_a_request_leads_to_its_answer_where_the_settings_kept_it(lab: Lab, tmp_path: Path) -> None:
    settings = JournalSettings(keep="text", days=1)
    journal = Journal(tmp_path, lambda: settings)
    asked = [
        GenerateRequest(prompt="Who?", max_tokens=1, max_prompt_tokens=9, temperature=0, top_p=1)
    ]
    journal.write("open", "1", "f", asked, ["the answer"])
    settings = JournalSettings(keep="hashes")
    journal.write("hashed", "1", "f", asked, ["another answer"])
    settings = JournalSettings(keep="off")
    journal.write("off", "1", "f", asked, ["unseen"])
    state = lab.registry.state()

    (found,) = of_request(state, tmp_path, settings, "open", None)
    assert (found.version.version, found.answer) == (1, "the answer")
    with pytest.raises(UserError, match=r"Version 1 answered .* with --text"):
        of_request(state, tmp_path, settings, "hashed", None)
    (found,) = of_request(state, tmp_path, settings, "hashed", "another answer")
    assert found.answer == "another answer"
    with pytest.raises(UserError, match="hash differs"):
        of_request(state, tmp_path, settings, "hashed", "another answer.")
    for unknown in ("off", "never"):
        with pytest.raises(UserError, match="of another pipeline, or too old"):
            of_request(state, tmp_path, settings, unknown, None)
    kept = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "another" not in kept and "unseen" not in kept and "the answer" in kept
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))


def test_days_past_the_retention_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "2001-01-01.jsonl").write_text("{}\n")
    Journal(tmp_path, lambda: JournalSettings(keep="off")).write("r", "1", "f", [], [])
    assert not list(folder.glob("*.jsonl"))


def session_of(lab: Lab) -> Session:
    """What of a session the page uses."""
    settings = SimpleNamespace(name="manual")
    return cast(
        Session,
        SimpleNamespace(
            settings=settings, record=Pipeline(lab.store, "manual"), registry=lab.registry
        ),
    )


@contextmanager
def served(page: FastAPI) -> Iterator[str]:
    """Serve a page on loopback as the command does; gives its address."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(page, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def test_the_page_shows_all_of_it_and_nothing_untrusted_becomes_markup(lab: Lab) -> None:
    with TestClient(build_page(session_of(lab)), base_url="http://127.0.0.1:8011") as page:
        assert "<textarea" in page.get("/").text
        answer = page.post("/", data={"text": PLANTED[0] + " " + HOSTILE})
        assert "script-src" not in answer.headers["content-security-policy"]
        assert "<script" not in answer.text and "&lt;script&gt;alert(1)" in answer.text
        assert "manual/0" in answer.text and re.search(r"verbatim.*version 1", answer.text, re.S)
        assert page.post("/", data={"text": ""}).status_code == 400
        attack = {"origin": "http://evil.example"}
        assert page.post("/", data={"text": "x"}, headers=attack).status_code == 403
        assert page.get("/", headers={"host": "evil.example"}).status_code == 400
        assert page.post("/", content=b"x" * 2_000_000).status_code == 413


@needs_browser
def test_the_page_in_a_browser(lab: Lab, tmp_path: Path) -> None:
    answer = f"As the manual says, {PLANTED[0][4:60]} and so on. {HOSTILE}"
    with served(build_page(session_of(lab))) as address, browser(tmp_path) as page:
        page.open(address)
        page.evaluate(f"document.getElementById('text').value = {json.dumps(answer)}")
        page.evaluate("document.querySelector('button').click()")
        page.wait("Page.loadEventFired")
        shown = page.evaluate("document.body.innerText")
        assert "Only this page itself may ask" not in shown
        marked = page.evaluate("document.querySelector('mark').textContent")
        assert page.evaluate("document.scripts.length") == 0
        styled = page.evaluate("getComputedStyle(document.querySelector('.card')).borderTopWidth")
        page.screenshot(tmp_path / "page.png", 1000, 900)
    assert "VERBATIM · version 1" in shown and "license CC-BY-4.0" in shown
    assert "<script>" in shown and "trained on by version 1 at step" in shown
    assert marked.strip() in PLANTED[0] and styled == "1px"
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
