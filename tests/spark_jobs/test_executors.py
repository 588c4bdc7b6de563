"""Deciding on executors that are processes of their own, and that are lost."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.settings import CleanCorpusSettings
from tests.spark_jobs.lose_executors import AFTER_STEPS
from tests.spark_jobs.test_decide import first_texts, write_raw


@pytest.mark.soak
@pytest.mark.fault(
    "clean_corpus",
    "executor of Spark killed, in three steps",
    sees="nothing",
    then="the step is done again, and the corpus is the same to the byte",
)
def test_two_executors_of_which_one_is_killed_in_several_stages_give_the_same_bytes(
    spark: SparkSession, tmp_path: Path
) -> None:
    generator = random.Random(11)
    raw, output, expected = (str(tmp_path / name) for name in ("raw", "clean", "expected"))
    write_raw(Path(raw), first_texts(generator), generator)
    settings = CleanCorpusSettings(minimum_characters=40)
    spec = clean.CleanSpec(raw_corpus=raw, output=expected, settings=settings)
    clean.run(spark, spec, lambda line: None)

    command = [sys.executable, "-m", "tests.spark_jobs.lose_executors", raw, output]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)

    assert done.returncode == 0
    assert len(set(json.loads(done.stdout.splitlines()[-1])["killed"])) == len(AFTER_STEPS)
    written = {path.name: path.read_bytes() for path in Path(output).iterdir()}
    assert written == {path.name: path.read_bytes() for path in Path(expected).iterdir()}
