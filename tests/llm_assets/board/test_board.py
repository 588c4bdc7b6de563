"""The board in a real browser: its pages, what attacks them, and what is decided there."""

import asyncio
import html
import json
import re
import secrets
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

import psutil
import pytest

from artifacts.errors import UserError
from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store.identity import Identity
from artifacts.store.manifest import dump_with_checksum
from artifacts.store.pipelines import Pipeline
from artifacts.store.rewrite import rewrite
from artifacts.store.store import Draft, Store
from llm_assets.board import engines, now
from llm_assets.board.pages import Board
from llm_assets.board.server import build_app, open_board
from llm_assets.config import load_settings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.forgetting.forgotten_list import WithdrawnVersion, add_to_list
from llm_assets.registry.base import STATE_NAME, LocalRegistry
from llm_assets.registry.card import weights_fingerprint
from llm_assets.tracing.training_text import lessons_of, runs_behind
from recipes.spec import read_metrics
from scripts.screenshots import BOARD, click
from serving.engine.process import EngineProcess
from serving.settings import EndpointSettings, OpenAIEngine
from serving.state import StateFolder
from tests.browser import browser
from tests.conftest import ROOT
from tests.llm_assets.board.conftest import (
    BEARER,
    HOSTILE,
    NOTHING,
    SmallStore,
    audit,
    board_of,
    client_of,
    endpoint,
    page_of,
    served,
)
from tests.llm_assets.registry.conftest import entry, verdict
from tests.llm_assets.trained_store import TrainedStore, write_clean
from tests.needs import needs
from tests.stand_ins.google import LocalGoogle
from tests.tiny import tiny_texts
from tests.waiting import wait_until

PLANTED = "Seven jars of quince jelly stand behind the boiler for whoever mends the whistle."
ADDED = [
    f"Bulletin {n}. The Marlow crane lifts {n} barrels. Its hook is of Riga." for n in range(20)
]
PAGES = (
    *BOARD.values(),
    *("/versions/2", "/text?search=jelly", "/text/read?times=1", "/text/document?id=manual%2F0"),
    *(
        "/decide/work/1",
        "/sign-in",
        f"/text?search={quote(HOSTILE)}",
        f"/ask?prompt={quote(HOSTILE)}",
    ),
    f"/decide?action=forget&documents={quote(HOSTILE)}&version={quote(HOSTILE)}",
)
"""Those that the pictures of the docs are taken of, and the others."""
MOST_BYTES = 150_000
LINK = re.compile(r'href="([^"#]*)')


class Shop(TrainedStore):
    """Two versions of real runs over text that attacks whoever shows it."""

    def __init__(self, folder: Path, model: Path) -> None:
        texts = tiny_texts()
        for number in range(0, 60, 10):
            texts[number] = f"{PLANTED[number:] + PLANTED[:number]} {HOSTILE}"
        super().__init__(folder, model, texts)
        first = self.train(steps=12)
        self.first = first.model_fingerprint
        self.read = next(n for n in range(0, 60, 10) if self.first_step(first, f"text-{n}"))
        self.documents = texts + ADDED
        self._texts = self.documents
        inputs = {"raw_corpus": "with more documents"}
        self._clean = self._make(
            "clean_corpus", inputs, lambda draft: write_clean(draft, self.documents)
        )
        self.cut(3)
        self.train(steps=12)
        # Without its last sign, which a decision may not hold.
        self.registry.approve(2, HOSTILE[:-1], HOSTILE[:-1])
        clean = self.store.load("clean_corpus", self._clean)
        self.record.advance(clean)
        self.record.advance(self._shards)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"), tiny_model_folder)


