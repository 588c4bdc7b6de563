"""The word runs of held-out texts, which no training text may repeat."""

import hashlib
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_jobs.kept import is_kept, name_kept
from spark_jobs.overlap import join_runs, load_runs, save_runs, word_runs
from spark_jobs.parquet import Part
from spark_jobs.progress import Report
from spark_jobs.split import Splitter
from spark_jobs.tasks import map_tasks

CODE_VERSION = "1"
"""Part of the name of kept runs; raise it when others are found."""


def keep_held_out_runs(
    spark: SparkSession,
    parts: list[Part],
    splitter: Splitter,
    words: int,
    folder: str,
    report: Report,
    judging: str | None,
) -> list[str]:
    """Keep the runs of all texts that judge, under a name that follows from them.

    Args:
        parts: those that hold held-out texts.
        words: in a run.
        folder: where runs are kept.
        judging: runs of other texts that judge, to be kept with them.

    Returns:
        Where they are; then what they were made of, which makes the next run quicker.
    """
    work = partial(_keep_runs, splitter=splitter, words=words, folder=folder)
    records = map_tasks(spark, "reading held-out texts", parts, work, report)
    pieces = sorted({record["runs"] for record in records} | ({judging} if judging else set()))
    runs = _name_runs(folder, pieces=[piece.rpartition("/")[2] for piece in pieces])
    if not is_kept(runs):
        save_runs(runs, join_runs(map(load_runs, pieces)))
    return [runs, *pieces]


def _keep_runs(part: Part, splitter: Splitter, words: int, folder: str) -> dict[str, Any]:
    table = part.read(["cluster", "pinned", "source", "text"])
    held_out = pa.array(splitter.splits(table) == "held_out")
    texts = table["text"].filter(held_out).to_pylist()
    content = "\0".join(texts).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    runs = _name_runs(folder, texts=digest, words=words)
    if not is_kept(runs):
        save_runs(runs, word_runs(texts, words))
    return {"runs": runs}


def _name_runs(folder: str, **decided_by: Any) -> str:
    return name_kept(folder, "npz", code_version=CODE_VERSION, **decided_by)
