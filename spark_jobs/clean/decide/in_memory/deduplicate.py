"""Decides which of the prepared documents stay: one survivor of each duplicate cluster.

The survivor is the longest document, of several the one with the smallest id; a cluster's id is the
smallest of its members'. Neither depends on how the text is partitioned.

Texts of earlier corpora that have left the sources are clustered with the others, so that a
cluster stays in its split; `clean.splits` says which that is, and who may survive in it.

Three steps, each on columns of whole arrays: `group_exact` finds the documents of equal text, one
of which represents them; `find_near` clusters the representatives; `decide_survivors` says of every
document whether it stays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.numbers.arrays import run_starts
from spark_jobs.clean.decide.decider import GUARDED, PAST, SPOILT
from spark_jobs.clean.decide.duplicates import EXACT, NEAR
from spark_jobs.clean.decide.in_memory.duplicates import list_duplicates
from spark_jobs.clean.decide.in_memory.near_duplicates import NearDuplicates, find_near_duplicates
from spark_jobs.clean.decide.in_memory.prepared import Prepared
from spark_jobs.clean.decide.in_memory.texts import Texts, text_facts
from spark_jobs.clean.decide.in_memory.verify import comparison
from spark_jobs.clean.history import History
from spark_jobs.clean.prepare import bands_of
from spark_jobs.clean.splits import (
    NAMES,
    ClusterFacts,
    Fates,
    by_hash,
    by_source,
    decide,
    final_splits,
    representative_rank,
)
from spark_jobs.settings import CleanCorpusSettings, SplitSettings
from spark_jobs.text.normalize import HASH_BYTES

_REASONS = (None, EXACT, NEAR, GUARDED, SPOILT, PAST)

_SURVIVAL_ORDER = [
    ("preferred", "descending"),
    ("characters", "descending"),
    ("id", "ascending"),
]


@dataclass(frozen=True)
class Decisions:
    """What became of every prepared document, in the order of the parts."""

    documents: pa.Table
    """Those of `Prepared`, with `cluster`, `reason` (null: stays), `split` and `slice`."""
    duplicates: pa.Table
    """Rows of `clean.duplicates.DUPLICATE_SCHEMA`."""
    cluster_sizes: np.ndarray
    """Documents in each cluster, survivor included."""

    @cached_property
    def stays(self) -> np.ndarray:
        """Shape (documents,): whether each stays."""
        return np.asarray(pc.is_null(self.documents["reason"]))


def group_exact(documents: pa.Table, split: SplitSettings) -> Texts:
    """Group documents of equal text, those with a fault left out.

    Args:
        documents: rows of `documents.DOCUMENT_SCHEMA`.
    """
    hashes = _fixed_strings(documents["text_hash"])
    sound = np.flatnonzero(np.asarray(pc.is_null(documents["fault"])))
    members = sound[np.argsort(hashes[sound], kind="stable")]
    begins = run_starts(hashes[members])
    group = np.cumsum(begins) - 1
    forced = by_source(documents["source"], split)
    rank = representative_rank(documents["past"].to_numpy(), forced)
    survivor = _survivors(documents, members, group, rank[members])
    return Texts(members, group, members[survivor[begins]])


def find_near(
    prepared: Prepared,
    texts: Texts,
    settings: CleanCorpusSettings,
    fetch_shingles: Callable[[np.ndarray], list[np.ndarray]],
) -> NearDuplicates:
    """Cluster the near-copies among different texts, numbered as in `texts.representatives`.

    Args:
        fetch_shingles: document numbers to shingle sets (`clean.verify.fetch_shingles`).
    """
    documents, bands = texts.representatives, bands_of(settings)
    keys = np.empty((len(documents), 0), np.uint64)
    if bands and len(documents):
        keys = prepared.fetch_matrix(documents, "bands", np.uint64)
    threshold = settings.near_duplicates.threshold
    compare = comparison(
        lambda numbers: prepared.fetch_matrix(documents[numbers], "signature", np.uint8),
        lambda numbers: fetch_shingles(documents[numbers]),
        threshold,
    )
    return find_near_duplicates(keys, compare, threshold)


def decide_survivors(
    documents: pa.Table,
    texts: Texts,
    near: NearDuplicates,
    history: History | None,
    split: SplitSettings,
) -> Decisions:
    """Give every document its cluster, the reason why it goes or its split.

    Args:
        documents: the small columns, one row a document; nothing else of the corpus is needed.
        texts: of `group_exact`, `near`: of `find_near`.
    """
    chosen = _choose(documents, texts, near, history, split)
    reason = pa.array(_REASONS).take(pa.array(_reasons(documents, texts, chosen)))
    columns = {
        "cluster": _as_strings(_clusters(documents, texts, chosen)),
        "reason": pc.coalesce(reason, documents["fault"]),
        "split": pa.array(NAMES).take(_of_documents(documents, texts, chosen.split)),
        "slice": _of_documents(documents, texts, chosen.slice),
    }
    for name, values in columns.items():
        documents = documents.append_column(name, values)
    present = ~documents["past"].to_numpy()[texts.members]
    sizes = np.bincount(near.component[texts.group], present)
    duplicates = list_duplicates(documents, texts, chosen.survivor, near)
    return Decisions(documents, duplicates, sizes[sizes > 0].astype(np.int64))


@dataclass(frozen=True)
class _Chosen:
    """What was decided of each different text; all arrays have the shape (texts,)."""

    fates: Fates
    named_by: np.ndarray
    """The text whose hash names the cluster: the first, since texts are in the order of hashes."""
    survivor: np.ndarray
    """The text that stays in its place; itself where it stays."""
    stays: np.ndarray
    split: np.ndarray
    """Places in `NAMES`; 0 for a text that goes."""
    slice: np.ndarray
    """0 for a text that goes."""


def _choose(
    documents: pa.Table,
    texts: Texts,
    near: NearDuplicates,
    history: History | None,
    split: SplitSettings,
) -> _Chosen:
    representatives = texts.representatives
    numbers = np.arange(len(representatives))
    named_by = _first_of(near.component, numbers)
    facts = text_facts(documents, texts, history, split)
    names = documents["text_hash"].take(pa.array(representatives[named_by])).combine_chunks()
    clusters = _largest(facts.for_cluster(), near.component)
    fates = decide(facts, clusters, by_hash(names, split))
    eligible = fates.eligible.astype(np.int64)
    best = _survivors(documents, representatives, near.component, eligible)
    stays = fates.stays | (fates.eligible & (best == numbers))
    return _Chosen(
        fates,
        named_by,
        np.where(stays, numbers, best),
        stays,
        np.where(stays, final_splits(fates, facts), 0),
        np.where(stays, facts.slices, 0),
    )


def _largest(facts: ClusterFacts, component: np.ndarray) -> ClusterFacts:
    """Of each text's cluster, the largest codes."""

    def largest(codes: np.ndarray) -> np.ndarray:
        found = np.zeros(component.max(initial=-1) + 1, np.int64)
        np.maximum.at(found, component, codes)
        return found[component]

    return ClusterFacts(**{name: largest(codes) for name, codes in vars(facts).items()})


