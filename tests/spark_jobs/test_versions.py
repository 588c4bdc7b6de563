"""Versions of one document are in one split; the clauses of all documents say nothing."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.shards.format import ShardStats
from spark_jobs.clean.job import CleanSpec, compare_documents
from spark_jobs.explain import explain_document
from spark_jobs.settings import (
    CleanCorpusSettings,
    NearDuplicateSettings,
    SplitSettings,
    TokenizedShardsSettings,
)
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import (
    clean_corpus,
    clean_documents,
    files_below,
    splits,
    tokenize_corpus,
)

SPLIT = SplitSettings(validation=0.15, held_out=0.2)
IN_MEMORY, BY_SPARK = 10**6, 0
"""Most documents that are decided over in memory."""


def words(name: str, count: int) -> str:
    return " ".join(f"{name}x{place}" for place in range(count))


CLAUSES = words("clause", 150)


def contract(number: int, version: int) -> tuple[str, str]:
    """Half of it is the same in all; each version changes a quarter of the rest."""
    own = [words(f"n{number}p{place}v{(version + place % 4) // 4}", 15) for place in range(12)]
    return f"c{number}_v{version}", " ".join([CLAUSES, *own])


def of_family(splits: dict[str, str]) -> dict[str, set[str]]:
    """The splits of each contract's versions."""
    found: dict[str, set[str]] = {}
    for name, split in splits.items():
        found.setdefault(name.partition("_")[0], set()).add(split)
    return found


def make_clean(
    spark: SparkSession,
    raw: str,
    folder: Path,
    near: bool = True,
    documents_in_memory: int = IN_MEMORY,
    **options: str,
) -> dict:
    settings = CleanCorpusSettings(split=SPLIT, near_duplicates=NearDuplicateSettings(enabled=near))
    return clean_corpus(
        spark, raw, folder, settings, documents_in_memory=documents_in_memory, **options
    )


def test_versions_are_in_one_split_and_decontamination_drops_none(
    spark: SparkSession, raw_corpus: Corpus, model_folder: Path, tmp_path: Path
) -> None:
    raw = [contract(number, version) for number in range(60) for version in range(3)]
    stats = make_clean(spark, raw_corpus(raw), tmp_path / "clean")
    shards = TokenizedShardsSettings(sequence_length=64)

    made = tokenize_corpus(spark, tmp_path / "clean", model_folder, tmp_path / "shards", shards)

    found = of_family(splits(tmp_path / "clean"))
    assert stats["documents"] == 180 and all(len(several) == 1 for several in found.values())
    families = Counter(split for (split,) in found.values())
    assert min(families["validation"], families["held_out"]) > 3 and families["train"] > 30
    assert made["removed_as_overlapping_held_out"] == {}


