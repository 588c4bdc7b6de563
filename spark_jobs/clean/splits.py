"""Which split each duplicate cluster belongs to, for ever.

What was in a split stays in it, by the record that every clean corpus hands to the next one
(`spark_jobs.clean.history`), whatever the settings say later: they decide over new text alone. A
cluster with text of an earlier corpus follows that text:

- With held-out or validation text, those documents stay as they are, and every other one of the
  cluster goes. Where they have left the sources, their nearest successor takes their place, unless
  the cluster was also trained on.
- With text that was trained on, it is trained on. A source that the settings hold out cannot judge
  with such text: it goes.

A cluster of new texts follows, in this order: a source that the settings assign to a split; the
document that had one of its ids before, since it is an edit of it; the cluster's hash.
"""

import hashlib
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.shard_set import Split
from spark_jobs.clean.history import History
from spark_jobs.settings import SplitSettings

NAMES: tuple[Split | None, ...] = (None, "train", "replay", "validation", "held_out")
"""Splits by how strict they are; a place in this list is a split's code."""
NONE, TRAIN, REPLAY, VALIDATION, HELD_OUT = range(5)

_DIGITS = 15
"""Hexadecimal digits compared; 60 bits are exact in Python and in Spark's long alike."""

assert set(get_args(Split)) == {*NAMES[1:]}


def by_hash(clusters: pa.Array, settings: SplitSettings) -> np.ndarray:
    """Codes of the splits that cluster ids fall into: shape (clusters,).

    An id, read as a number in [0, 1), is held out below the first share, validation below both.
    """
    if settings.seed:
        salt = settings.seed.to_bytes(8, "little", signed=True)
        clusters = pa.array(
            hashlib.blake2b(one.encode(), digest_size=16, salt=salt).hexdigest()
            for one in clusters.to_pylist()
        )
    held_out = pc.less(clusters, _threshold(settings.held_out))
    either = pc.less(clusters, _threshold(settings.held_out + settings.validation))
    codes = pc.if_else(held_out, HELD_OUT, pc.if_else(either, VALIDATION, TRAIN))
    return codes.to_numpy(zero_copy_only=False)


def _threshold(share: float) -> str:
    """The first cluster prefix past a share of all of them; prefixes compare as text."""
    number = round(share * 16**_DIGITS)
    return f"{number:0{_DIGITS}x}" if number < 16**_DIGITS else "g"


