"""The held-out documents that a version was judged by, for its engine to be compared on."""

from collections.abc import Iterator

import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.shards.documents import list_documents, read_tokens
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store.store import Store
from llm_assets.registry.records import ModelVersion
from serving.comparison import JudgedDocument

SCORES_NAME = "scores.parquet"
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
    if evaluation is None or shards is None or not evaluation.stats["metric"]["is_bits"]:
        return []
    scores = pq.read_table(evaluation.path / SCORES_NAME)
    scores = scores.filter(pc.equal(scores["task"], "held_out"))
    stats = ShardStats.model_validate(shards.stats)
    if stats.form != "pretraining":
        return []
    held_out = ShardSet(shards.path, stats, "held_out")
    listed = list_documents(held_out)
    documents = []
    tokens = 0
    for row in scores.to_pylist():
        if tokens >= COMPARED_TOKENS or not row["score_candidate"]:
            break
        (found,) = read_tokens(held_out, listed.filter(pc.equal(listed["id"], row["document"])))
        tokens += row["tokens"]
        documents.append(
            JudgedDocument(
                id=row["document"],
                bytes=row["size"],
                bits=row["score_candidate"],
                windows=list(_windows(found[: row["tokens"]].tolist(), stats.sequence_length)),
            )
        )
    return documents


def _windows(tokens: list[int], length: int) -> Iterator[list[int]]:
    """A document as the evaluation reads it: every token but the first is predicted once."""
    for start in range(0, len(tokens) - 1, length):
        yield tokens[start : start + length + 1]
