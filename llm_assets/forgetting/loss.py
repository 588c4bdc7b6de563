"""The loss of forgotten texts before and after, beside texts that neither model was trained on.

What a model was trained on it predicts better than text of the same kind that it never met. Where
the forgotten texts stood out by that before and no longer do, the model no longer shows that it
has read them. It is the plainest of the membership tests compared by Carlini and others,
"Membership Inference Attacks From First Principles" (2022): it shows strong memory, and a loss
among the others' proves nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from artifacts.shards.format import ALL_SPLITS, ShardStats
from artifacts.shards.shard_set import ShardSet, list_documents, text_numbers
from artifacts.store.store import Artifact, Store
from llm_assets.runners.child_process import ask_program
from recipes.data.records import SEEN_NAME, LineageRecord
from recipes.evaluation.text_loss import TextLossSpec
from recipes.spec import MODEL_FOLDER

OTHERS = 99
"""Texts beside the forgotten ones, at most."""


class ModelLoss(BaseModel):
    """The loss of texts under one model, in bits per byte."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    forgotten: dict[str, float]
    """By `text_hash`."""
    others: list[float]
    """Of texts that were never trained on, lowest first: of the same source where there are such,
    and nearest in length."""

    def __str__(self) -> str:
        own = list(self.forgotten.values())
        text = f"{np.mean(own):.3f} bits per byte, the mean of {len(own):,} forgotten texts"
        if not self.others:
            return f"{text}; no text of the shards was never trained on"
        low, middle, high = np.quantile(self.others, (0.1, 0.5, 0.9))
        return (
            f"{text}; {middle:.3f} the median of {len(self.others):,} texts like them that were "
            f"never trained on ({low:.3f} to {high:.3f} for eight tenths of these)"
        )


def measure_loss(
    store: Store, before: str, after: Artifact, texts: Sequence[str]
) -> dict[str, ModelLoss] | None:
    """The loss of texts under a checkpoint, `before`, and the one that takes its place, `after`.

    Returns:
        None where the shards no longer have the texts, or the model before is gone.

    Raises:
        UserError: the program that measures failed; the message has what it said.
    """
    replaced = store.find_named("checkpoint", before)
    shards = store.find_named("tokenized_shards", after.manifest.inputs["tokenized_shards"])
    if replaced is None or shards is None:
        return None
    stats = ShardStats.model_validate(shards.stats)
    splits = [s for s in ALL_SPLITS if any(e.split == s and e.rows for e in stats.shards)]
    listed = list_documents(ShardSet(shards.url, stats, *splits))
    known = sorted(set(texts) & set(listed["text_hash"].to_pylist()))
    if not known:
        return None
    others = _others(listed, known, [replaced, after])
    spec = TextLossSpec(
        models={
            role: str(model.path / MODEL_FOLDER)
            for role, model in (("before", replaced), ("after", after))
        },
        shards_folder=shards.url,
        shards=stats,
        splits=splits,
        texts=[*known, *others],
    )
    losses = ask_program("recipes.evaluation.text_loss", spec, "Measuring the loss")
    return {
        role: ModelLoss(
            forgotten={text: loss[text] for text in known},
            others=sorted(loss[text] for text in others),
        )
        for role, loss in losses.items()
    }


def _others(listed: Any, texts: Sequence[str], models: Sequence[Artifact]) -> list[str]:
    """Texts that no model was trained on, those most like the forgotten ones first."""
    hashes, sources = (np.array(listed[name].to_pylist()) for name in ("text_hash", "source"))
    lengths = np.log(listed["tokens"].to_numpy())
    trained = [LineageRecord.read(f"{model.url}/{SEEN_NAME}").texts for model in models]
    is_text = np.isin(hashes, texts)
    is_read = np.isin(text_numbers(hashes.tolist()), np.concatenate(trained))
    elsewhere = ~np.isin(sources, sources[is_text])
    order = np.lexsort((np.abs(lengths - lengths[is_text].mean()), elsewhere))
    return [str(text) for text in hashes[order[~(is_read | is_text)[order]]][:OTHERS]]
