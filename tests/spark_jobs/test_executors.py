"""The jobs on Spark that loses executors and what tasks have done."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs import settings
from spark_jobs.clean import job as clean
from spark_jobs.read import opened
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import write_snapshot
from spark_jobs.tokenize import job as tokenize
from tests.spark_jobs.jobs import files_below
from tests.spark_jobs.read.test_job import settings_of, spec_of, write_texts
from tests.spark_jobs.test_decide import BY_SPARK, IN_MEMORY, SPLIT, first_texts, write_raw
from tests.stand_ins.google import BUCKET, LocalGoogle

CLEANING = settings.CleanCorpusSettings(minimum_characters=40, split=SPLIT)
TOKENIZING = settings.TokenizedShardsSettings(
    sequence_length=64,
    shard_bytes=4_096,
    decontamination=settings.DecontaminationSettings(ngram_size=5, maximum_overlap=0.3),
)
STEPS = {
    *("copying text", "numbering ids that come again"),
    *("normalizing and signing", "reading documents", "grouping exact copies"),
    *("finding shared bands", "pairing candidates", "comparing signatures", "comparing texts"),
    *("connecting copies", "deciding splits", "choosing survivors", "deciding documents"),
    *("bringing decisions to parts", "sorting", "writing clean text"),
    *("reading held-out texts", "finding held-out n-grams", "tokenizing and writing shards"),
}
"""Those in which an executor is killed at least; shorter ones may be over before."""

Made = dict[str, bytes]


@pytest.fixture(scope="module")
def text(started_google: LocalGoogle) -> Iterator[RawCorpusSettings]:
    """Files in a bucket, whose ids come again, too large for one chunk."""
    folder = f"gs://{BUCKET}/executors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "_LEAST_BYTES", 2_000)
        patch.setattr(opened, "_MOST_BYTES", 20_000)
        write_texts(folder)
        yield settings_of({"path": folder})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a raw corpus with copies of every kind."""
    folder = tmp_path_factory.mktemp("both")
    generator = random.Random(11)
    write_raw(folder / "raw", first_texts(generator), generator)
    return folder


def specs(
    folder: Path, name: str, model_folder: Path, in_memory: int
) -> tuple[clean.CleanSpec, tokenize.TokenizeSpec]:
    corpus = str(folder / name / "clean")
    cleaning = clean.CleanSpec(
        raw_corpus=str(folder / "raw"),
        output=corpus,
        settings=CLEANING,
        documents_in_memory=in_memory,
    )
    tokenizing = tokenize.TokenizeSpec(
        clean_corpus=corpus,
        base_model=str(model_folder),
        output=str(folder / name / "shards"),
        settings=TOKENIZING,
        held_out_in_memory=in_memory,
    )
    return cleaning, tokenizing


@pytest.fixture(scope="module")
def expected(
    spark: SparkSession, text: RawCorpusSettings, folder: Path, model_folder: Path
) -> Made:
    """What the jobs make where nothing is lost."""
    write_snapshot(text, folder / "expected" / "read", lambda line: None)
    cleaning, tokenizing = specs(folder, "expected", model_folder, IN_MEMORY)
    clean.run(spark, cleaning, lambda line: None)
    tokenize.run(spark, tokenizing, lambda line: None)
    return files_below(folder / "expected")


def make(
    text: RawCorpusSettings, folder: Path, program: str, model_folder: Path
) -> tuple[dict, Made]:
    """What a program tells of how it ran the jobs by Spark's joins, and what they made."""
    command = [sys.executable, "-m", f"tests.spark_jobs.{program}"]
    (folder / program).mkdir()
    copying = spec_of(text, folder / program / "read", cache=folder / f"cache-{program}")
    for spec in (copying, *specs(folder, program, model_folder, BY_SPARK)):
        path = folder / f"{program}-{len(command)}.json"
        path.write_text(spec.model_dump_json())
        command.append(str(path))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), files_below(folder / program)


@pytest.mark.soak
@pytest.mark.fault(
    "raw_corpus",
    "Spark executor killed, in each step",
    sees="nothing",
    then="the step is repeated, and the corpus is byte-identical",
)
@pytest.mark.fault(
    "clean_corpus",
    "Spark executor killed, in each step",
    sees="nothing",
    then="the step is repeated, and the corpus is byte-identical",
)
@pytest.mark.fault(
    "tokenized_shards",
    "Spark executor killed, in each step and while shards are written from its output",
    sees="nothing",
    then="its output is recomputed, and the shards are byte-identical",
)
def test_two_executors_of_which_one_is_killed_in_each_step_make_the_same_bytes(
    text: RawCorpusSettings, folder: Path, model_folder: Path, expected: Made
) -> None:
    told, made = make(text, folder, "lose_executors", model_folder)

    assert STEPS - {step for step, _ in told["killed"]} == set()
    assert ["tokenizing and writing shards", True] in told["killed"]
    assert told["again"] > 0
    assert made == expected


@pytest.mark.soak
@pytest.mark.fault(
    "raw_corpus",
    "each Spark task lost after finishing its work, and repeated",
    sees="nothing",
    then="nothing is duplicated, and the corpus is byte-identical",
)
@pytest.mark.fault(
    "clean_corpus",
    "each Spark task lost after finishing its work, and repeated",
    sees="nothing",
    then="nothing is duplicated, and the corpus is byte-identical",
)
@pytest.mark.fault(
    "tokenized_shards",
    "each Spark task lost after finishing its work, and repeated",
    sees="nothing",
    then="nothing is duplicated, and the shards are byte-identical",
)
def test_tasks_that_are_done_twice_make_the_same_bytes(
    text: RawCorpusSettings, folder: Path, model_folder: Path, expected: Made
) -> None:
    told, made = make(text, folder, "run_tasks_twice", model_folder)

    assert told["failed"] > len(STEPS)
    assert made == expected
