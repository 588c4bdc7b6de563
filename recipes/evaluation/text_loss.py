"""The loss of some texts under several models: `python -m recipes.evaluation.text_loss --spec`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.program.entry import run_program
from artifacts.program.lifetime import importing
from artifacts.progress import Report
from artifacts.settings import Settings
from artifacts.shards.format import ShardStats, Split
from artifacts.shards.shard_set import ShardSet, list_documents, read_tokens


class TextLossSpec(Settings):
    """Which texts, under which models."""

    models: dict[str, str]
    """Role to the Hugging Face folder of a causal language model."""
    shards_folder: str
    shards: ShardStats
    splits: list[Split]
    """Those that hold the texts."""
    texts: list[str]
    """By their `text_hash`."""


def measure(spec: TextLossSpec, report: Report) -> dict[str, Any]:
    """Role to text to bits per byte; raises UserError where a model or the shards cannot be read.

    Evaluations choose held-out documents themselves, and measure general text beside them.
    """
    with importing():
        from recipes.evaluation.bits import load_causal, text_bits
        from recipes.evaluation.documents import TokenizedDocument

    shards = ShardSet(spec.shards_folder, spec.shards, *spec.splits)
    listed = list_documents(shards)
    listed = listed.filter(pc.is_in(listed["text_hash"], pa.array(spec.texts, pa.string())))
    documents = [
        TokenizedDocument(row["text_hash"], row["cluster"], row["bytes"], tokens.astype(np.int64))
        for row, tokens in zip(listed.to_pylist(), read_tokens(shards, listed), strict=True)
    ]
    losses: dict[str, dict[str, float]] = {}
    for role, folder in spec.models.items():
        report(f"The loss of {len(documents):,} texts under the model {role}")
        bits = text_bits(load_causal(Path(folder)), documents, spec.shards.sequence_length)
        losses[role] = {d.id: float(b) / d.bytes for d, b in zip(documents, bits, strict=True)}
    return losses


if __name__ == "__main__":
    sys.exit(run_program(TextLossSpec, measure))
