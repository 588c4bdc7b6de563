"""Spans of words that stand in several documents: the first place keeps them, the others do not."""

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.clean.repeated import (
    fingerprints,
    fold_words,
    repeated_spans,
    windows_with,
    word_spans,
)
from spark_jobs.explain import explain_document
from spark_jobs.settings import (
    CleanCorpusSettings,
    NearDuplicateSettings,
    RepeatedSpanSettings,
    SplitSettings,
)
from tests.spark_jobs.test_decide import Document, write_raw

WINDOW = 12
SPLIT = SplitSettings(sources={"exam": "held_out", "manual": "train"})


def settings(action: str) -> CleanCorpusSettings:
    return CleanCorpusSettings(
        minimum_characters=40,
        near_duplicates=NearDuplicateSettings(enabled=False),
        repeated_spans=RepeatedSpanSettings(action=action, minimum_words=WINDOW),
        split=SPLIT,
    )


def words(count: int, generator: random.Random) -> str:
    return " ".join(
        f"{generator.choice('bdfgk')}{generator.randrange(10**6)}" for _ in range(count)
    )


def corpus(generator: random.Random) -> list[Document]:
    """Documents of words of their own and of notices that several share, cut at random."""
    notices = [words(generator.randint(WINDOW - 2, 60), generator) for _ in range(8)]
    notices += ["again and " * 20, "Größe: \u00b4 " + notices[0].upper()]
    documents = []
    for number in range(60):
        pieces = []
        for _ in range(generator.randint(1, 4)):
            notice = generator.choice(notices).split()
            begin = generator.randrange(len(notice))
            pieces.append(words(generator.randint(1, 15), generator))
            pieces.append(" ".join(notice[begin:] if generator.random() < 0.3 else notice))
        source = "exam" if number % 10 == 0 else "manual"
        documents.append((f"d{number:02d}", "\n".join(filter(None, pieces)), source))
    return documents


def run(
    spark: SparkSession,
    raw: Path,
    output: Path,
    action: str = "remove",
    earlier: Path | None = None,
) -> dict:
    spec = clean.CleanSpec(
        raw_corpus=str(raw),
        output=str(output),
        settings=settings(action),
        earlier=str(earlier) if earlier else None,
    )
    return clean.run(spark, spec, lambda line: None)


def texts(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("part-*"))
    return {row["id"]: row["text"] for file in files for row in pq.read_table(file).to_pylist()}


def word_by_word(documents: list[tuple[str, str, bool]]) -> Iterator[tuple[str, str]]:
    """What the rule leaves of `(id, text, may change)`, worked out window by window in order."""
    first: dict[tuple[str, ...], tuple[str, int]] = {}
    for name, text, changes in sorted(documents, key=lambda one: (one[2], one[0])):
        folded, removed = fold_words(text).split(" "), set()
        for begin in range(len(folded) - WINDOW + 1):
            place = first.setdefault(tuple(folded[begin : begin + WINDOW]), (name, begin))
            if place != (name, begin):
                own = place[1] + WINDOW if place[0] == name else 0
                removed |= set(range(max(begin, own), begin + WINDOW))
        spans = enumerate(word_spans(text).tolist())
        left = "".join(text[a:b] for number, (a, b) in spans if number not in removed)
        yield name, left.strip() if changes else text


def test_what_is_left_is_what_the_rule_leaves_however_the_text_is_cut(
    spark: SparkSession, tmp_path: Path
) -> None:
    generator = random.Random(1)
    documents = corpus(generator)
    write_raw(tmp_path / "raw", documents, generator)

    stats = run(spark, tmp_path / "raw", tmp_path / "clean")

    kept = [(name, text, source == "manual") for name, text, source in documents]
    expected = {name: text for name, text in word_by_word(kept) if len(text) >= 40}
    found = texts(tmp_path / "clean")
    assert found == expected
    figures = stats["repeated_spans"]
    assert figures["documents"] > 20 and figures["words"] > figures["spans"] > 20
    assert stats["dropped"]["repeated_spans"] == 60 - len(found) > 0
    assert stats["documents"] == len(found) == sum(stats["splits"].values())
    assert stats["bytes"] == sum(len(text.encode()) for text in found.values())
    assert sum(stats["length_histogram"].values()) == len(found)