def _reasons(documents: pa.Table, texts: Texts, chosen: _Chosen) -> np.ndarray:
    """Places in `_REASONS`: shape (documents,)."""
    reasons = np.zeros(documents.num_rows, np.int64)
    of_cluster = np.where(chosen.fates.guarded, 3, np.where(chosen.fates.spoilt, 4, 0))
    reasons[texts.members] = np.where(of_cluster, of_cluster, 1)[texts.group]
    of_representative = np.where(of_cluster, of_cluster, 2)
    reasons[texts.representatives] = np.where(chosen.stays, 0, of_representative)
    reasons[documents["past"].to_numpy()] = 5
    return reasons


def _clusters(documents: pa.Table, texts: Texts, chosen: _Chosen) -> np.ndarray:
    """The cluster's id of every document, as numpy bytes; its own hash where it has a fault."""
    clusters = _fixed_strings(documents["text_hash"])
    names = clusters[texts.representatives[chosen.named_by]]
    clusters[texts.members] = names[texts.group]
    return clusters


def _of_documents(documents: pa.Table, texts: Texts, of_texts: np.ndarray) -> pa.Array:
    """Numbers of texts as those of their representatives; 0 for all other documents."""
    values = np.zeros(documents.num_rows, np.int64)
    values[texts.representatives] = of_texts
    return pa.array(values)


def _survivors(
    documents: pa.Table, numbers: np.ndarray, component: np.ndarray, preferred: np.ndarray
) -> np.ndarray:
    """For each of some documents, the place among them of its component's survivor.

    The most preferred one is the survivor, of several the longest.
    """
    survivor = np.arange(len(numbers))
    # Nearly all are alone in their component, and need not be compared.
    several = np.flatnonzero(np.bincount(component)[component] > 1) if len(component) else survivor
    columns = documents.select([name for name, _ in _SURVIVAL_ORDER[1:]]).take(numbers[several])
    columns = columns.append_column("preferred", pa.array(preferred[several]))
    rank = np.empty(len(several), np.int64)
    rank[np.asarray(pc.sort_indices(columns, sort_keys=_SURVIVAL_ORDER))] = np.arange(len(several))
    survivor[several] = several[_first_of(component[several], rank)]
    return survivor


def _first_of(component: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """For each element, the element of lowest rank in its component."""
    order = np.lexsort((rank, component))
    first = order[run_starts(component[order])]
    best = np.empty(component.max(initial=-1) + 1, np.int64)
    best[component[first]] = first
    return best[component]


def _fixed_strings(values: pa.ChunkedArray) -> np.ndarray:
    """Equally long ASCII strings as numpy bytes, which compare and sort without Python."""
    content = values.combine_chunks().cast(pa.binary(2 * HASH_BYTES))
    return np.frombuffer(content.buffers()[1], f"S{2 * HASH_BYTES}")[: len(content)].copy()


def _as_strings(values: np.ndarray) -> pa.StringArray:
    """`_fixed_strings` back again."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.itemsize
    content = [pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.StringArray.from_buffers(len(values), *content)
