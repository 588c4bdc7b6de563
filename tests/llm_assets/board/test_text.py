"""The page about the text."""

import html
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from artifacts.store.store import Draft
from llm_assets.board import text
from tests.damage import cut
from tests.llm_assets.board.conftest import SmallStore, board_of, client_of, page_of
from tests.llm_assets.trained_store import write_raw


def test_documents_are_listed_by_how_often_the_champion_read_them(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {f"doc/{number}": f"text {number}" for number in range(8)}
    read = ["text 0"] * 2 + ["text 1"] + ["text 2"] * 11 + ["not of this corpus"]
    small.train(small.clean("1", texts), read)
    monkeypatch.setattr(text, "MOST_ON_PAGE", 3)
    with client_of(board_of(small)) as client:
        shown = html.unescape(client.get("/text").text)
        listed = re.findall(r'href="(/text/read\?times=\d+)">([a-z0-9 ]+)</a>: (\d+)', shown)
        assert [one[1:] for one in listed] == [
            *(("never", "5"), ("once", "1"), ("2 times", "1"), ("10 times or more", "1")),
        ]
        named = [re.findall(r">(doc/\d)<", client.get(path).text) for path, _, _ in listed]
        assert named == [["doc/3", "doc/4", "doc/5"], ["doc/1"], ["doc/0"], ["doc/2"]]
        (after,) = re.findall(r'href="([^"]*)">Next', client.get(listed[0][0]).text)
        last = client.get(html.unescape(after)).text
        assert re.findall(r">(doc/\d)<", last) == ["doc/6", "doc/7"] and "4 to 5 of 5" in last
        assert ">Next<" not in last and ">Previous<" in last
        small.clean("2", {"new": "x"})
        assert client.get("/text/read?times=0").text.count("doc/") == 3, "of what it was trained on"


def test_a_small_share_of_the_text_is_told_as_elsewhere(small: SmallStore) -> None:
    version = small.train(small.clean("1", {"one": "x"}), ["x"])
    small.make("raw_corpus", "1", lambda draft: draft.stats.update(sources={}))
    state = small.registry.state()
    state.versions[-1] = version.model_copy(update={"coverage": 0.004})
    registry = SimpleNamespace(state=lambda: state)
    for path in ("/text", "/versions/1"):
        shown = page_of(small, path, registry=registry).casefold()
        assert "trained on 0.4% of the training split" in shown, path


def test_without_a_version_nothing_is_known_of_what_was_read(small: SmallStore) -> None:
    small.clean("1", {"new": "x"})
    assert "How often version" not in page_of(small, "/text")
    assert "Nothing is known" in page_of(small, "/text/read")


def test_a_passage_of_many_words_is_found_as_a_whole(small: SmallStore) -> None:
    passage = " ".join(f"word{n}" for n in range(900))
    texts = {"whole": f"Before. {passage}", "cut": passage[:-1], "same": "a " * 2000}
    small.clean("1", texts)
    with client_of(board_of(small)) as client:

        def shown(words: str) -> str:
            return client.get("/text", params={"search": words}).text

        found = shown(passage.upper().replace(" ", "\n"))
        assert "Before." in found and ">whole<" in found and ">cut<" not in found
        assert "No document contains it." in shown("a " * 900 + "b")
        assert "than 10,000 char" in shown("a" * 10_001)


def test_damaged_text_is_told_with_what_to_do(small: SmallStore) -> None:
    corpus = small.clean("1", {f"doc/{number}": f"text {number}" for number in range(99)})
    small.train(corpus, ["text 1"])
    cut(next(Path(corpus.path).glob("part-*")))
    with client_of(board_of(small)) as client:
        for path in ("/", "/text?search=text", "/text/document?id=doc/1", "/text/read"):
            answer = client.get(path)
            assert answer.status_code == 400, path
            assert "is damaged" in answer.text and "doctor --repair" in answer.text, path


def test_the_largest_clusters_of_copies_are_named_with_size_and_survivor(small: SmallStore) -> None:
    copies = [
        {"id": f"copy/{kept}/{n}", "survivor": f"kept/{kept}", "cluster": "c", "reason": reason}
        | {"neighbor": f"kept/{kept}", "similarity": 0.9}
        for kept in range(12)
        for n, reason in enumerate(("near_duplicate", "exact_duplicate") * 6)
        if n <= kept
    ]
    small.clean("1", {f"kept/{n}": f"text {n}" for n in range(12)}, copies)
    shown = html.unescape(page_of(small, "/text"))
    found = re.findall(r"<li>(\d+) documents, of which <a [^>]*>kept/(\d+)</a>", shown)
    assert found == [(str(kept + 2), str(kept)) for kept in range(11, 1, -1)]


def test_copies_are_shown_as_they_were_cleaned_though_newer_text_was_read(
    small: SmallStore,
) -> None:
    raw = []
    for texts in (["kept as it was", "copied as it was"], ["kept, edited", "copied, edited"]):

        def build(draft: Draft, texts: list[str] = texts) -> None:
            write_raw(draft, texts)
            draft.stats |= {"sources": {"manual": {"documents": 2, "bytes": 40}}}

        raw.append(small.make("raw_corpus", texts[0], build))
    pair = {"id": "manual/1", "neighbor": "manual/0", "survivor": "manual/0", "cluster": "c"}
    copies = [pair | {"reason": "near_duplicate", "similarity": 0.9}]
    small.clean("1", {"manual/0": "x"}, copies, raw_corpus=raw[0].fingerprint)
    shown = page_of(small, "/text")
    small.clean("2", {"manual/0": "x"}, copies, raw_corpus=raw[1].fingerprint)
    after = page_of(small, "/text")
    assert "copied" in shown and "as it was" in shown and "edited" not in shown
    assert (">not yet<" in shown, ">not yet<" in after) == (True, False)
