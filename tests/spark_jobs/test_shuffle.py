"""Tokens reach the same shards, and listed documents the same lists, under any partitioning."""

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark_jobs import settings
from spark_jobs.runtime.parquet import Part
from spark_jobs.tokenize.shards import NumberedRows, shuffle
from tests.spark_jobs.jobs import tokenize_corpus
from tests.spark_jobs.splits import clean_table
from tests.spark_jobs.test_growth import files_below
from tests.spark_jobs.test_held_out import overlapping_texts

SPLIT = settings.SplitSettings(validation=0.1, held_out=0.3)
SETTINGS = settings.TokenizedShardsSettings(
    sequence_length=64,
    shard_bytes=4096,
    decontamination=settings.DecontaminationSettings(ngram_size=5, maximum_overlap=0.3),
    mixing={"wiki": settings.SourceMix(weight=1.5), "manual": settings.SourceMix(documents=50)},
)


def write_in_parts(table: pa.Table, folder: Path, generator: random.Random) -> None:
    """Write rows in any order, cut into files and row groups anywhere."""
    folder.mkdir()
    rows = generator.sample(range(table.num_rows), table.num_rows)
    cuts = sorted(generator.sample(range(1, table.num_rows), 3))
    for number, first in enumerate([0, *cuts]):
        chosen = table.take(rows[first : [*cuts, table.num_rows][number]])
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(chosen, path, row_group_size=generator.randint(20, 90))


def test_shards_and_lists_are_the_same_under_any_partitioning(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    generator = random.Random(3)
    texts = overlapping_texts(500, generator)
    sources = [generator.choice(["manual", "wiki", "wiki", "general"]) for _ in texts]
    table = clean_table([f"d{n}" for n in range(len(texts))], texts, sources, SPLIT)

    def run(corpus: str) -> tuple[dict, dict[str, bytes]]:
        output = tmp_path / f"{corpus}-shards"
        stats = tokenize_corpus(spark, tmp_path / corpus, model_folder, output, SETTINGS)
        return stats, files_below(output)

    for corpus in ("one", "other"):
        write_in_parts(table, tmp_path / corpus, generator)
    (tmp_path / "whole").mkdir()
    pq.write_table(table, tmp_path / "whole" / "part-00000.parquet")
    stats, expected = run("whole")

    assert run("one")[1] == expected
    assert run("other")[1] == expected
    assert len(stats["shards"]) > 10
    assert stats["left_out"]["not_sampled"] and any(
        stats["removed_as_overlapping_held_out"].values()
    )


def test_what_parts_send_arrives_whole_and_once(spark: SparkSession) -> None:
    generator = random.Random(4)
    sent = [
        [(generator.randint(-2, 2), f"{part}-{row}") for row in range(generator.choice([0, 1, 30]))]
        for part in range(8)
    ]
    expected = defaultdict(list)
    for number, row in sorted(pair for rows in sent for pair in rows):
        expected[number].append(row)

    def send(part: tuple[int, Part]) -> list[NumberedRows]:
        rows = sent[part[0]]
        table = pa.table({"row": pa.array([row for _, row in rows], pa.string())})
        return [NumberedRows(np.array([number for number, _ in rows], np.int64), table)]

    parts = [Part(str(number), 0, len(rows)) for number, rows in enumerate(sent)]
    arrived = shuffle(
        spark,
        parts,
        send,
        receive=lambda arrived: {arrived[0]: sorted(arrived[1]["row"].to_pylist())},
        receivers=6,
        report=lambda line: None,
    )

    assert len(arrived) == len(expected) == 5
    assert {number: rows for one in arrived for number, rows in one.items()} == expected
