"""Tokens reach the same shards, and listed documents the same lists, under any partitioning, in
whichever of two ways reference n-grams reach the text."""

import json
import random
from collections import defaultdict
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_jobs import settings
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import JobRun
from spark_jobs.tokenize import job as tokenize
from spark_jobs.tokenize.shards import NumberedRows, find_overlap, shuffle
from tests.spark_jobs.jobs import files_below, tokenize_corpus
from tests.spark_jobs.splits import clean_table

SPLIT = settings.SplitSettings(validation=0.1, held_out=0.3)
SETTINGS = settings.TokenizedShardsSettings(
    sequence_length=64,
    shard_bytes=4096,
    decontamination=settings.DecontaminationSettings(ngram_size=5, maximum_overlap=0.3),
    mixing={"wiki": settings.SourceMix(weight=1.5), "manual": settings.SourceMix(documents=50)},
)
SENT, JOINED = 500, 0
"""Most megabytes of held-out text whose n-grams are sent to every task."""


def overlapping_texts(count: int, generator: random.Random) -> list[str]:
    """Texts with sentences of one another, too short ones, and two set phrases, one of them in more
    reference texts than are counted."""
    sentences = [
        " ".join(f"w{generator.randrange(10**5)}" for _ in range(generator.randint(3, 15)))
        for _ in range(count)
    ]
    phrases = {"all rights to this text are reserved": 0.8, "in no event shall they be liable": 0.1}
    texts = []
    for number in range(count):
        chosen = [sentences[number], *generator.choices(sentences, k=generator.randint(0, 3))]
        chosen += [one for one, share in phrases.items() if generator.random() < share]
        texts.append(" ".join(generator.sample(chosen, len(chosen))))
    return texts


def write_in_parts(table: pa.Table, folder: Path, generator: random.Random) -> None:
    """Write rows in any order, cut into files and row groups anywhere."""
    folder.mkdir()
    rows = generator.sample(range(table.num_rows), table.num_rows)
    cuts = sorted(generator.sample(range(1, table.num_rows), 3))
    for number, first in enumerate([0, *cuts]):
        chosen = table.take(rows[first : [*cuts, table.num_rows][number]])
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(chosen, path, row_group_size=generator.randint(20, 90))


def test_shards_and_lists_are_the_same_under_any_partitioning_and_way_of_n_grams(
    spark: SparkSession, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "DOCUMENTS_PER_LIST", 200)
    generator = random.Random(3)
    texts = overlapping_texts(600, generator)
    sources = [generator.choice(["manual", "wiki", "wiki", "general"]) for _ in texts]
    table = clean_table([f"d{n}" for n in range(len(texts))], texts, sources, SPLIT)
    evaluation = tmp_path / "evaluation.jsonl"
    # What more than a hundred of them share is a set phrase before held-out text is read.
    measured = [" ".join(texts[:3]), *(f"in no event shall they be liable {n}" for n in range(101))]
    evaluation.write_text("\n".join(json.dumps({"text": one}) for one in measured))

    def run(corpus: str, held_out_in_memory: int) -> tuple[dict, dict[str, bytes]]:
        output = tmp_path / f"{corpus}-{held_out_in_memory}"
        stats = tokenize_corpus(
            spark,
            tmp_path / corpus,
            model_folder,
            output,
            SETTINGS,
            evaluation_texts=[str(evaluation)],
            held_out_in_memory=held_out_in_memory,
        )
        return stats, files_below(output)

    for corpus in ("one", "other"):
        write_in_parts(table, tmp_path / corpus, generator)
    (tmp_path / "whole").mkdir()
    pq.write_table(table, tmp_path / "whole" / "part-00000.parquet")
    stats, expected = run("whole", SENT)

    assert run("one", SENT)[1] == expected
    assert run("other", JOINED)[1] == expected
    assert run("whole", JOINED) == (stats, expected)
    assert len(stats["shards"]) > 10 and stats["left_out"]["not_sampled"]
    removed = stats["removed_as_overlapping_held_out"]
    assert all(removed[split] and stats["documents"][split] for split in ("train", "replay"))
    shards = tmp_path / f"whole-{SENT}"
    lists = [pq.read_table(file) for file in sorted(shards.glob("overlaps_*"))]
    ids = [listed["id"].to_pylist() for listed in lists]
    assert len(lists) == 4 and all(one == sorted(one) for one in ids)
    assert len({*chain(*ids)}) == sum(map(len, ids)) == sum(removed.values())
    assert find_overlap(str(shards), ids[3][0]) == lists[3]["overlap"][0].as_py()


def test_what_parts_send_arrives_whole_and_once(spark: SparkSession, tmp_path: Path) -> None:
    generator = random.Random(4)
    sent = [
        [(generator.randint(0, 4), f"{part}-{row}") for row in range(generator.choice([0, 1, 30]))]
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
        JobRun(spark, lambda line: None, str(tmp_path), None),
        parts,
        send,
        receive=lambda arrived: {arrived[0]: sorted(arrived[1]["row"].to_pylist())},
        receivers=6,
    )

    assert len(arrived) == len(expected) == 5
    assert {number: rows for one in arrived for number, rows in one.items()} == expected