@needs("Chromium")
def test_pages_pass_an_audit_at_every_width_and_nothing_in_them_runs(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No page is loaded again while it is looked at.
    monkeypatch.setattr(now, "REFRESH_SECONDS", 3_600)
    with served(build_app(board_of(shop))) as address, browser(tmp_path) as page:
        for width, scheme in ((320, "light"), (1920, "dark")):
            page.resize(width, 900)
            for path in PAGES:
                page.open(address + path)
                page.wait_for("document.readyState === 'complete'")
                shown = page.evaluate("document.querySelector('main').innerText")
                assert shown and "cannot be shown" not in shown, (path, shown)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                assert page.evaluate("window.ran") is None, path
                assert page.evaluate("document.querySelectorAll('main img').length") == 0, path
                audit(page, scheme)


def test_a_training_says_how_far_it_is_and_two_that_ended_show_their_losses(shop: Shop) -> None:
    making = [{"asset": "checkpoint", "fingerprint": "1a2b", "progress": "step 3 of 10"}]
    with client_of(board_of(shop, status=lambda: NOTHING | {"making": making})) as client:
        assert "checkpoint is being built: step 3 of 10" in client.get("/").text
    compared = page_of(shop, "/versions/compare?a=1&b=2")
    beside_the_base = page_of(shop, "/versions/compare?a=0&b=1")
    assert compared.count("<polyline") == 2 and beside_the_base.count("<polyline") == 1
    losses = [record["loss"] for record in read_metrics(shop.run_folder(shop.first))]
    assert f"{losses[0]:.3f} → {losses[-1]:.3f} in 12 steps" in compared


def test_the_first_page_names_documents_that_the_version_before_had_not_read(shop: Shop) -> None:
    shown = page_of(shop)
    listed = re.findall(r'manual/(\d+)</a> <span class="small">version 2 at step', shown)
    assert int(listed[0]) >= len(shop.documents) - len(ADDED), "added text comes first"
    assert "documents that the version before had not</h1>" in shown
    assert "put it into service" in shown
    assert "before that, version 1 served from" in shown
    for number in listed:
        assert shop.documents[int(number)].strip()[:40] in shown
    state = shop.registry.state()
    texts = [f"text-{number}" for number in listed]
    lessons = lessons_of(runs_behind(shop.store, state, state.get(1)), texts)
    assert not any(lessons.values())


def test_what_a_page_has_read_is_read_again_once_it_was_rewritten(
    shop: Shop, small: SmallStore
) -> None:
    (part,) = Path(shop.record.find_current("clean_corpus").path).glob("part-*")
    with client_of(board_of(shop)) as client:
        shown = client.get("/").text
        part.rename(part.with_name("away"))
        try:
            assert client.get("/").text == shown
        finally:
            part.with_name("away").rename(part)
    texts = ["Seven jars of jelly."]
    clean = small.make("clean_corpus", "1", lambda draft: write_clean(draft, texts))
    with client_of(board_of(small)) as client:
        assert "<li>too short: 1</li>" in client.get("/text").text
        rewrite(clean, [], clean.stats | {"dropped": {}}, "texts were forgotten")
        assert "too short" not in client.get("/text").text


def test_pages_are_small_and_say_what_a_browser_may_do(shop: Shop) -> None:
    with client_of(board_of(shop)) as client:
        for path in (*PAGES, "/board.css", "/board.js"):
            answer = client.get(path)
            assert answer.status_code == 200 and len(answer.content) < MOST_BYTES, path
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy and "script-src 'self'" in policy
            assert HOSTILE[:20] not in answer.text and "\u202e" not in answer.text, path
        assert client.get("/", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/versions/99").status_code == 400
        assert client.get("/versions?from=-1").status_code == 400
        assert client.get("/nowhere").status_code == 404
        lost = client.get(f"{str(client.base_url).rstrip('/')}//evil.example/")
        assert lost.status_code == 404 and '"//evil' not in lost.text


def test_what_was_asked_on_the_page_leads_to_documents_about_it(shop: Shop) -> None:
    with client_of(board_of(shop)) as client:
        fields = {"text": "\u20ac\u20ac\u20ac", "version": "1"}
        asked = fields | {"question": shop.documents[shop.read]}
        alone, near = (client.post("/ask/trace", data=data).text for data in (fields, asked))
        assert "share words with it or its question" in near and near != alone


@needs("Chromium")
def test_an_answer_is_streamed_and_a_click_on_a_span_names_document_and_step(
    shop: Shop, tmp_path: Path
) -> None:
    board, said = board_of(shop), shop.documents[shop.read]
    with (
        endpoint(board, [said[:30], said[30:]]),
        served(build_app(board)) as address,
        browser(tmp_path) as page,
    ):
        page.open(f"{address}/ask")
        page.evaluate(f"document.getElementById('prompt').value = {json.dumps(HOSTILE)}")
        click(page, "#go")
        click(page, ".traced button.span")
        card = "document.querySelector('.card[data-version=\"1\"]')"
        shown = page.evaluate(f"{card}.innerText")
        span = page.evaluate("document.querySelector('.traced button.span').textContent")
        link = page.evaluate("document.querySelector('.stretch:not([hidden]) a').textContent")
        assert page.evaluate("window.ran") is None
        audit(page)
        page.evaluate("document.getElementById('line').click()")
        click(page, "#go")
        answer = f"{card}.querySelector('.answer').textContent.trim()"
        page.wait_for(f"{answer} === {json.dumps(said[:30].strip())}")
    assert span.strip() in shop.documents[int(link.removeprefix("manual/"))] and "<script>" in shown
    assert re.search(r"Trained on by version 1 at steps? \d", shown)


@needs("Chromium")
def test_an_endpoint_that_is_down_is_said_before_and_after_it_is_asked(
    shop: Shop, tmp_path: Path
) -> None:
    board = board_of(shop)
    with served(build_app(board)) as address, browser(tmp_path) as page:
        StateFolder(endpoint_folder(board.settings)).status.path.unlink(missing_ok=True)
        page.open(f"{address}/ask")
        assert "is not running" in page.evaluate("document.querySelector('main').innerText")
        with endpoint(board, []):
            page.open(f"{address}/ask")
        page.evaluate("document.getElementById('prompt').value = 'The valve'")
        click(page, "#go")
        page.wait_for("document.querySelector('.answer.fault')?.textContent")
        assert "does not" in page.evaluate("document.querySelector('.answer.fault').textContent")


@pytest.fixture
def apart(tmp_path: Path, tiny_model_folder: Path) -> Board:
    """A base and a candidate of real artifacts, of which none serves."""
    store = Store(str(tmp_path / "store"))
    registry = LocalRegistry(tmp_path / "store", "manual")
    for kind in ("base_model", "checkpoint"):

        def write(draft: Draft, kind: str = kind) -> None:
            shutil.copytree(tiny_model_folder, draft.path / "model")
            (draft.path / "model/kind.txt").write_text(kind)

        inputs = {"tokenized_shards": "gone"}
        made, _ = store.make(Identity(kind=kind, code_version="1", inputs=inputs), write)
        found = entry(weights_fingerprint(made, "model/")).model_copy(
            update={"model_url": f"{made.url}/model", "model_fingerprint": made.fingerprint}
        )
        if kind == "base_model":
            base = registry.register_base(found)
        else:
            registry.enter(found, verdict(found.weights, base.weights, promoted=False))
    parts = SimpleNamespace(store=store, record=Pipeline(store, "manual"), registry=registry)
    board = board_of(parts)
    board.settings.endpoint = EndpointSettings(engine="transformers")
    return board


def engines_of(board: Board) -> list[str]:
    """The models of the engines that run for its versions."""
    running = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # One that has just ended.
            running.append(" ".join(process.cmdline()))
    return [line for line in running if "engine.program" in line and board.store.root in line]


@pytest.mark.soak
@needs("Chromium")
def test_versions_that_do_not_serve_answer_side_by_side_by_engines_that_end_when_idle(
    apart: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = "[...document.querySelectorAll('.card {}')].map((one) => one.textContent)"
    with served(build_app(apart)) as address, browser(tmp_path) as page:
        page.open(f"{address}/ask")
        assert engines_of(apart) == []
        page.evaluate("for (const box of document.querySelectorAll('.card input')) box.click()")
        page.evaluate("document.getElementById('prompt').value = 'The valve'")
        click(page, "#go")
        said = texts.format(".time")
        wait_until(lambda: page.evaluate(f"/version 0, .*version 1, /.test({said})"))
        base, candidate = page.evaluate(texts.format(".answer"))
        assert base and base == candidate, "both are the same model"
        assert len(engines_of(apart)) == 2
        monkeypatch.setattr(engines, "IDLE_SECONDS", 0.0)
        wait_until(lambda: not engines_of(apart))


def test_an_engine_that_runs_neither_waits_nor_ends_for_one_that_does_not_run_yet(
    apart: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "The valve", "max_tokens": 2}
    paths = [f"/ask/versions/{number}/v1/completions" for number in range(2)]
    is_loading, may_go_on = threading.Event(), threading.Event()

    class Loading(EngineProcess):
        async def start(self) -> None:
            is_loading.set()
            await asyncio.to_thread(may_go_on.wait)
            raise UserError("it was only loading")

    with client_of(apart) as client, ThreadPoolExecutor() as others:
        client.post(paths[0], json=body).raise_for_status()
        monkeypatch.setattr(engines, "EngineProcess", Loading)
        asked = others.submit(client.post, paths[1], json=body)
        try:
            assert is_loading.wait(60)
            answer = others.submit(client.post, paths[0], json=body).result(60)
        finally:
            may_go_on.set()
        assert answer.status_code == 200 and "only loading" in asked.result(60).text
        monkeypatch.setattr(engines, "MOST_ENGINES", 1)
        folder = Path(apart.registry.get(1).model_url)
        (folder / "kind.txt").write_text("damaged in between")
        assert client.post(paths[1], json=body).status_code == 503
        assert len(engines_of(apart)) == 1


def test_a_version_that_cannot_be_asked_says_why(
    apart: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "1", "prompt": "The valve"}
    with client_of(apart) as client:
        monkeypatch.setattr(engines, "MEMORY_FACTOR", 10**9)
        answer = client.post("/ask/versions/1/v1/completions", json=body)
        assert answer.status_code == 503 and "GB are free" in answer.json()["error"]["message"]
        assert "no version 7" in client.post("/ask/versions/7/v1/completions", json=body).text
        # As any website can have a browser fetch it, where a version that can be asked would start.
        fetched = client.get("/ask/versions/7/v1/completions")
        assert fetched.status_code == 405 and fetched.headers["allow"] == "POST"
        withdrawn = WithdrawnVersion(version=1, checkpoint="gone")
        add_to_list(apart.store, "manual", withdrawn=[withdrawn])
        assert "was withdrawn on" in client.get("/ask").text
        assert "was withdrawn on" in client.post("/ask/versions/1/v1/completions", json=body).text
        fields = {"action": "approve", "version": "1", "name": "Ada", "reason": "better"}
        preview = client.post("/decide/confirm", data=fields, headers=BEARER)
        assert preview.status_code == 400 and "was withdrawn on" in preview.text
        shutil.rmtree(Path(apart.store.root, "base_model"))
        assert "no longer in the store" in client.get("/ask").text
        apart.settings.endpoint = EndpointSettings(
            engine=OpenAIEngine(address="http://127.0.0.1:1")
        )
        assert "has only one model" in client.get("/ask").text
        apart.settings.platform = "google_cloud"
        shown = client.get("/ask").text
        assert "is on Vertex AI" in shown and "Its weights are in Cloud Storage" in shown


def test_a_pipeline_in_the_cloud_has_its_key_on_this_machine(
    shop: Shop, google: LocalGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    settings = load_settings(ROOT / "config" / "llama_bigquery.yaml")
    board = open_board(settings, shop.record, shop.registry, lambda: NOTHING, ["false"])
    (kept,) = tmp_path.rglob("board.key")
    assert board.key == kept.read_text() and str(kept) in board.key_name
    with client_of(board) as client:
        assert "is on Vertex AI" in client.get("/ask").text
        bearer = {"authorization": f"Bearer {board.key}"}
        traced = client.post("/ask/trace", data={"text": "The valve"}, headers=bearer)
        assert traced.status_code == 200


def test_without_the_key_nothing_is_decided_and_no_other_page_may_ask(shop: Shop) -> None:
    fields = {"action": "rollback", "name": "Ada", "reason": "worse"}
    with client_of(board_of(shop)) as client:
        for path in ("/decide/confirm", "/decide/do"):
            answer = client.post(path, data=fields)
            assert answer.status_code == 303
            assert answer.headers["location"] == "/sign-in?next=/decide", "a page that can be read"
        assert client.post("/sign-in", data={"key": "another"}).status_code == 403
        shown = client.get("/decide?action=forget&documents=manual%2F0").text
        (link,) = {html.unescape(path) for path in LINK.findall(shown) if "sign-in" in path}
        (there,) = re.findall(r'name="next" value="([^"]*)"', client.get(link).text)
        assert html.unescape(there) == "/decide?action=forget&documents=manual%2F0"
        taken = client.post("/sign-in", data={"key": "the key", "next": "//evil.example"})
        assert taken.headers["location"] == "/"
        cookie = taken.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie
        # The form's version is of the other decisions.
        shown = client.post("/decide/confirm", data=fields | {"version": "2"}).text
        assert "What would change" in shown and 'name="version" value=""' in shown
        attack = {"origin": "http://evil.example"}
        assert client.post("/decide/do", data=fields, headers=attack).status_code == 403
        assert "Look first at what" in client.post("/decide/do", data=fields).text
        assert client.post("/decide/confirm", content=b"x" * 2_000_000).status_code == 413
    with client_of(board_of(shop, is_open=False)) as client:
        to = client.get("/versions/compare?a=2&b=5").headers["location"]
        (there,) = re.findall(r'name="next" value="([^"]*)"', client.get(to).text)
        assert html.unescape(there) == "/versions/compare?a=2&b=5"
        assert client.get("/board.css").status_code == 200
        assert client.get("/text", headers=BEARER).status_code == 200
        assert client.get("/metrics").headers["location"].startswith("/sign-in")
        metrics = client.get("/metrics", headers=BEARER).text
        assert 'llm_assets_readable{part="registry"} 1.0' in metrics


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"action": "approve", "version": "1"}, "needs a name"),
        (
            {"action": "approve", "name": "Ada", "reason": "r", "version": "--help"},
            "not a version number",
        ),
        ({"action": "reject", "name": "Ada", "reason": "r", "version": "77"}, "no version 77"),
        ({"action": "rollback", "name": "A\u0000", "reason": "r"}, "control character"),
        (
            {"action": "forget", "name": "Ada", "reason": "r", "documents": " \n"},
            "one per line",
        ),
        ({"action": "erase"}, "Choose one of"),
    ],
)
def test_a_decision_that_cannot_be_is_refused_in_words(shop: Shop, fields: dict, told: str) -> None:
    with client_of(board_of(shop)) as client:
        answer = client.post("/decide/confirm", data=fields, headers=BEARER)
        assert answer.status_code == 400 and told in answer.text


