"""The page about a document, and the command, once it was edited or removed."""

import re
from types import SimpleNamespace
from typing import cast
from unicodedata import normalize
from urllib.parse import quote

import pyarrow as pa
import pytest

from artifacts.errors import UserError
from artifacts.store.rewrite import rewrite
from artifacts.store.store import Draft
from llm_assets.board import text
from llm_assets.cli.session import Session
from llm_assets.cli.text.forget_plan import ForgetPlan, find_documents, tell_plan
from llm_assets.forgetting.document import find_document
from llm_assets.forgetting.forgotten_list import ForgottenDocument, add_to_list
from llm_assets.tracing import dropped
from spark_jobs.runtime.parquet import to_parquet
from tests.llm_assets.board.conftest import SmallStore, board_of, client_of, page_of

BEFORE, NOW = "The valve opens at four bar.", "The valve opens at six bar."


def shown_of(small: SmallStore, document: str) -> str:
    return " ".join(page_of(small, f"/text/document?id={quote(document)}").split())


def test_an_edited_document_says_that_its_earlier_text_was_trained_on(small: SmallStore) -> None:
    small.train(small.clean("1", {"valve": BEFORE, "other": "x"}), [BEFORE])
    small.clean("2", {"valve": NOW, "other": "x"})
    shown = shown_of(small, "valve")
    before, _, versions = shown.partition("Earlier texts")
    assert NOW in before and BEFORE not in before and BEFORE in versions
    assert "valve (manual): never trained on, as it is now" in before
    assert before.count("trained on by version 1 at step 3 (7 tokens)") == 1
    told = find_document(small.record, small.registry.state(), "valve")
    assert "before, valve (manual): trained on by version 1 at step 3" in str(told)
    assert told.as_json()["earlier"][0]["text_hash"] == BEFORE
    assert "Earlier texts" not in shown_of(small, "other")


def session_of(small: SmallStore) -> Session:
    """What commands about text ask of a session."""
    settings = SimpleNamespace(name="manual")
    found = SimpleNamespace(record=small.record, registry=small.registry, settings=settings)
    return cast(Session, found)


def test_a_listing_tells_a_documents_earlier_text_from_its_present_one(small: SmallStore) -> None:
    small.train(small.clean("1", {"valve": BEFORE}), [BEFORE])
    entries = [
        ForgottenDocument(id="valve", source="manual", text_hash=text, by="Ada", reason="asked to")
        for text in (NOW, BEFORE)
    ]
    said: list[str] = []
    tell_plan(session_of(small), ForgetPlan(entries), said.append)
    assert said[0] == "valve (manual): never trained on"
    (earlier,) = said[1:]
    assert earlier.startswith("  an earlier text of it (manual): trained on by version 1 at step 3")


COMPOSED, APART = (normalize(form, "Büro/Prüfplan.md") for form in ("NFC", "NFD"))
PARTLY = f"{APART.partition('/')[0]}/{COMPOSED.partition('/')[2]}"


@pytest.mark.parametrize(
    ("stored", "typed", "found"),
    [
        ([APART], COMPOSED, [APART]),
        ([COMPOSED], APART, [COMPOSED]),
        ([PARTLY], COMPOSED, [PARTLY]),
        ([APART, COMPOSED], COMPOSED, [COMPOSED]),
        ([APART, PARTLY], COMPOSED, [APART, PARTLY]),
        ([APART], "Buro/Prufplan.md", ["Buro/Prufplan.md"]),
    ],
)
def test_an_id_is_found_in_whichever_unicode_form_it_is_typed(
    small: SmallStore, stored: list[str], typed: str, found: list[str]
) -> None:
    small.clean("1", {name: f"{BEFORE} {place}" for place, name in enumerate(stored)})
    assert find_documents(session_of(small), ["other", typed], None) == ["other", *found]
    if found[0] in stored:
        told = find_document(small.record, small.registry.state(), typed)
        assert told.story and told.story.id == found[0]
        assert BEFORE in shown_of(small, typed)


def test_what_was_forgotten_under_an_id_in_another_unicode_form_is_found(small: SmallStore) -> None:
    small.clean("1", {"other": "x"})
    entry = {"id": APART, "source": "manual", "text_hash": BEFORE, "by": "Ada", "reason": "asked"}
    add_to_list(small.store, "manual", [ForgottenDocument.model_validate(entry)])
    assert find_documents(session_of(small), [COMPOSED], None) == [APART]
    told = find_document(small.record, small.registry.state(), COMPOSED)
    assert [one.id for one in told.forgotten] == [APART]