def codes_of(splits: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Split names as codes; null is `NONE`."""
    found = pc.index_in(splits, pa.array(NAMES[1:])).fill_null(-1)
    return np.asarray(found).astype(np.int64) + 1


def by_source(sources: pa.ChunkedArray, settings: SplitSettings) -> np.ndarray:
    """Codes of the splits that the settings assign to sources; `NONE` for the others."""
    places = pc.index_in(sources, pa.array(list(settings.sources), pa.string())).fill_null(-1)
    codes = [*map(NAMES.index, settings.sources.values()), NONE]
    return np.array(codes)[np.asarray(places)]


@dataclass(frozen=True)
class Texts:
    """Documents grouped by equal texts."""

    members: np.ndarray
    """Document numbers, group by group in the order of the texts' hashes."""
    group: np.ndarray
    """The group of each."""
    representatives: np.ndarray
    """Of each group, the document that stands for it."""


@dataclass(frozen=True)
class Memory:
    """What the record of earlier corpora says of each document, in the documents' order."""

    by_text: np.ndarray
    """Code of the split that this very text was in."""
    slices: np.ndarray
    """In which corpus of the lineage this text came first; of new text, the one being made."""
    by_id: np.ndarray
    """Code of the split that the document of this id was in, where its text is new."""

    def of_texts(self, texts: Texts) -> "Memory":
        """The same of each text, the strictest where its documents differ."""
        by_text, by_id = np.zeros((2, len(texts.representatives)), np.int64)
        np.maximum.at(by_text, texts.group, self.by_text[texts.members])
        np.maximum.at(by_id, texts.group, self.by_id[texts.members])
        by_id = np.where(by_text == NONE, by_id, NONE)
        return Memory(by_text, self.slices[texts.representatives], by_id)


def remember(documents: pa.Table, past: np.ndarray, history: History | None) -> Memory:
    """Look documents up in the record.

    Args:
        documents: `id` and `text_hash`; the last ones are those of `past`.
        past: places in the record of the texts that are no longer in the sources.
    """
    count = documents.num_rows
    if history is None:
        zeros = np.zeros(count, np.int64)
        return Memory(zeros, np.ones(count, np.int64), zeros)
    record = history.documents
    places = np.asarray(pc.index_in(documents["text_hash"], record["text_hash"]).fill_null(-1))
    places = places.astype(np.int64)
    # Under other cleaning settings a text may have another hash than it was recorded with.
    places[count - len(past) :] = past
    splits = np.append(codes_of(record["split"]), NONE)
    slices = np.append(record["slice"].to_numpy(), history.slice)
    ids = np.asarray(pc.index_in(documents["id"], record["id"]).fill_null(-1))
    by_text = splits[places]
    return Memory(by_text, slices[places], np.where(by_text == NONE, splits[ids], NONE))


@dataclass(frozen=True)
class Fates:
    """What becomes of each text; all arrays have the shape (texts,)."""

    split: np.ndarray
    """Code of its cluster's split."""
    guarded: np.ndarray
    """Whether its cluster holds earlier held-out or validation text."""
    spoilt: np.ndarray
    """Whether its cluster would judge, but was trained on."""
    eligible: np.ndarray
    """Whether it may stay: the best such document of a cluster does."""
    stays: np.ndarray
    """Whether it stays even beside others of its cluster."""


def decide(
    component: np.ndarray, present: np.ndarray, memory: Memory, forced: np.ndarray, new: np.ndarray
) -> Fates:
    """The split of every cluster, and who may be in it. All arrays have the shape (texts,).

    Args:
        component: equal numbers mean one cluster.
        present: whether the text is still in the sources.
        forced: codes of the splits that the settings assign to the texts' sources.
        new: codes of the splits that the clusters' hashes mean.
    """

    def strictest(codes: np.ndarray) -> np.ndarray:
        found = np.zeros(component.max(initial=-1) + 1, np.int64)
        np.maximum.at(found, component, codes)
        return found[component]

    recorded = memory.by_text
    trained = strictest((recorded == TRAIN) | (recorded == REPLAY)) > 0
    guard = strictest(np.where(recorded >= VALIDATION, recorded, NONE))
    guarded = guard > NONE
    force = strictest(np.where(present & (forced >= VALIDATION), forced, NONE))
    of_ids = strictest(memory.by_id)
    fresh = np.where(force, force, np.where(of_ids, of_ids, new))
    split = np.where(guarded, guard, np.where(trained, TRAIN, fresh))
    spoilt = trained & ~guarded & (force > NONE)
    stays = present & guarded & (recorded == guard)
    has_guard = strictest(stays.astype(np.int64)) > 0
    as_forced = (force == NONE) | (forced == force)
    eligible = np.where(guarded, np.where(has_guard, stays, ~trained), as_forced)
    return Fates(split, guarded, spoilt, present & eligible & ~spoilt, stays)


def final_splits(fates: Fates, memory: Memory, forced: np.ndarray) -> np.ndarray:
    """Codes for the documents that stay: training text goes where its own source says."""
    trained = (fates.split == TRAIN) | (fates.split == REPLAY)
    lenient = np.where(forced == REPLAY, REPLAY, TRAIN)
    chosen_by_hash = (fates.split >= VALIDATION) & ~fates.guarded & (memory.by_id == NONE)
    is_lenient_source = (forced == TRAIN) | (forced == REPLAY)
    return np.where(trained | (chosen_by_hash & is_lenient_source), lenient, fates.split)
