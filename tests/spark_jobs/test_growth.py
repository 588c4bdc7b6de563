"""A corpus that grows: what is kept decides how long it takes, never what is made."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from spark_jobs.clean.write import writing_key
from spark_jobs.settings import CleanCorpusSettings, SplitSettings, TokenizedShardsSettings
from tests.spark_jobs.jobs import clean_corpus, files_below, tokenize_corpus
from tests.spark_jobs.test_duplicates import families

CLEAN = CleanCorpusSettings(
    minimum_characters=40, split=SplitSettings(validation=0.15, held_out=0.15)
)
SHARDS = TokenizedShardsSettings(sequence_length=64, shard_bytes=16_384)

Texts = list[list[tuple[str, str]]]
"""The id and text of each document, source file by source file."""


def make(
    spark: SparkSession,
    texts: Texts,
    model: Path,
    folder: Path,
    cache: Path | None = None,
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Make everything, and give its stats."""
    cleaned = make_clean(spark, texts, folder, cache, earlier)
    of_tokens = cache and cache / "tokens"
    output = folder / "shards"
    shards = tokenize_corpus(spark, folder / "clean", model, output, SHARDS, cache=of_tokens)
    return cleaned | {"shards": shards}


def make_clean(
    spark: SparkSession,
    texts: Texts,
    folder: Path,
    cache: Path | None = None,
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Make the clean corpus, and give its stats."""
    write_raw(folder / "raw", texts)
    return clean_corpus(
        spark,
        folder / "raw",
        folder / "clean",
        CLEAN,
        earlier=earlier and earlier / "clean",
        cache=cache and cache / "clean",
    )


def write_raw(folder: Path, texts: Texts) -> None:
    folder.mkdir(parents=True)
    for number, file in enumerate(texts):
        ids, contents = zip(*file, strict=True)
        table = pa.table({"id": ids, "text": contents, "source": ["manual"] * len(ids)})
        pq.write_table(table, folder / f"part-{number:05d}.parquet")


def source_files(generator: random.Random, documents: int, files: int) -> Texts:
    """Families of near-copies and some exact copies, spread over files."""
    texts = families(documents // 4, generator.randrange(10**6))
    texts += generator.sample(texts, documents // 10)
    generator.shuffle(texts)
    numbered = [(f"d{number:04d}", text) for number, text in enumerate(texts)]
    return [numbered[number::files] for number in range(files)]


def check_growth(spark: SparkSession, model_folder: Path, home: Path, seed: int) -> None:
    generator = random.Random(seed)
    texts = source_files(generator, documents=200, files=7)
    first, cache = home / "first", home / "cache"
    make(spark, texts[:5], model_folder, first, cache)
    # One file more, then another more and one of the first gone.
    make(spark, texts[:6], model_folder, home / "second", cache, earlier=first)
    kept = make(spark, texts[1:], model_folder, home / "kept", cache, earlier=first)
    fresh = make(spark, texts[1:], model_folder, home / "fresh", earlier=first)

    assert files_below(home / "kept" / "shards") == files_below(home / "fresh" / "shards")
    assert files_below(home / "kept" / "clean") == files_below(home / "fresh" / "clean")
    assert kept.pop("parts_prepared") == 1 < fresh.pop("parts_prepared") == kept["parts"]
    assert kept == fresh
    assert not list(home.rglob("*.scratch")) and not list(home.rglob("*.decisions*"))


def test_a_grown_corpus_is_that_of_a_run_from_nothing_after_the_same_one(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    check_growth(spark, model_folder, tmp_path, seed=1)


@pytest.mark.soak
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def test_any_grown_corpus_is_that_of_a_run_from_nothing_after_the_same_one(
    spark: SparkSession, model_folder: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    check_growth(spark, model_folder, tmp_path_factory.mktemp("grown"), seed)


def test_versions_of_one_document_that_have_left_are_told_apart_with_a_cache_and_without(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Texts of earlier corpora share an id where a document was edited more than once."""
    generator = random.Random(4)
    texts = [" ".join(f"w{generator.randrange(10**6)}" for _ in range(60)) for _ in range(10)]
    others = [(f"other{number}", text) for number, text in enumerate(texts[6:])]
    cache, earlier = tmp_path / "cache", None
    for week, version in enumerate(texts[:5]):
        folder = tmp_path / f"week{week}"
        make_clean(spark, [[("edited", version), *others]], folder, cache, earlier)
        earlier = folder
    # A near-copy of each version that has left, so that the versions themselves are compared.
    copies = [(f"copy{number}", f"{text} copied") for number, text in enumerate(texts[:5])]
    files = [[("edited", texts[5]), *others], copies]

    make_clean(spark, files, tmp_path / "warm", cache, earlier)
    make_clean(spark, files, tmp_path / "warmer", cache, earlier)
    make_clean(spark, files, tmp_path / "cold", None, earlier)

    cold = files_below(tmp_path / "cold" / "clean")
    assert files_below(tmp_path / "warm" / "clean") == cold
    assert files_below(tmp_path / "warmer" / "clean") == cold


def test_tokens_of_documents_that_stay_are_found_again_though_others_of_their_file_go(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    generator, first = random.Random(3), tmp_path / "first"
    texts = [
        [(f"{file}/{n}", " ".join(f"w{generator.randrange(10**6)}" for _ in range(60)))
         for n in range(40)]
        for file in range(4)
    ]  # fmt: skip
    make(spark, texts, model_folder, first, tmp_path / "cache")
    before = cached_tokens(tmp_path / "cache")
    assert count_written(tmp_path / "cache") == len(texts)
    # A longer copy of one document of the first file takes its place there.
    identifier, text = next(one for one in texts[0] if is_trained_on(first, one[0]))
    texts.append([("longer", f"{text} and more")])

    make(spark, texts, model_folder, tmp_path / "grown", tmp_path / "cache", first)

    after = cached_tokens(tmp_path / "cache")
    assert before.items() <= after.items() and len(after) - len(before) < len(texts)
    # The first part lost a document, and the last one is new.
    assert count_written(tmp_path / "cache") == len(texts) + 1
    assert not is_trained_on(tmp_path / "grown", identifier)
    assert is_trained_on(tmp_path / "grown", "longer")


def cached_tokens(cache: Path) -> dict[str, bytes]:
    """Entries with tokens or n-grams."""
    return {file.name: file.read_bytes() for file in (cache / "tokens").iterdir()}


def count_written(cache: Path) -> int:
    """How many parts of clean text are cached."""
    return len(list((cache / "clean").glob(f"{writing_key([])}-*")))


def is_trained_on(folder: Path, identifier: str) -> bool:
    files = (folder / "shards").glob("train-*.documents.parquet")
    return any(identifier in pq.read_table(file)["id"].to_pylist() for file in files)