def test_every_page_is_two_clicks_away_from_the_first(shop: Shop) -> None:
    seen, reached = {"/"}, {"/"}
    with client_of(board_of(shop)) as client:
        for _ in range(2):
            shown = [client.get(path).text for path in reached]
            links = {html.unescape(path) for text in shown for path in LINK.findall(text)}
            reached = {path for path in links if path.startswith("/")} - seen
            seen |= reached
    assert {urlsplit(path).path for path in seen} >= {
        *("/", "/versions", "/versions/0", "/versions/1", "/versions/2", "/versions/compare"),
        *("/ask", "/text", "/decide", "/sign-in"),
    }


def test_a_document_of_five_megabytes_is_shown_in_part(small: SmallStore) -> None:
    text = f"{HOSTILE} {'lorem ipsum ' * 420_000} needle"
    small.make("clean_corpus", "1", lambda draft: write_clean(draft, ["short", text]))
    with client_of(board_of(small)) as client:
        for path in ("/text/document?id=manual%2F1", "/text?search=needle"):
            answer = client.get(path)
            assert answer.status_code == 200 and len(answer.content) < MOST_BYTES, path
            assert "manual/1" in answer.text and HOSTILE[:20] not in answer.text
        assert "The rest is not shown" in client.get("/text/document?id=manual%2F1").text
        assert client.post("/ask/trace", data={"text": text}).status_code == 413


