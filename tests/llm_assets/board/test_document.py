"""The page about a document, and the command, once it was edited or removed."""

from llm_assets.forgetting.document import find_document
from tests.llm_assets.board.conftest import SmallStore, board_of, client_of

BEFORE, NOW = "The valve opens at four bar.", "The valve opens at six bar."


def page_of(small: SmallStore, document: str) -> str:
    with client_of(board_of(small)) as client:
        answer = client.get("/text/document", params={"id": document})
    assert answer.status_code == 200, answer.text
    return " ".join(answer.text.split())


def test_an_edited_document_says_that_its_earlier_text_was_trained_on(small: SmallStore) -> None:
    small.train(small.clean("1", {"valve": BEFORE, "other": "x"}), [BEFORE])
    small.clean("2", {"valve": NOW, "other": "x"})
    shown = page_of(small, "valve")
    before, _, versions = shown.partition("Its versions")
    assert NOW in before and BEFORE not in before and BEFORE in versions
    assert "valve (manual): never trained on, as it is now" in before
    assert before.count("trained on by version 1 at step 3 (7 tokens)") == 1
    told = find_document(small.record, small.registry.state(), "valve")
    assert "before, valve (manual): trained on by version 1 at step 3" in str(told)
    assert told.as_json()["earlier"][0]["text_hash"] == BEFORE
    assert "Its versions" not in page_of(small, "other")


def test_a_removed_document_still_says_who_read_it(small: SmallStore) -> None:
    small.train(small.clean("1", {"valve": BEFORE, "other": "x"}), [BEFORE])
    small.clean("2", {"other": "x"})
    shown = page_of(small, "valve")
    assert "trained on by version 1 at step 3 (7 tokens)" in shown and BEFORE in shown
    assert "no longer in the corpus" in shown and "never trained on" not in shown
    with client_of(board_of(small)) as client:
        assert client.get("/text/document?id=nowhere").status_code == 400
