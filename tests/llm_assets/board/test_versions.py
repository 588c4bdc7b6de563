"""The pages about versions: one, all of them, two compared, and the page that stays."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from dagster import MetadataValue

from llm_assets.assets.verdict import render_page
from llm_assets.board.server import build_app
from llm_assets.gate.verdict import GateSettings
from llm_assets.operation_settings import AutomationSettings
from llm_assets.registry.card import page_path, render_card
from tests.browser import browser
from tests.llm_assets.board.conftest import SmallStore, audit, board_of, client_of, page_of, served
from tests.llm_assets.registry.conftest import entry, verdict
from tests.needs import needs


@pytest.mark.parametrize(
    ("price", "told"),
    [
        (None, "trained for 2 h 0 min."),
        (1.5, "trained for 2 h 0 min, which cost 3.00 at 1.5 per hour."),
    ],
)
def test_a_version_made_on_ones_own_machine_says_how_long_and_for_how_much(
    small: SmallStore, price: float | None, told: str
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    board = board_of(small)
    board.settings.automation = AutomationSettings(cost_per_hour=price)
    with client_of(board) as client:
        for path in ("/versions", "/versions/1", "/versions/compare?a=0&b=1"):
            assert told in client.get(path).text, path
        assert "Compare with version 0" in client.get("/versions/1").text
        assert "Compare with version" not in client.get("/versions/0").text


def test_the_settings_that_differ_are_those_alone(small: SmallStore) -> None:
    corpus = small.clean("1", {"one": "x"})
    for rate in (0.001, 0.002):
        small.train(corpus, ["x"], settings={"steps": 9, "optimizer": {"learning_rate": rate}})
    shown, same = (page_of(small, f"/versions/compare?a=1&b={other}") for other in (2, 1))
    _, _, differ = shown.partition("Settings that differ")
    cells = re.findall(r'<td class="id">([^<]*)</td>', differ)
    assert cells == ["checkpoint.optimizer.learning_rate", "0.001", "0.002"]
    assert "None of those recorded for both versions." in same


@pytest.mark.parametrize("unit", ["bits per byte", "exact match"])
def test_figures_of_two_metrics_are_not_compared(small: SmallStore, unit: str) -> None:
    corpus = small.clean("1", {"one": "x"})
    for number, of in enumerate(("bits per byte", unit)):
        evaluation = small.examine(won=number, lost=1, unit=of)
        small.train(corpus, ["x"], eval_metrics=evaluation.fingerprint)
    shown = page_of(small, "/versions/compare?a=1&b=2")
    assert ("Source, bits per byte" in shown) == (unit == "bits per byte")
    assert ("No document was measured for both versions by one metric" in shown) == (
        unit == "exact match"
    )


COMPARED = "; the gate compared it with version 0."


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("promoted", f"Promoted by the gate{COMPARED}"),
        ("not promoted", f"Rejected by the gate{COMPARED}"),
        # It serves, so it is not said to be rejected alone.
        ("again", f"Promoted by the gate, which rejected it when it was judged again{COMPARED}"),
        ("approve", f"Approved by Ada{COMPARED}"),
        ("reject", f"Rejected by Ada{COMPARED}"),
        ("no verdict", "Not judged."),
        ("base", "The base model."),
    ],
)
def test_what_became_of_a_version_is_told_in_words(small: SmallStore, case: str, told: str) -> None:
    version = small.train(small.clean("1", {"one": "x"}), ["x"], promoted=case != "approve")
    number = 0 if case == "base" else 1
    if case == "not promoted":
        refused = verdict("weights-2", "base", promoted=False)
        number = small.registry.enter(entry("weights-2"), refused).version
    elif case == "again":
        stricter = GateSettings(smallest_effect=0.5)
        again = verdict(version.weights, "base", promoted=False, thresholds=stricter)
        small.registry.enter(entry(version.weights), again)
    elif case == "reject":
        small.registry.reject(1, "Ada", "wrong")
    state = small.registry.state()
    if case == "no verdict":
        state.verdicts.clear()
    registry = SimpleNamespace(state=lambda: state)
    for path in ("/versions", f"/versions/{number}"):
        assert told in " ".join(page_of(small, path, registry=registry).split()), path


@pytest.mark.parametrize(("edited", "won"), [(0, 3), (1, 2), (3, 0)])
def test_questions_about_a_fact_that_was_edited_between_two_exams_are_left_out(
    small: SmallStore, edited: int, won: int
) -> None:
    corpus = small.clean("1", {"one": "x"})
    for evaluation in (small.examine(won=0, lost=3), small.examine(won=3, lost=0, edited=edited)):
        small.train(corpus, ["x"], eval_metrics=evaluation.fingerprint)
    shown = page_of(small, "/versions/compare?a=1&b=2")
    assert (f"Questions won by version 2: {won}" in shown) == (won > 0)
    assert ("The exam, by relation" in shown) == (won > 0)
    told = f"{edited} question{'s' * (edited > 1)} not compared: the wording or the correct answer"
    assert (told in shown) == (edited > 0) == ("not compared" in shown)


def test_a_figure_without_an_interval_is_not_said_to_have_one(small: SmallStore) -> None:
    version = small.train(small.clean("1", {"one": "x"}), ["x"])
    figures = {"perplexity": {"candidate": {"value": 20.0, "low": None, "high": None}}}
    measured = version.model_copy(update={"evaluation": {"metrics": figures}})
    state = small.registry.state()
    state.versions[-1] = measured
    assert "| perplexity | candidate | 20.0000 | - |" in render_card(state, measured)
    registry = SimpleNamespace(state=lambda: state)
    shown = page_of(small, "/versions/1", registry=registry)
    assert re.search(r"20\.00</td><td[^>]*>-</td>", shown) and "not finite" not in shown


def test_an_address_past_the_oldest_version_leads_to_the_newest(small: SmallStore) -> None:
    for first in (1, 5):
        shown = page_of(small, f"/versions?from={first}")
        assert 'The list ends before this page. <a href="/versions">' in shown


def test_the_page_that_stays_is_shown_as_it_is_and_may_run_nothing(small: SmallStore) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    small.store.write_bytes(page_path("manual", 1), b"<h1>Version 1</h1>")
    with client_of(board_of(small)) as client:
        answer = client.get("/versions/1/page")
        assert answer.text == "<h1>Version 1</h1>" and answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and policy.endswith("; sandbox")
        assert "script-src" not in policy and answer.headers["x-content-type-options"] == "nosniff"
        assert 'href="/versions/1/page"' in client.get("/versions/1").text
        Path(small.store.root, page_path("manual", 1)).unlink()
        assert client.get("/versions/1/page").status_code == 404
        assert "/versions/1/page" not in client.get("/versions/1").text
    card = Path(small.store.root, page_path("manual", 1)).with_name("card.md").read_text()
    assert "[page.html](page.html), as of its verdict" in card


@needs("Chromium")
def test_the_page_that_stays_passes_an_audit(small: SmallStore, tmp_path: Path) -> None:
    version = small.train(small.clean("1", {"one": "x"}), ["x"])
    card = render_card(small.registry.state(), version)
    sections = {"Training": {"loss": 2.0, "samples": MetadataValue.md("| a | b |\n|---|---|\n")}}
    content = render_page("Version 1", card, sections, "checkpoint " * 400).encode()
    small.store.write_bytes(page_path("manual", 1), content)
    with served(build_app(board_of(small))) as address, browser(tmp_path) as page:
        page.open(f"{address}/versions/1/page")
        assert page.evaluate("document.querySelector('h1').textContent") == "Version 1"
        # In the sandbox of that route no script of an audit ends either.
        page.open(Path(small.store.root, page_path("manual", 1)).as_uri())
        audit(page)
