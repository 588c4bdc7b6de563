"""Both deciders give the same clean corpus, to the byte, however its text is cut and ordered."""

import itertools
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.examples import plain_text, write_example
from spark_jobs.clean.decide import pairs
from spark_jobs.settings import CleanCorpusSettings, SplitSettings
from spark_jobs.text import fold, text_hash
from tests.spark_jobs.conftest import forget
from tests.spark_jobs.jobs import clean_corpus, files_below, splits
from tests.spark_jobs.splits import split_of
from tests.spark_jobs.test_duplicates import edited, families

SPLIT = SplitSettings(
    validation=0.15, held_out=0.15, sources={"exam": "held_out", "general": "replay"}
)

IN_MEMORY, BY_SPARK = 10**6, 0
"""Most documents that are decided over in memory."""

Document = tuple[str, ...]
"""Id, text and source, and the example that the text is, if it is one."""


def write_raw(folder: Path, documents: list[Document], generator: random.Random) -> None:
    """Documents in random order, in files and row groups of random sizes."""
    folder.mkdir(parents=True)
    documents = generator.sample(documents, len(documents))
    number = 0
    while documents:
        size = generator.randint(1, 150)
        columns = list(map(list, zip(*documents[:size], strict=True)))
        names = ["id", "text", "source", "example"][: len(columns)]
        table = pa.table(columns, names=names)
        rows = generator.randint(1, size)
        pq.write_table(table, folder / f"part-{number:05d}.parquet", row_group_size=rows)
        documents, number = documents[size:], number + 1


def report(kind: int, number: int) -> str:
    """One of a kind that differ in figures alone, some so long that they are near-copies, too."""
    said = " ".join(f"{'abcdefgh'[kind]}{'xyz'[n % 3] * n}" for n in range(6 + 8 * kind))
    return f"Report {number} of kind: {said}, checked {number % 7} times."


def first_texts(generator: random.Random) -> list[Document]:
    """Families of near-copies, exact copies among the sources, stubs, and one text with a hundred
    near-copies."""
    texts = families(12, generator.randrange(10**6))
    notice = " ".join(f"notice{number}" for number in range(120))
    texts += [edited(notice, 0.03, generator) for _ in range(100)]
    texts += [text.upper().replace(" ", "  ") for text in generator.sample(texts, 20)]
    texts += ["stub"] * 3
    sources = ["manual", "manual", "wiki", "exam", "general"]
    documents = [(f"d{n}", text, generator.choice(sources)) for n, text in enumerate(texts)]
    for number in range(60):
        text, source = report(number % 6, generator.randrange(1000)), generator.choice(sources)
        documents.append((f"r{number}", text, source if number % 6 > 3 else "manual"))
    return documents