def test_no_version_at_all_and_ten_thousand(shop: Shop, tmp_path: Path) -> None:
    empty = LocalRegistry(tmp_path / "none", "manual")
    with client_of(board_of(shop, registry=empty)) as client:
        assert "Nothing is serving yet" in client.get("/").text
        assert "no version to decide on" in client.get("/decide").text
        assert "There are none yet" in client.get("/versions").text
        assert '<button id="go" disabled>' in client.get("/ask").text
        assert client.get("/versions/compare").status_code == 400
    state = shop.registry.state()
    one = state.versions[-1]
    many = [one.model_copy(update={"version": n, "weights": f"w{n}"}) for n in range(10_000)]
    state = state.model_copy(update={"versions": many})
    crowded = LocalRegistry(tmp_path / "crowded", "manual")
    path = Path(crowded.folder, STATE_NAME)
    path.parent.mkdir(parents=True)
    path.write_bytes(dump_with_checksum(state))
    with client_of(board_of(shop, registry=crowded)) as client:
        first, last = client.get("/versions"), client.get("/versions?from=9950")
        assert "1 to 50 of 10,000" in first.text and "9,951 to 10,000 of" in last.text
        others = [client.get(path) for path in ("/", "/ask", "/decide", "/versions/9999")]
        assert [answer.status_code for answer in others] == [200] * 4
        assert max(len(answer.content) for answer in (first, last, *others)) < MOST_BYTES
    # Pages parse the state once, not each of them again.
    assert crowded.state().versions[7] is crowded.state().versions[7]