def test_a_removed_document_still_says_who_read_it(small: SmallStore) -> None:
    small.train(small.clean("1", {"valve": BEFORE, "other": "x"}), [BEFORE])
    small.clean("2", {"other": "x"})
    shown = shown_of(small, "valve")
    assert "trained on by version 1 at step 3 (7 tokens)" in shown and BEFORE in shown
    assert "no longer in the corpus" in shown and "never trained on" not in shown
    with client_of(board_of(small)) as client:
        assert client.get("/text/document?id=nowhere").status_code == 400


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("short", r"^'short' was read and left out by cleaning: too short \(3 in all\)\.$"),
        ("pay.pdf", "text/pay.pdf cannot be read as pdf"),
        ("pay", "has no document 'pay'"),
        ("plan.dwg", r"^'plan.dwg' was not read \(.dwg\)\.$"),
        ("Büro.dwg", r"^'Büro.dwg' was not read \(.dwg\)\.$"),
        ("nowhere", "has no document 'nowhere'.* `llm-assets check --all` lists"),
    ],
)
def test_a_document_that_no_corpus_has_says_where_it_was_left_out(
    small: SmallStore, document: str, told: str
) -> None:
    def build(draft: Draft) -> None:
        draft.stats |= {
            "sources": {},
            "faults": ["text/pay.pdf cannot be read as pdf (it is encrypted)."],
            "dropped": {"bad_file": 1},
            "unread": {".dwg": 7},
            "unread_examples": {".dwg": ["plan.dwg", normalize("NFD", "Büro.dwg")]},
        }

    raw = small.make("raw_corpus", "1", build)
    clean = small.clean("1", {"other": "x"}, raw_corpus=raw.fingerprint)
    listed = to_parquet(pa.table({"id": ["short"], "reason": ["too_short"]}))
    stats = clean.stats | {"dropped": {"too_short": 3}}
    rewrite(clean, [("dropped-00000.parquet", listed)], stats, "a test wants it")
    with pytest.raises(UserError, match=told):
        find_document(small.record, small.registry.state(), document)
    shown = " ".join(page_of(small, "/text").split())
    assert "<li>.dwg: 7 (plan.dwg" in shown and "bad file: 1. The first" in shown
    assert "<li>text/pay.pdf cannot be read as pdf (it is encrypted).</li>" in shown


def test_what_was_forgotten_is_not_named_among_what_was_not_read(small: SmallStore) -> None:
    """As where a file was emptied or renamed after it was forgotten."""

    def build(draft: Draft) -> None:
        # A snapshot of an earlier version, which named no files that were not read.
        draft.stats |= {"sources": {}, "unread": {".dwg": 7}, "dropped": {"empty": 2}}
        faults = [f"text/{one}: the id '{one}' has no text." for one in ("pay.md", "plan.md")]
        draft.stats |= {"faults": faults}
        if draft.identity.code_version == "2":
            draft.stats["unread_examples"] = {".dwg": ["pay.dwg", "plan.dwg"]}

    small.make("raw_corpus", "1", build)
    assert "<li>.dwg: 7</li>" in page_of(small, "/text")
    small.make("raw_corpus", "2", build)
    assert "<li>.dwg: 7 (pay.dwg, plan.dwg)</li>" in page_of(small, "/text")
    forgotten = [
        ForgottenDocument(id=one, source="manual", text_hash=None, by="Ada", reason="asked")
        for one in ("pay.dwg", "pay.md")
    ]
    add_to_list(small.store, "manual", forgotten)
    shown = page_of(small, "/text")
    assert "<li>.dwg: 7 (plan.dwg)</li>" in shown and "empty: 2" in shown
    assert "plan.md" in shown and "pay." not in shown


def test_a_text_made_from_a_document_is_shown_with_what_it_was_made_from(
    small: SmallStore,
) -> None:
    small.clean("1", {"valve": NOW})
    small.clean("1", {"valve#study/statements/1": BEFORE}, kind="study")
    shown = shown_of(small, "valve#study/statements/1")
    assert f'<p class="around">{BEFORE}</p>' in shown
    assert "It was made from valve: its facts in other forms." in shown


def test_documents_that_are_new_edited_and_gone_since_the_corpus_before_are_listed(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.clean("1", {"valve": BEFORE, "other": "x", "same": "z"})
    assert "Changed since" not in page_of(small, "/text")
    small.clean("2", {"valve": NOW, "third": "y", "same": "z"})
    shown = " ".join(re.sub(r"<[^>]*>", "", page_of(small, "/text")).split())
    assert "new: 1: third edited: 1: valve gone: 1: other Lengths" in shown
    for module in (dropped, text):
        monkeypatch.setattr(module, "MOST_COMPARED", 2)
    shown = page_of(small, "/text")
    assert "third" not in shown and "is told of clean corpora of up to 2 documents" in shown


def test_a_source_has_grown_since_the_snapshot_before(small: SmallStore) -> None:
    for documents in (10, 13, 20):

        def build(draft: Draft, count: int = documents) -> None:
            draft.stats |= {"sources": {"manual": {"documents": count, "bytes": 1000}}}

        small.make("raw_corpus", str(documents), build)
    shown = page_of(small, "/text")
    assert "Since the previous snapshot" in shown and ">+7<" in shown