def test_no_training_document_has_a_window_of_a_held_out_one_and_that_one_is_whole(
    spark: SparkSession, tmp_path: Path
) -> None:
    generator = random.Random(3)
    notice = words(30, generator)
    documents = [
        ("a", f"{words(40, generator)} {notice.upper()} {words(40, generator)}", "manual"),
        ("b", f"{words(40, generator)} {notice}", "manual"),
        ("z", f"{notice} {words(20, generator)}", "exam"),
        ("only", f"{notice} few words more", "manual"),
    ]
    write_raw(tmp_path / "raw", documents, generator)
    stats = run(spark, tmp_path / "raw", tmp_path / "clean")
    found = texts(tmp_path / "clean")

    assert found["z"] == documents[2][1]
    assert notice.split()[0] not in fold_words(found["a"]) + fold_words(found["b"])
    assert stats["dropped"] == {"repeated_spans": 1}
    assert stats["dropped_examples"]["repeated_spans"][0]["id"] == "only"

    told = [explain_document(str(tmp_path / "clean"), None, None, name) for name in ("b", "only")]
    assert "(30 words) stand first in z: removed" in str(told[0])
    assert str(told[1]).startswith("only: dropped; too little is in it")

    # On record as what it was decided to be, it does not count as new a week later.
    write_raw(tmp_path / "later", [*documents, ("new", words(50, generator), "manual")], generator)
    later = run(spark, tmp_path / "later", tmp_path / "next", "ignore", earlier=tmp_path / "clean")
    assert later["slices"] == {
        "1": {"held_out": 1, "train": 3},
        "2": {"train": 1},
    }


def test_counting_changes_no_byte(spark: SparkSession, tmp_path: Path) -> None:
    generator = random.Random(4)
    write_raw(tmp_path / "raw", corpus(generator), generator)
    ignored = run(spark, tmp_path / "raw", tmp_path / "ignored", "ignore")
    counted = run(spark, tmp_path / "raw", tmp_path / "counted", "count")

    figures = counted.pop("repeated_spans")
    listed = pa.concat_tables(
        pq.read_table(file) for file in (tmp_path / "counted/repeated_spans").iterdir()
    )
    assert counted == ignored
    assert figures["spans"] == listed.num_rows > 0
    assert set(listed["fate"].to_pylist()) == {"counted"}
    for file in (tmp_path / "ignored").glob("*.parquet"):
        assert file.read_bytes() == (tmp_path / "counted" / file.name).read_bytes()


def test_equal_windows_share_a_fingerprint_wherever_they_stand() -> None:
    generator = random.Random(5)
    shared = words(WINDOW, generator)
    surrounded = [f"{words(n, generator)} {shared} {words(n, generator)}" for n in range(1, 40)]
    found = fingerprints([shared, *surrounded], WINDOW)
    by_text = [set(found[0][found[1] == number].tolist()) for number in range(len(surrounded) + 1)]
    for number, text in enumerate(surrounded, start=1):
        common = by_text[0] & by_text[number]
        assert common
        _, digest = windows_with(shared, WINDOW, common)[0]
        assert digest in {digest for _, digest in windows_with(text, WINDOW, common)}


@pytest.mark.parametrize("text", ["a  b\n\nc", "ab\u00a0c \u00b4 d", "\ufdfa x", "", "İ Größe"])
def test_folding_leaves_each_word_in_its_place(text: str) -> None:
    assert len(fold_words(text).split(" ") if text else []) == len(word_spans(text))


def test_a_window_that_overlaps_its_first_place_leaves_that_place_whole() -> None:
    rows = [{"row": 0, "word": n, "neighbor": "d", "neighbor_word": 0} for n in range(1, 9)]
    repeats = pa.RecordBatch.from_pylist(rows)
    assert list(repeated_spans("d", repeats, 4)) == [(4, 12, "d")]
    assert list(repeated_spans("e", repeats, 4)) == [(1, 12, "d")]