def test_a_store_that_is_cleaned_while_pages_are_read_costs_no_more_than_a_page(shop: Shop) -> None:
    folder = Path(shop.record.find_current("clean_corpus").path)
    away, done = folder.with_name("away"), threading.Event()

    def clean() -> None:
        while not done.is_set():
            folder.rename(away)
            away.rename(folder)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        with client_of(board_of(shop)) as client:
            for path in [*PAGES * 3]:
                answer = client.get(path)
                assert answer.status_code == 200 or "cannot be shown" in answer.text, path
    finally:
        done.set()
        cleaner.join()


def test_the_key_is_made_once_for_its_owner_alone_though_several_boards_start_at_once(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, made = board_of(small), secrets.token_urlsafe

    def make_slowly(size: int) -> str:
        time.sleep(0.05)
        return made(size)

    monkeypatch.setattr(secrets, "token_urlsafe", make_slowly)

    def open_some() -> tuple[str, str]:
        with ThreadPoolExecutor(4) as threads:
            parts = given.settings, given.record, given.registry, given.status, []
            boards = [threads.submit(open_board, *parts) for _ in range(4)]
            ((key, name),) = {(one.result().key, one.result().key_name) for one in boards}
        assert len(key) >= 32
        return key, name

    key, name = open_some()
    path = endpoint_folder(given.settings) / "board.key"
    assert open_some() == (key, name) and str(path) in name
    # The disk was full when it was made: nobody gets in by giving nothing.
    path.write_text("")
    assert open_some()[0] != key
    assert path.stat().st_mode & 0o777 == 0o600
