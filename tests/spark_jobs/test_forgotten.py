"""What was forgotten is in no later corpus: not as itself, as its copy, or from the record."""

from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.settings import CleanCorpusSettings
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.test_lineage import SPLIT, splits, text


def test_forgotten_text_comes_back_neither_by_id_nor_by_copy_nor_from_the_record(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    def make(name: str, raw: list[tuple[str, str]], **changes: object) -> dict:
        spec = clean.CleanSpec(
            raw_corpus=raw_corpus(raw),
            output=str(tmp_path / name / "clean"),
            settings=CleanCorpusSettings(minimum_characters=40, split=SPLIT),
            **changes,
        )
        return clean.run(spark, spec, lambda line: None)

    raw = [(f"a{number}", text(number)) for number in range(60)]
    make("first", [*raw, ("near", text(7) + " appendix")])
    parts = [pq.read_table(path) for path in sorted((tmp_path / "first/clean").glob("part-*"))]
    hashes = {row["id"]: row["text_hash"] for part in parts for row in part.to_pylist()}
    forgotten = clean.Forgotten(ids=("near", "a7", "a8"), texts=(hashes["near"], hashes["a8"]))

    # One is still in the sources with its copy, one comes under another name, one has left them.
    later = [*raw[:8], *raw[9:], ("near", text(7) + " appendix"), ("renamed", text(8))]
    earlier = str(tmp_path / "first/clean")
    stats = make("second", later, forgotten=forgotten, earlier=earlier)

    assert stats["dropped"]["forgotten"] == 3
    kept = set(splits(tmp_path / "second"))
    assert kept == {one for one, _ in raw} - {"a7", "a8"}
    assert "forgotten" not in stats["dropped_examples"]
    assert stats["past"] == 0 and not list((tmp_path / "second/clean/past").glob("*.parquet"))
