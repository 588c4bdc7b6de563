"""Both jobs where each of their tasks is lost after its work, and done a second time."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings
from spark_jobs.tokenize import job as tokenize
from tests.spark_jobs.test_decide import SPLIT, first_texts, write_raw
from tests.spark_jobs.test_growth import files_below


def specs(folder: Path, name: str, model: Path) -> tuple[clean.CleanSpec, tokenize.TokenizeSpec]:
    corpus = str(folder / name / "clean")
    cleaning = clean.CleanSpec(
        raw_corpus=str(folder / "raw"),
        output=corpus,
        settings=CleanCorpusSettings(minimum_characters=40, split=SPLIT),
    )
    tokenizing = tokenize.TokenizeSpec(
        clean_corpus=corpus,
        base_model=str(model),
        output=str(folder / name / "shards"),
        settings=TokenizedShardsSettings(sequence_length=64, shard_bytes=4_096),
    )
    return cleaning, tokenizing


@pytest.mark.soak
@pytest.mark.fault(
    "clean_corpus",
    "each task of Spark lost after its work, and done twice",
    sees="nothing",
    then="nothing is doubled, and the corpus is the same to the byte",
)
@pytest.mark.fault(
    "tokenized_shards",
    "each task of Spark lost after its work, and done twice",
    sees="nothing",
    then="nothing is doubled, and the shards are the same to the byte",
)
def test_tasks_that_are_done_twice_make_the_same_bytes(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    generator = random.Random(11)
    write_raw(tmp_path / "raw", first_texts(generator), generator)
    cleaning, tokenizing = specs(tmp_path, "expected", model_folder)
    clean.run(spark, cleaning, lambda line: None)
    tokenize.run(spark, tokenizing, lambda line: None)

    command = [sys.executable, "-m", "tests.spark_jobs.run_tasks_twice"]
    for number, spec in enumerate(specs(tmp_path, "twice", model_folder)):
        path = tmp_path / f"{number}.json"
        path.write_text(spec.model_dump_json())
        command.append(str(path))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)

    assert json.loads(done.stdout.splitlines()[-1])["failed"] > 20
    assert files_below(tmp_path / "twice") == files_below(tmp_path / "expected")
