"""What the model before and the one after remember of the forgotten texts, by a child process."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from artifacts.shards.documents import list_documents
from artifacts.shards.format import ShardStats, Split
from artifacts.shards.shard_set import ShardSet
from artifacts.shards.texts import text_numbers
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.certificate import REPLACES
from llm_assets.runners.child_process import ask_program
from recipes.attribution.spec import MemorySpec
from recipes.data.seen import SEEN_NAME, Seen
from recipes.spec import MODEL_FOLDER

CONTROLS = 99
"""Texts beside the forgotten ones that were never trained on, so that ranks go up to 100."""
_SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")


def measure_memory(store: Store, after: Artifact, texts: Sequence[str]) -> dict[str, Any] | None:
    """Measure the model that was replaced and the one that replaces it, by
    `recipes.attribution.memory`.

    Returns:
        None where the shards no longer have the texts, or the model before is gone.

    Raises:
        UserError: the program failed; the message has what it said.
    """
    before = store.find_named("checkpoint", after.stats[REPLACES])
    name = after.manifest.inputs["tokenized_shards"]
    shards = store.find_named("tokenized_shards", name)
    if before is None or shards is None:
        return None
    stats = ShardStats.model_validate(shards.stats)
    there = [split for split in _SPLITS if any(e.split == split and e.rows for e in stats.shards)]
    listed = list_documents(ShardSet(shards.url, stats, *there))
    known = [text for text in texts if text in set(listed["text_hash"].to_pylist())]
    if not known:
        return None
    spec = MemorySpec(
        models={
            role: str(artifact.path / MODEL_FOLDER)
            for role, artifact in (("before", before), ("after", after))
        },
        shards_folder=shards.url,
        shards=stats,
        splits=there,
        texts=known,
        controls=_controls(listed, known, [before, after]),
    )
    return ask_program("recipes.attribution.memory", spec, "The probe of memory")


def _controls(listed: Any, texts: Sequence[str], models: Sequence[Artifact]) -> list[str]:
    """Documents that no model here was trained on, those nearest in length to the texts."""
    hashes = np.array(listed["text_hash"].to_pylist())
    lengths = np.log(listed["tokens"].to_numpy())
    trained = [Seen.read(f"{model.url}/{SEEN_NAME}").texts for model in models]
    read = np.isin(text_numbers(hashes.tolist()), np.concatenate(trained))
    is_text = np.isin(hashes, np.array(texts))
    distance = np.abs(lengths - lengths[is_text].mean())
    order = np.argsort(np.where(read | is_text, np.inf, distance), kind="stable")
    unread = int((~(read | is_text)).sum())
    return [str(one) for one in hashes[order[: min(CONTROLS, unread)]]]