def a_week_later(documents: list[Document], generator: random.Random) -> list[Document]:
    """Some have left, some were edited, some are new and some of those are copies."""
    stay = generator.sample(documents, len(documents) * 4 // 5)
    later = [
        (name, f"{text} edited" if generator.random() < 0.2 else text, source)
        for name, text, source in stay
    ]
    copies = [
        (f"c{number}", f"{text} copied", generator.choice(["manual", "exam", "general"]))
        for number, (_, text, _) in enumerate(generator.sample(documents, 30))
    ]
    fresh = [(f"n{n}", t, "manual") for n, t in enumerate(families(5, generator.randrange(10**6)))]
    reports = [report(kind, generator.randrange(1000)) for kind in range(8) for _ in range(9)]
    again = [text.upper().replace(" ", "  ") for _, text, _ in generator.sample(documents, 40)]
    fresh += [(f"s{n}", text, "manual") for n, text in enumerate([*reports, *again])]
    return [*later, *copies, *fresh]


def clean_by(
    spark: SparkSession,
    documents_in_memory: int,
    raw: Path,
    output: Path,
    split: SplitSettings = SPLIT,
    **options: object,
) -> dict:
    """The stats of a clean corpus in `output`."""
    settings = CleanCorpusSettings(minimum_characters=40, split=split)
    return clean_corpus(
        spark, raw, output, settings, documents_in_memory=documents_in_memory, **options
    )


@pytest.mark.soak
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def test_both_deciders_give_the_same_bytes_for_any_text_of_a_second_week(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder, generator = tmp_path_factory.mktemp("lineage"), random.Random(seed)
    documents = first_texts(generator)
    write_raw(folder / "raw", documents, generator)
    clean_by(spark, IN_MEMORY, folder / "raw", folder / "first")
    write_raw(folder / "later", a_week_later(documents, generator), generator)
    # Each has near-copies in its family.
    gone = {name: text for name, text, _ in documents if name in ("d3", "d9", "d26")}
    forgotten = forget(folder / "forgotten", gone)
    later = dict(raw=folder / "later", earlier=folder / "first", forgotten=forgotten)
    in_memory = clean_by(spark, IN_MEMORY, output=folder / "memory", **later)
    by_spark = clean_by(spark, BY_SPARK, output=folder / "spark", **later)
    assert in_memory == by_spark
    assert in_memory["dropped"]["similar_to_forgotten"] > 3
    assert list(in_memory) == list(by_spark)
    assert in_memory["dropped"]["template"]
    assert files_below(folder / "memory") == files_below(folder / "spark")


def test_both_deciders_give_the_same_bytes(spark: SparkSession, tmp_path: Path) -> None:
    """Of copies in sources that are assigned, a template of several sources, and documents that are
    dropped for themselves, with forgotten text and without."""
    texts = [" ".join(f"word{number}x{place}" for place in range(40)) for number in range(40)]
    stub = "The pump of hall seven was sold"
    split = SPLIT.model_copy(update={"sources": {"rules": "train", "exam": "held_out"}})
    documents = [(f"a{number}", text, "manual") for number, text in enumerate(texts)]
    documents += [(f"b{number}", text, "rules") for number, text in enumerate(texts[:20])]
    documents += [(f"c{number}", f"{text} copied", "manual") for number, text in enumerate(texts)]
    documents += [(f"r{number}", report(4, number), "manual") for number in range(30)]
    documents += [(f"s{number}", report(4, number), "exam") for number in range(30, 34)]
    documents += [(f"u{number}", f"{stub} {number}", "manual") for number in range(5)]
    documents += [(f"v{number}", "Stub", "manual") for number in range(3)]
    write_raw(tmp_path / "raw", documents, random.Random(1))
    forgotten = forget(tmp_path / "forgotten", {"SOLD": f"{stub} in May"})

    in_memory, by_spark = (
        clean_by(spark, most, tmp_path / "raw", tmp_path / f"{most}", split, forgotten=forgotten)
        for most in (IN_MEMORY, BY_SPARK)
    )
    assert in_memory == by_spark
    assert files_below(tmp_path / f"{IN_MEMORY}") == files_below(tmp_path / f"{BY_SPARK}")
    dropped = in_memory["dropped"]
    assert (dropped["too_short"], dropped["similar_to_forgotten"]) == (3, 5)
    assert dropped["exact_duplicate"] and dropped["near_duplicate"] and dropped["template"]


def ticket(name: str, text: str, label: str) -> Document:
    example = {"text": text, "label": label}
    return name, plain_text(example), "manual", write_example(example)


def trained_on(label: str, count: int) -> list[Document]:
    """Tickets that all fall into `train` by their hashes."""
    tickets = (ticket(f"{label}{n}", f"Call {n} to {label}.", label) for n in itertools.count())
    of_hash = (one for one in tickets if split_of(text_hash(fold(one[1])), SPLIT) == "train")
    return list(itertools.islice(of_hash, count))


def test_every_class_is_judged_and_one_text_has_one_label_by_both_deciders(
    spark: SparkSession, tmp_path: Path
) -> None:
    documents = [ticket(f"a{n}", f"The pump {n} leaks.", "pump") for n in range(60)]
    documents += [*trained_on("fan", 4), *trained_on("gate", 2)]
    documents += [
        ticket(f"x{n}", "Nobody answers.", label) for n, label in enumerate(["pump", "fan", "fan"])
    ]
    arrived = [*trained_on("fan", 9)[4:], *trained_on("gate", 3)[2:], *trained_on("lamp", 3)]
    arrived.append(ticket("x9", "Nobody answers.", "lamp"))
    split = SPLIT.model_copy(update={"sources": {}})
    write_raw(tmp_path / "raw", documents, random.Random(1))
    first = clean_by(spark, IN_MEMORY, tmp_path / "raw", tmp_path / "first", split)
    write_raw(tmp_path / "later", documents + arrived, random.Random(2))
    later = dict(raw=tmp_path / "later", split=split, earlier=tmp_path / "first")
    second = clean_by(spark, IN_MEMORY, output=tmp_path / "memory", **later)
    assert second == clean_by(spark, BY_SPARK, output=tmp_path / "spark", **later)
    assert files_below(tmp_path / "memory") == files_below(tmp_path / "spark")
    of_first, of_second = splits(tmp_path / "first"), splits(tmp_path / "memory")

    def judging(placed: dict[str, str], label: str) -> list[str]:
        return sorted(s for name, s in placed.items() if name.startswith(label) and s != "train")

    assert judging(of_first, "fan") == judging(of_second, "fan") == ["held_out", "validation"]
    assert judging(of_first, "gate") == [], "of two, none would be left to learn from"
    assert judging(of_second, "gate") == ["held_out"], "the others were trained on"
    assert judging(of_second, "lamp") == ["held_out", "validation"]
    assert of_first.items() <= of_second.items()
    assert first["dropped"] == {"contradicting_label: pump (kept: fan)": 1, "exact_duplicate": 1}
    assert second["dropped"]["contradicting_label: lamp (kept: fan)"] == 1


@pytest.mark.parametrize("documents_in_memory", [IN_MEMORY, BY_SPARK])
def test_both_deciders_refuse_an_id_that_comes_again_in_another_partition(
    spark: SparkSession, tmp_path: Path, documents_in_memory: int
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for number, ids in enumerate((["a", "b"], ["c", "a"])):
        texts = [f"{number}{name}" * 50 for name in ids]
        table = pa.table({"id": ids, "text": texts, "source": ["manual"] * 2})
        pq.write_table(table, raw / f"part-{number:05d}.parquet", row_group_size=1)

    with pytest.raises(UserError, match=r"'a' \(2 times\).*id_column"):
        clean_by(spark, documents_in_memory, raw, tmp_path / "clean")

    assert not list(tmp_path.glob("clean*"))


def cut(rows: np.ndarray, schema: pa.Schema, ends: list[int]) -> list[pa.RecordBatch]:
    bounds = [0, *sorted(end % (len(rows) + 1) for end in ends), len(rows)]
    return [
        pa.record_batch(list(rows[first:last].T), schema=schema)
        for first, last in itertools.pairwise(bounds)
    ]


def as_rows(batches: list[pa.RecordBatch]) -> list[list[int]]:
    return [list(row.values()) for batch in batches for row in batch.to_pylist()]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_a_window_is_found_however_its_rows_are_cut(
    texts: list[tuple[int, int]], ends: list[int]
) -> None:
    rows = np.array(sorted((key, 0, text, cluster) for text, (key, cluster) in enumerate(texts)))
    schema = pairs.BAND_SCHEMA.append(pa.field("cluster", pa.int64()))
    batches = cut(rows.reshape(-1, 4), schema, ends)
    found = as_rows(list(pairs.find_window(iter(batches))))

    expected = [
        [one, other]
        for one, (key, cluster) in enumerate(texts)
        for other, (other_key, other_cluster) in enumerate(texts)
        if one < other and key == other_key and cluster != other_cluster
    ]
    assert sorted(found) == sorted(expected)
