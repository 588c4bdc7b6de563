"""The word runs of held-out texts, which no training text may repeat."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from spark_jobs.kept import is_kept, name_kept
from spark_jobs.overlap import join_runs, load_runs, save_runs, word_runs
from spark_jobs.parquet import Part
from spark_jobs.progress import Report
from spark_jobs.tasks import map_tasks

CODE_VERSION = "1"
"""Part of the name of kept runs; raise it when others are found."""


def keep_held_out_runs(
    spark: SparkSession,
    held_out: list[tuple[Part, list[str]]],
    words: int,
    folder: str,
    report: Report,
    judging: str | None,
) -> list[str]:
    """Keep the runs of all texts that judge, under a name that follows from them.

    Args:
        held_out: parts with the ids of their held-out documents.
        words: in a run.
        folder: where runs are kept.
        judging: runs of other texts that judge, to be kept with them.

    Returns:
        Where they are; then what they were made of, which makes the next run quicker.
    """
    texts = [
        HeldOutTexts(part, ids, _name_runs(folder, part=part.name(["text"]), ids=ids, words=words))
        for part, ids in held_out
        if ids
    ]
    missing = [one for one in texts if not is_kept(one.runs)]
    map_tasks(spark, "reading held-out texts", missing, partial(_keep_runs, words=words), report)
    pieces = sorted({one.runs for one in texts} | ({judging} if judging else set()))
    runs = _name_runs(folder, pieces=[piece.rpartition("/")[2] for piece in pieces])
    if not is_kept(runs):
        save_runs(runs, join_runs(map(load_runs, pieces)))
    return [runs, *pieces]


@dataclass(frozen=True)
class HeldOutTexts:
    """Held-out documents of a part."""

    part: Part
    ids: list[str]
    runs: str
    """Where their word runs are kept."""


def _keep_runs(texts: HeldOutTexts, words: int) -> dict[str, Any]:
    table = texts.part.read(["id", "text"])
    chosen = table["text"].filter(pc.is_in(table["id"], pa.array(texts.ids)))
    save_runs(texts.runs, word_runs(chosen.to_pylist(), words))
    return {}


def _name_runs(folder: str, **decided_by: Any) -> str:
    return name_kept(folder, "npz", code_version=CODE_VERSION, **decided_by)