def test_later_versions_follow_earlier_ones_by_either_decider(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    """Also those of a document whose versions were divided before versions were looked for."""
    raw = [contract(number, version) for number in range(40) for version in (1, 2, 3)]
    make_clean(spark, raw_corpus(raw), tmp_path / "first", near=False)
    before = splits(tmp_path / "first")
    later = raw_corpus([*raw, *(contract(number, 4) for number in range(80))])
    stats = [
        make_clean(
            spark,
            later,
            tmp_path / f"{most}",
            documents_in_memory=most,
            earlier=str(tmp_path / "first"),
        )
        for most in (IN_MEMORY, BY_SPARK)
    ]

    assert stats[0] == stats[1]
    assert files_below(tmp_path / f"{IN_MEMORY}") == files_below(tmp_path / f"{BY_SPARK}")
    cleaning = CleanCorpusSettings(split=SPLIT)
    spec = CleanSpec(raw_corpus=later, output=str(tmp_path / f"{IN_MEMORY}"), settings=cleaning)
    for name, stored, now in compare_documents(spec, spec.output):
        assert stored == now, f"after an upgrade, {name} is cleaned as before"
    after = splits(tmp_path / f"{IN_MEMORY}")
    families = of_family(before)
    assert {"train", "held_out"} in families.values()
    for number in range(40):
        expected = {"train"}
        if "train" not in families[f"c{number}"]:
            # What judges stays as it is, and its edits are left out.
            expected = {None}
        assert {after.get(f"c{number}_v4")} == expected
    assert {name: split for name, split in after.items() if name in before} == before
    held_back = stats[0]["held_back"]
    assert held_back["documents"] == stats[0]["dropped"]["copy_of_held_out"]
    assert after[held_back["original"]] != "train" and held_back["first"].endswith("_v4")
    rows = clean_documents(tmp_path / f"{IN_MEMORY}").items()
    held_out = [(name, row["cluster"]) for name, row in rows if row["split"] == "held_out"]
    judging = of_family(dict(held_out))
    # As several documents, what they share would be boilerplate, and trained on.
    assert all(len(clusters) == 1 for clusters in judging.values()) and len(held_out) > len(judging)


@pytest.mark.parametrize(("versions", "may_be_held_out"), [(3, True), (40, False)])
def test_a_document_of_very_many_versions_is_trained_on(
    spark: SparkSession,
    raw_corpus: Corpus,
    tmp_path: Path,
    versions: int,
    may_be_held_out: bool,
) -> None:
    """Held out, minutes that are copied forward for years would leave little to train on."""
    raw = [contract(number, version) for number in range(9) for version in range(versions)]

    make_clean(spark, raw_corpus(raw), tmp_path / "clean")

    found = of_family(splits(tmp_path / "clean"))
    assert all(len(several) == 1 for several in found.values())
    assert ({"held_out"} in found.values()) == may_be_held_out


@pytest.mark.parametrize("documents_in_memory", [IN_MEMORY, BY_SPARK])
def test_versions_of_a_near_copy_of_evaluation_text_stay(
    spark: SparkSession, tmp_path: Path, documents_in_memory: int
) -> None:
    """Whichever of evaluation text and its near-copy has the smaller hash."""
    exam = [(f"{name}_exam", text) for name, text in (contract(n, 1) for n in range(12))]
    copies = [(name.replace("exam", "copy"), f"{text} and signed") for name, text in exam]
    later = [contract(number, 2) for number in range(12)]
    (tmp_path / "raw").mkdir()
    ids, texts = zip(*exam, *copies, *later, strict=True)
    table = pa.table({"id": ids, "text": texts, "source": ["exam"] * 12 + ["manual"] * 24})
    pq.write_table(table, tmp_path / "raw" / "part-00000.parquet")
    split = SplitSettings(sources={"exam": "held_out"})

    stats = clean_corpus(
        spark,
        tmp_path / "raw",
        tmp_path / "clean",
        CleanCorpusSettings(split=split),
        documents_in_memory=documents_in_memory,
    )

    assert stats["dropped"] == {"near_duplicate": 12}
    assert {*splits(tmp_path / "clean")} == {name for name, _ in [*exam, *later]}


@pytest.mark.parametrize("held_out_in_memory", [100, 0])
def test_what_several_evaluation_files_quote_is_not_trained_on_and_one_of_them_is_named(
    spark: SparkSession, model_folder: Path, tmp_path: Path, held_out_in_memory: int
) -> None:
    quoted, own = words("quoted", 30), [contract(number, 1) for number in range(20)]
    exam = [(f"exam{number}", f"{quoted} {words(f'own{number}', 60)}") for number in range(3)]
    (tmp_path / "raw").mkdir()
    ids, texts = zip(*exam, ("quoting", f"{quoted} and so on"), *own, strict=True)
    table = pa.table({"id": ids, "text": texts, "source": ["exam"] * 3 + ["manual"] * 21})
    pq.write_table(table, tmp_path / "raw" / "part-00000.parquet")
    split = SplitSettings(validation=0.15, held_out=1e-9, sources={"exam": "held_out"})
    clean_corpus(spark, tmp_path / "raw", tmp_path / "clean", CleanCorpusSettings(split=split))

    stats = tokenize_corpus(
        spark,
        tmp_path / "clean",
        model_folder,
        tmp_path / "shards",
        TokenizedShardsSettings(sequence_length=64),
        evaluation_sources=("exam",),
        held_out_in_memory=held_out_in_memory,
    )

    assert sum(stats["removed_as_overlapping_held_out"].values()) == 1
    folders = str(tmp_path / "clean"), str(tmp_path / "shards")
    story = explain_document(*folders, ShardStats(**stats), "quoting", 13)
    assert "86% of it is held-out text, the most of exam0" in str(story)
