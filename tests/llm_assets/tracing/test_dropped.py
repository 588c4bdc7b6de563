"""What was dropped is shown beside what it copies, and nobody's forgotten text is."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.reasons import reason_of
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.tracing.dropped import compare, find_dropped
from llm_assets.tracing.explain import read_texts
from spark_jobs.clean import job as clean
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import CleanCorpusSettings
from tests.tiny import tiny_texts

TEXTS = tiny_texts(40)
LONG = " ".join(TEXTS[:3])
NEAR = LONG.replace("valve", "lid", 1)
REPORTS = {f"r{n}": f"Pump {n} was seen on day {n} and is well, says {n}." for n in range(6)}
DOCUMENTS = (
    REPORTS
    | {"a": LONG, "b": NEAR, "c": LONG, "short": "No."}
    | {f"d{number}": text for number, text in enumerate(TEXTS[10:])}
)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Artifact, Artifact]:
    """A raw corpus and the clean one that is made of it."""
    store = Store(str(tmp_path / "store"))

    def raw(draft: Draft) -> None:
        columns = [list(DOCUMENTS), list(DOCUMENTS.values()), ["manual"] * len(DOCUMENTS)]
        table = pa.table(columns, ["id", "text", "source"])
        pq.write_table(table, draft.path / "part-00000.parquet", row_group_size=7)

    made, _ = store.make(Identity(kind="raw_corpus", code_version="1"), raw)

    def cleaned(draft: Draft) -> None:
        settings = CleanCorpusSettings(minimum_characters=20)
        spec = clean.CleanSpec(raw_corpus=made.url, output=draft.url, settings=settings)
        draft.stats |= clean.run(local_session(partitions=2), spec, lambda line: None)

    return store.make(Identity(kind="clean_corpus", code_version="1"), cleaned)[0], made


def test_near_copies_come_first_with_their_differences_marked(
    corpora: tuple[Artifact, Artifact],
) -> None:
    found = find_dropped(*corpora, hidden=(), most=5)

    near, exact = found.copies
    assert (near.reason, exact.reason) == ("near_duplicate", "exact_duplicate")
    assert 0.8 <= near.similarity < 1 == exact.similarity
    assert near.text and near.neighbor_text
    assert {"".join(text for text, _ in side) for side in (near.text, near.neighbor_text)} == {
        DOCUMENTS[near.id],
        DOCUMENTS[near.neighbor],
    }
    differing = [
        [text.strip() for text, same in side if not same]
        for side in (near.text, near.neighbor_text)
    ]
    assert sorted(differing) == [["lid"], ["valve"]]
    assert found.examples["template"].items() < REPORTS.items()
    assert found.examples["too_short"] == {"short": "No."}
    assert found.counts == dict.fromkeys(
        ("exact_duplicate", "near_duplicate", "template", "too_short"), 1
    )


def test_what_is_forgotten_and_what_is_gone_is_not_shown(
    corpora: tuple[Artifact, Artifact],
) -> None:
    cleaned, raw = corpora
    ids = {one.id for one in find_dropped(cleaned, raw, hidden=(), most=5).copies}

    shown = find_dropped(cleaned, raw, hidden=["short", *REPORTS, *ids], most=5)
    assert not shown.copies and not any(shown.examples.values())
    gone = find_dropped(cleaned, None, (), 5)
    assert all(one.text is None for one in gone.copies)
    assert gone.examples["too_short"] == {"short": None}


def test_texts_are_compared_word_by_word_whatever_their_case_and_spaces() -> None:
    assert compare("The valve  opens.", "the VALVE\nshuts.") == (
        [("The valve", True), ("  opens.", False)],
        [("the VALVE", True), ("\nshuts.", False)],
    )
    assert compare("", "a") == ([], [("a", False)])


def test_of_a_part_with_damaged_pages_the_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    pq.write_table(pa.table({"id": ["a"], "text": ["text a"]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(60) + content[64:])
    with pytest.raises(OSError, match=str(path)) as caught:
        read_texts(str(tmp_path), ["a"])
    assert f"is damaged ({path}: " in str(reason_of(caught.value))


def test_texts_are_read_up_to_the_last_that_is_asked_for(tmp_path: Path) -> None:
    for number, names in enumerate(("ab", "cd")):
        table = pa.table({"id": list(names), "text": [f"text {name}" for name in names]})
        pq.write_table(table, tmp_path / f"part-0000{number}.parquet", row_group_size=1)
    assert read_texts(str(tmp_path), ["d", "a", "gone"]) == {"a": "text a", "d": "text d"}
    (tmp_path / "part-00001.parquet").write_bytes(b"PAR1" + bytes(9))
    assert read_texts(str(tmp_path), ["b"]) == {"b": "text b"}
