"""The first page."""

import pytest

from tests.llm_assets.board.conftest import SmallStore, board_of, client_of


@pytest.mark.parametrize(
    ("won", "lost", "told", "heading"),
    [
        (1, 5, "5 questions that the base model knew", "the answer to 1 question that"),
        (0, 1, "1 question that the base model knew", "Version 1 serves"),
        (3, 0, "", "the answer to 3 questions that"),
    ],
)
def test_the_first_page_says_what_was_lost_however_little_was_won(
    small: SmallStore, won: int, lost: int, told: str, heading: str
) -> None:
    evaluation = small.examine(won, lost)
    small.train(small.clean("1", {"lamp": "x"}), ["y"], eval_metrics=evaluation.fingerprint)
    with client_of(board_of(small)) as client:
        shown = " ".join(client.get("/").text.split())
        questions = client.get("/versions/1").text
    assert heading in shown.partition("</h1>")[0]
    assert ("It lost the answer to" in shown) == bool(lost) == ('id="lost"' in questions)
    assert told in shown
