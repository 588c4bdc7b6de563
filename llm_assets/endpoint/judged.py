"""The held-out documents that a version was judged by, for its engine to be compared on."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet, list_documents, read_tokens
from artifacts.store.store import Store
from llm_assets.gate.judge import DOMAIN_TASK
from llm_assets.registry.state import ModelVersion
from recipes.evaluation.settings import SCORES_NAME
from serving.comparison import JudgedDocument

COMPARED_TOKENS = 2_000
"""So many tokens of held-out documents are enough to tell a wrong model, and take seconds."""


def judged_documents(store: Store, version: ModelVersion) -> list[JudgedDocument]:
    """The first documents of a version's evaluation.

    None where it was not measured in bits of plain text, as a base model, or where evaluation or
    shards are no longer in the store.
    """
    evaluation, shards = (
        store.find_named(kind, version.lineage[kind]) if kind in version.lineage else None
        for kind in ("eval_metrics", "tokenized_shards")
    )
    if evaluation is None or shards is None:
        return []
    stats = ShardStats.model_validate(shards.stats)
    if not evaluation.stats["metric"]["is_bits"] or stats.form != "pretraining":
        return []
    scores = held_out_scores(pq.read_table(evaluation.path / SCORES_NAME))
    scores = scores.filter(pc.is_valid(scores["score_candidate"]))
    before = pc.subtract(pc.cumulative_sum(scores["tokens"]), scores["tokens"])
    return read_judged(scores.filter(pc.less(before, COMPARED_TOKENS)), shards.path, stats)


def held_out_scores(scores: pa.Table) -> pa.Table:
    """Of an evaluation's scores, those of the documents that decide."""
    return scores.filter(pc.equal(scores["task"], DOMAIN_TASK))


def read_judged(scores: pa.Table, folder: Path, stats: ShardStats) -> list[JudgedDocument]:
    """Measured documents with their tokens, in the order of their scores, but those erased since.

    Args:
        scores: rows of an evaluation's held-out documents.
        folder, stats: of the shards that they were read from.
    """
    held_out = ShardSet(folder, stats, "held_out")
    listed = list_documents(held_out)
    listed = listed.filter(pc.is_in(listed["id"], scores["document"]))
    is_talk = stats.form == "conversations"
    marks = read_tokens(held_out, listed, "targets") if is_talk else [None] * len(listed)
    read = zip(read_tokens(held_out, listed), marks, strict=True)
    found = dict(zip(listed["id"].to_pylist(), read, strict=True))
    return [
        _judged(row, found[row["document"]], stats.sequence_length)
        for row in scores.to_pylist()
        if row["document"] in found
    ]


def _judged(
    row: dict[str, Any], found: tuple[np.ndarray, np.ndarray | None], length: int
) -> JudgedDocument:
    """A document as the evaluation reads it: every token but the first is predicted once."""
    tokens, marks = found
    # Text was cut to what was measured; of a conversation, whose answers count, all of it was read.
    read = tokens[: row["tokens"]] if marks is None else tokens
    starts = range(0, len(read) - 1, length)
    counted = [] if marks is None else [marks[a + 1 : a + length + 1] > 0 for a in starts]
    return JudgedDocument(
        id=row["document"],
        bytes=row["size"],
        bits=row["score_candidate"],
        windows=[read[start : start + length + 1].tolist() for start in starts],
        counted=[marked.tolist() for marked in counted],
    )
