"""Rows arrive where they are sent, once, in two ways of which the shards tell nothing."""

import json
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from spark_jobs.settings import (
    DecontaminationSettings,
    SourceMix,
    SplitSettings,
    TokenizedShardsSettings,
)
from spark_jobs.tokenize import job as tokenize
from spark_jobs.tokenize.shuffle import by_files
from spark_jobs.tokenize.shuffle.by_files import Range, RangeWriter, read_ranges
from tests.spark_jobs.lose_senders import AFTER_SHARDS
from tests.spark_jobs.splits import clean_table
from tests.spark_jobs.test_growth import files_below
from tests.spark_jobs.test_held_out import overlapping_texts
from tests.stand_ins.google import BUCKET, LocalGoogle

BY_FILES, BY_SPARK = 10**6, 0
"""Most ranges of files."""
SPLIT = SplitSettings(validation=0.1, held_out=0.3)
SETTINGS = TokenizedShardsSettings(
    sequence_length=64,
    shard_bytes=4096,
    decontamination=DecontaminationSettings(ngram_size=5, maximum_overlap=0.3),
)
MIXING = {"wiki": SourceMix(weight=1.5), "manual": SourceMix(documents=50)}

Rows = list[list[tuple[int, list[str]]]]
"""For each writer, the receiver and the rows of every table."""


def write_in_parts(table: pa.Table, folder: Path, generator: random.Random) -> None:
    """Write rows in any order, cut into files and row groups anywhere."""
    folder.mkdir()
    rows = generator.sample(range(table.num_rows), table.num_rows)
    cuts = sorted(generator.sample(range(1, table.num_rows), 3))
    for number, first in enumerate([0, *cuts]):
        chosen = table.take(rows[first : [*cuts, table.num_rows][number]])
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(chosen, path, row_group_size=generator.randint(20, 90))


def test_both_ways_give_the_same_shards_and_lists_under_any_partitioning(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    generator = random.Random(3)
    texts = overlapping_texts(500, generator)
    sources = [generator.choice(["manual", "wiki", "wiki", "general"]) for _ in texts]
    table = clean_table([f"d{n}" for n in range(len(texts))], texts, sources, SPLIT)

    def run(corpus: str, shuffle_ranges: int) -> tuple[dict, dict[str, bytes]]:
        output = tmp_path / f"{corpus}-{shuffle_ranges}"
        spec = tokenize.TokenizeSpec(
            clean_corpus=str(tmp_path / corpus),
            base_model=str(model_folder),
            output=str(output),
            settings=SETTINGS.model_copy(update={"mixing": MIXING}),
            shuffle_ranges=shuffle_ranges,
        )
        return tokenize.run(spark, spec, lambda line: None), files_below(output)

    for corpus in ("one", "other"):
        write_in_parts(table, tmp_path / corpus, generator)
    stats, expected = run("one", BY_FILES)

    assert run("one", BY_SPARK) == (stats, expected)
    assert run("other", BY_SPARK)[1] == expected
    assert len(stats["shards"]) > 10
    assert stats["left_out"]["not_sampled"] and any(
        stats["removed_as_overlapping_held_out"].values()
    )


@pytest.mark.soak
@pytest.mark.fault(
    "tokenized_shards",
    "executor of Spark killed, twice while shards are written of what it sent",
    sees="nothing",
    then="its parts are tokenized again, and the shards are the same to the byte",
)
def test_two_executors_of_which_one_is_killed_while_it_sends_give_the_same_shards(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    generator = random.Random(5)
    texts = overlapping_texts(2_000, generator)
    table = clean_table([f"d{n}" for n in range(len(texts))], texts, ["wiki"] * len(texts), SPLIT)
    write_in_parts(table, tmp_path / "clean", generator)
    spec = tokenize.TokenizeSpec(
        clean_corpus=str(tmp_path / "clean"),
        base_model=str(model_folder),
        output=str(tmp_path / "shards"),
        settings=SETTINGS,
        shuffle_ranges=BY_SPARK,
    )
    (tmp_path / "spec.json").write_text(spec.model_dump_json())

    command = [sys.executable, "-m", "tests.spark_jobs.lose_senders", f"{tmp_path}/spec.json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)

    assert done.returncode == 0
    assert len(set(json.loads(done.stdout.splitlines()[-1])["killed"])) == len(AFTER_SHARDS)
    expected = spec.model_copy(
        update={"output": str(tmp_path / "expected"), "shuffle_ranges": BY_FILES}
    )
    tokenize.run(spark, expected, lambda line: None)
    assert files_below(tmp_path / "shards") == files_below(tmp_path / "expected")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sent=st.lists(
        st.lists(st.tuples(st.integers(-2, 3), st.lists(st.text(), min_size=1)), min_size=1),
        min_size=1,
    ),
    buffer=st.integers(1, 200),
)
def test_what_several_writers_send_arrives_whole(
    sent: Rows, buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_files, "BUFFER_BYTES", buffer)
    ranges: dict[int, list[Range]] = defaultdict(list)
    expected: dict[int, list[str]] = defaultdict(list)
    for tables in sent:
        with RangeWriter(str(tmp_path)) as writer:
            for number, rows in tables:
                writer.add(number, pa.table({"row": pa.array(rows, pa.string())}))
                expected[number] += rows
        for number, found in writer.ranges.items():
            ranges[number] += found

    arrived = {number: read_ranges(found)["row"].to_pylist() for number, found in ranges.items()}

    assert arrived == expected


def test_an_attempt_that_fails_leaves_the_next_one_alone(tmp_path: Path) -> None:
    table = pa.table({"row": ["a"]})
    with pytest.raises(OSError, match="lost"), RangeWriter(str(tmp_path)) as first:
        first.add(0, table)
        raise OSError("the worker was lost")

    with RangeWriter(str(tmp_path)) as second:
        second.add(0, table)

    assert not first.ranges
    assert read_ranges(second.ranges[0]).equals(table)


def test_rows_arrive_through_a_bucket(google: LocalGoogle) -> None:
    tables = [pa.table({"row": [f"{number}" * 1_000] * 900}) for number in range(6)]

    with RangeWriter(f"gs://{BUCKET}/shuffle") as writer:
        for number, table in enumerate(tables):
            writer.add(number % 2, table)

    for number in range(2):
        assert read_ranges(writer.ranges[number]).equals(pa.concat_tables(tables[number::2]))
