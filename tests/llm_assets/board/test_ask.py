"""The page Ask: answers as they come, and the colors of their sources."""

import re
import threading
from pathlib import Path

import pytest

from llm_assets.board.ask import colors_of, pieces_of
from llm_assets.board.pages import fragment
from llm_assets.board.server import build_app
from llm_assets.endpoint.base import LiveEndpoint
from llm_assets.endpoint.folder import endpoint_status
from llm_assets.tracing.explain import Exposure
from llm_assets.tracing.trace import QuotedSpan, Trace
from llm_assets.tracing.training_text import Source
from scripts.screenshots import click
from tests.browser import browser
from tests.llm_assets.board.conftest import (
    SmallStore,
    board_of,
    client_of,
    endpoint,
    served,
    sign_in,
    tab_to,
)
from tests.needs import needs
from tests.stand_ins.http_server import Answer, json_answer, start_http_server


@needs("Chromium")
def test_a_chat_is_asked_for_by_keyboard_and_its_answer_shown_as_it_comes(
    small: SmallStore, tmp_path: Path
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    board, may_go_on = board_of(small), threading.Event()
    answer = "document.querySelector('.card[data-version=\"1\"] .answer').textContent"
    with (
        endpoint(board, ["The valve ", "opens."], may_go_on),
        served(build_app(board)) as address,
        browser(tmp_path) as page,
    ):
        page.open(f"{address}/ask")
        page.evaluate("document.getElementById('kind').value = 'chat'")
        tab_to(page, "#prompt")
        page.evaluate("document.activeElement.value = ''")
        page.type("What opens?")
        tab_to(page, "#go")
        page.press("Enter")
        page.wait_for(f"{answer} === 'The valve '")
        assert page.evaluate("document.getElementById('stop').disabled") is False
        may_go_on.set()
        page.wait_for(f"{answer} === 'The valve opens.'")
        page.wait_for("document.querySelector('.time').textContent.includes('request')")
        assert page.evaluate("document.getElementById('prompt').value") == "What opens?"


@needs("Chromium")
def test_a_classifier_is_asked_for_a_class_and_its_likeliest_ones_are_shown(
    small: SmallStore, tmp_path: Path
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    board, scores = board_of(small), {"bug": 0.25, "billing": 0.75}
    with (
        endpoint(board, [], scores=scores),
        served(build_app(board)) as address,
        browser(tmp_path) as page,
    ):
        page.open(f"{address}/ask")
        page.evaluate("document.getElementById('kind').innerHTML = '<option>predict</option>'")
        page.evaluate("document.getElementById('prompt').value = 'Where is the invoice?'")
        click(page, "#go")
        page.wait_for("document.body.innerText.includes('billing 75.0%, bug 25.0%')")


@needs("Chromium")
def test_a_model_of_pairs_that_writes_nothing_has_answered(
    small: SmallStore, tmp_path: Path
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    board = board_of(small)
    with endpoint(board, []), served(build_app(board)) as address, browser(tmp_path) as page:
        page.open(f"{address}/ask")
        page.evaluate("document.getElementById('kind').innerHTML = '<option>predict</option>'")
        page.evaluate("document.getElementById('prompt').value = 'Sum this up.'")
        click(page, "#go")
        page.wait_for("document.querySelector('.time').textContent.includes('request id request')")


@needs("Chromium")
def test_a_board_that_was_started_again_asks_who_asks_to_sign_in(
    small: SmallStore, tmp_path: Path
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    board = board_of(small, is_open=False)
    with (
        endpoint(board, ["The valve opens."]),
        served(build_app(board)) as address,
        browser(tmp_path) as page,
    ):
        sign_in(page, address, "/ask")
        page.wait_for("document.getElementById('go')")
        object.__setattr__(board, "session", "another")
        page.evaluate("document.getElementById('prompt').value = 'What opens?'")
        click(page, "#go")
        page.wait_for("location.pathname === '/sign-in' && document.getElementById('key')")


def test_a_proxy_is_told_neither_the_question_nor_the_token(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = board_of(small)
    asked = {"model": "1", "prompt": "a", "max_tokens": 1, "temperature": 0, "stop": [""]}
    told: list[str | None] = []

    def proxy(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        told.append(headers.get("authorization"))
        return json_answer(502, {})

    server = start_http_server(proxy)
    monkeypatch.setenv("ENDPOINT_TOKEN", "secret")
    with endpoint(board, ["opens."], token_variable="ENDPOINT_TOKEN"), client_of(board) as client:
        monkeypatch.setenv("http_proxy", server.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        body = asked | {"stream": True}
        assert "opens." in client.post("/ask/endpoint/v1/completions", json=body).text
        status = endpoint_status(board.settings)
        assert status is not None
        with LiveEndpoint(status) as live:
            assert live.latency() > 0
    server.stop()
    assert told == []


def trace_of(*sources: str) -> Trace:
    """An answer of a word from each source."""
    found = [Source("one", name, "", "", 0, "", "", "", []) for name in sources]
    spans = [QuotedSpan(2 * n, 2 * n + 1, 1, 1, [one]) for n, one in enumerate(found)]
    return Trace(1, " ".join("x" * len(sources)), 1, spans, [], [], len(sources), [])


def test_a_source_has_one_color_in_every_answer_and_the_legend_says_which() -> None:
    known = ["tickets", "manual", "wiki"]
    both, one = trace_of("wiki", "manual"), trace_of("wiki")
    colors = colors_of(known, [both])
    assert colors == {"manual": 0, "wiki": 2}
    assert [piece.color for piece in pieces_of(both, colors) if piece.stretch is not None] == [2, 0]
    assert colors_of(known, [one]) == {"wiki": 2}, "whatever else the answer holds"
    assert colors_of(known, [trace_of("past", "wiki")]) == {"wiki": 2, "past": 3}
    pieces = list(pieces_of(both, colors))
    shown = bytes(fragment("traced.html", traces=[(both, pieces)], colors=colors).body).decode()
    assert re.findall(r'<mark class="s(\d)">(\w+)</mark>', shown) == [
        ("0", "manual"),
        ("2", "wiki"),
    ]
    assert re.findall(r'class="span s(\d)"', shown) == ["2", "0"]


def test_a_document_with_the_whole_answer_is_named_once() -> None:
    document = Exposure("valves.md", "manual", "train", [], [])
    trace = Trace(1, "x", 1, [], [], [document], 1, ["the shards of version 1 were removed."])
    shown = bytes(fragment("traced.html", traces=[(trace, [])], colors={}).body).decode()
    assert shown.count(">valves.md</a>") == shown.count("valves.md</") == 1
    assert '<span class="small">(manual): never trained on</span>' in shown
    assert "valves.md (manual)" not in shown and "were removed.</p>" in shown
    # Words that are like it were not looked for in what is gone.
    assert "Nothing like this answer was found in text" in shown
