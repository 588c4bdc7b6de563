"""The first page."""

import pytest

from llm_assets.board import now as first_page
from llm_assets.gate.verdict import GateSettings
from tests.llm_assets.board.conftest import NOTHING, SmallStore, board_of, client_of, page_of
from tests.llm_assets.registry.conftest import verdict


@pytest.mark.parametrize(
    ("won", "lost", "told", "heading"),
    [
        (1, 5, "It got 5 questions wrong that the base model got right", "exam shows no gain"),
        (7, 5, "right that the base model got wrong, which may be chance", "exam shows no gain"),
        (0, 1, "It got 1 question wrong that the base model got right", "was the last to serve"),
        (30, 0, "What else it learned", "the answer to 30 questions that"),
        (30, 5, "It got 5 questions wrong that the base model got right", "answer to 30 questions"),
    ],
)
def test_the_first_page_says_what_was_lost_and_whether_what_was_won_is_a_gain(
    small: SmallStore, won: int, lost: int, told: str, heading: str
) -> None:
    evaluation = small.examine(won, lost)
    small.train(small.clean("1", {"lamp": "x"}), ["y"], eval_metrics=evaluation.fingerprint)
    shown, questions = " ".join(page_of(small).split()), page_of(small, "/versions/1")
    assert heading in shown.partition("</h1>")[0]
    assert bool(lost) == ("see the questions" in shown) == ('id="lost"' in questions)
    assert told in shown


@pytest.mark.parametrize(
    ("versions", "heading", "below"),
    [
        (None, "Version 1 was the last to serve", "<p>Nothing.</p>"),
        ({}, "Version 1 was the last to serve", "No version yet"),
        ({"1": 1.0}, "Version 1 is serving", "takes 100% of the requests"),
    ],
)
def test_the_first_page_says_once_whether_anything_serves(
    small: SmallStore, versions: dict[str, float] | None, heading: str, below: str
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["y"])
    served = {"url": "http://127.0.0.1:8010", "phase": "serving", "versions": versions}
    status = NOTHING | {"served": None if versions is None else served}
    shown = page_of(small, status=lambda: status)
    assert heading in shown.partition("</h1>")[0] and below in shown
    assert ("The endpoint is not running." in shown) == (versions is None)
    assert "has been serving" not in shown and "and it took over at" in shown


def test_who_approves_what_serves_already_did_not_put_it_into_service(small: SmallStore) -> None:
    small.train(small.clean("1", {"one": "x"}), ["y"])
    small.registry.approve(1, "Ada", "it reads well")
    shown = page_of(small)
    assert "<b>The gate</b> put it into service" in shown
    assert "Ada" not in shown


def test_a_version_is_compared_with_the_one_of_its_own_evaluation(small: SmallStore) -> None:
    """Though it was judged against another one since, which a rollback brought back."""
    first = small.train(small.clean("1", {"old": "x"}), ["x"])
    small.train(small.clean("2", {"old": "x", "new": "y"}), ["y"])
    last = small.clean("3", {"old": "x", "new": "y", "newest": "z"})
    third = small.train(last, ["z"], eval_metrics="artifact")
    assert third.lineage["eval_metrics"] != third.evaluation["evaluation_fingerprint"]
    # The same documents may have been measured for both verdicts.
    stricter = GateSettings(smallest_effect=0.5)
    again = verdict(third.weights, first.weights, promoted=False, thresholds=stricter)
    small.registry.enter(third, again)
    state = small.registry.state()
    assert state.verdicts_of(third.weights)[-1].against == first.weights
    found = first_page.find_new_text(board_of(small), state, third)
    assert [one.document for one, _ in found.documents] == ["newest"]


def test_the_first_page_tells_alarms_with_their_remedy_and_machines_with_their_price(
    small: SmallStore,
) -> None:
    alarm = {"alert": "DiskNearlyFull", "text": "3 GB <free>.", "remedy": "`llm-assets clean`"}
    job = "job-1 (Batch): RUNNING, 2 a2-highgpu-1g, 1.5 h, 12.66 USD so far"
    quiet = NOTHING | {"running": []}
    for now, refresh in ((quiet, None), (quiet | {"machines": [job], "alarms": [alarm]}, "15")):
        with client_of(board_of(small, status=lambda now=now: now)) as client:
            answer = client.get("/")
        assert answer.headers.get("refresh") == refresh
        assert ("Nothing is running." in answer.text) == (refresh is None)
    assert "3 GB &lt;free&gt;. What to do: <code>llm-assets clean</code>" in answer.text
    assert f"<li>{job}</li>" in answer.text and "llm-assets machines --end" in answer.text


def test_the_first_page_leads_with_an_answer_from_new_text_and_says_who_overruled_the_gate(
    small: SmallStore,
) -> None:
    texts = {"lamp 0": "Lamp 0 is from Riga.", "lamp 1": "Lamp 1 is from Riga."}
    small.train(small.clean("1", {"lamp 0": texts["lamp 0"]}), ["x"])
    evaluation, corpus = small.examine(won=2, lost=1), small.clean("2", texts)
    small.train(corpus, ["y"], promoted=False, eval_metrics=evaluation.fingerprint)
    shown = " ".join(page_of(small).split())
    figure, _, rest = shown.partition("</figure>")
    assert "Where is lamp 1?" in figure and "Where is lamp 0?" in rest
    assert rest.startswith(" <p>It got 1 question wrong")
    assert "<b>Ada</b> put it into service although the gate had rejected it, and" in rest


def test_a_service_that_does_not_run_is_said_with_its_log(small: SmallStore) -> None:
    states = NOTHING | {"services": {"daemon": "fatal", "webserver": "running"}}
    shown = page_of(small, status=lambda: states)
    assert "daemon is not running (fatal)" in shown and "services/daemon.log" in shown
    assert "webserver" not in shown


def test_the_first_page_does_not_look_on_this_machine_for_an_endpoint_on_vertex_ai(
    small: SmallStore,
) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    board = board_of(small)
    with client_of(board) as client:
        assert "The endpoint is not running." in client.get("/").text
        board.settings.platform = "google_cloud"
        shown = client.get("/").text
    assert "The endpoint is not running." not in shown
    assert "The endpoint is on Vertex AI. It last confirmed that it serves" in shown


def test_the_first_page_says_that_it_counted_a_part_of_the_text(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.train(small.clean("1", {"one": "x", "two": "y", "three": "z"}), ["x", "y", "z"])
    for most, told in ((2, "read at least 2 documents"), (4, "read 3 documents")):
        monkeypatch.setattr(first_page, "MOST_LOOKED_AT", most)
        assert told in page_of(small)
