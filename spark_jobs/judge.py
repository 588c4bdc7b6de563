"""Decides which of the prepared documents stay: one survivor of each duplicate cluster.

The survivor is the longest document, of several the one with the smallest id; a cluster's id is the
smallest of its members' (see `spark_jobs.split`). Neither depends on how the text is partitioned.

Documents that an earlier held-out set pins stay, all of them, and whatever is a copy or near-copy
of one goes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.arrays import run_starts, sorted_unique
from spark_jobs.duplicates import NearDuplicates, find_near_duplicates
from spark_jobs.minhash import shingle, sum_words
from spark_jobs.prepare import bands_of
from spark_jobs.prepared import Prepared
from spark_jobs.progress import Report
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.similarity import KeptSimilarities, comparison
from spark_jobs.text import CLUSTER_BYTES, fold

EXACT, NEAR, PIN = "exact_duplicate", "near_duplicate", "copy_of_held_out"

DUPLICATES_NAME = "duplicates.parquet"
DUPLICATE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("survivor", pa.string()),
        ("cluster", pa.string()),
        ("reason", pa.string()),
        ("neighbour", pa.string()),
        ("similarity", pa.float64()),
    ]
)
"""A dropped copy: the document kept in its place, and the most similar document that was compared
with it (Jaccard similarity of the shingle sets; 1 for an exact copy)."""

_BY_WORTH = [("pinned", "descending"), ("characters", "descending"), ("id", "ascending")]


@dataclass(frozen=True)
class Judgement:
    """What became of every prepared document, in the order of the parts."""

    documents: pa.Table
    """`id`, `source`, `cluster` (final), `characters`, `bytes`, `reason` (null: kept),
    `repaired`, `pinned`."""
    part_offsets: np.ndarray
    """Shape (parts + 1,): where each part's documents begin."""
    duplicates: pa.Table
    """Rows of `DUPLICATE_SCHEMA`."""
    cluster_sizes: np.ndarray
    """Documents in each cluster, survivor included."""
    candidate_pairs: int
    verified_pairs: int

    @cached_property
    def kept(self) -> np.ndarray:
        """Shape (documents,): whether each stays."""
        return np.asarray(pc.is_null(self.documents["reason"]))


def judge(
    urls: list[str],
    settings: CleanCorpusSettings,
    report: Report,
    pinned_parts: int,
    similarities: str,
) -> Judgement:
    """Decide over the prepared parts at `urls`, of which the last `pinned_parts` are pinned.

    Args:
        similarities: where those of candidate pairs are kept for the next run.

    Raises:
        UserError: an id comes twice.
    """
    prepared = Prepared(urls, pinned_parts)
    prepared.refuse_repeated_ids()
    documents = prepared.documents
    sound = np.flatnonzero(np.asarray(pc.is_null(documents["reason"])))
    clusters = _fixed_strings(documents["cluster"])
    members = sound[np.argsort(clusters[sound], kind="stable")]
    begins = run_starts(clusters[members])
    group = np.cumsum(begins) - 1
    leader = _survivors(documents, members, group)
    leaders = members[leader[begins]]
    is_copy = leader != np.arange(len(members))
    exact, exact_group = members[is_copy], group[is_copy]
    near = _near(prepared, leaders, clusters[leaders], settings, similarities)
    report(
        f"{len(exact):,} exact copies; {near.candidates:,} candidate pairs, "
        f"{near.verified:,} of them compared, {len(near.edges.left):,} near-copies"
    )
    survivor = _survivors(documents, leaders, near.component)
    near_copies = np.flatnonzero(survivor != np.arange(len(leaders)))
    near_copies = near_copies[~prepared.pinned[leaders[near_copies]]]
    dropped = np.concatenate([exact, leaders[near_copies]])
    kept_for = leaders[survivor[np.concatenate([exact_group, near_copies])]]
    reason = np.zeros(len(clusters), np.int64)
    reason[exact], reason[leaders[near_copies]] = 1, 2
    reason[dropped[prepared.pinned[kept_for]]] = 3
    reasons = pa.array([None, EXACT, NEAR, PIN]).take(pa.array(reason))
    smallest = _first_of(near.component, np.arange(len(leaders)))
    joined = np.flatnonzero(smallest[group] != group)
    clusters[members[joined]] = clusters[leaders[smallest[group[joined]]]]
    sizes = np.bincount(near.component[group]) if len(group) else np.empty(0, np.int64)
    documents = documents.set_column(2, "cluster", _as_strings(clusters))
    reasons = pc.coalesce(documents["reason"], reasons)
    return Judgement(
        documents=documents.set_column(5, "reason", reasons),
        part_offsets=prepared.offsets,
        duplicates=pa.concat_tables(
            [
                _describe_exact(documents, exact, leaders, exact_group, survivor),
                _describe_near(documents, near_copies, leaders, survivor, near),
            ]
        ).sort_by("id"),
        cluster_sizes=sizes,
        candidate_pairs=near.candidates,
        verified_pairs=near.verified,
    )


def _near(
    prepared: Prepared,
    leaders: np.ndarray,
    texts: np.ndarray,
    settings: CleanCorpusSettings,
    similarities: str,
) -> NearDuplicates:
    """Near-duplicates among the leaders, whose text hashes are `texts`."""
    bands = bands_of(settings)
    keys = np.empty((len(leaders), 0), np.uint64)
    if bands and len(leaders):
        keys = prepared.fetch_matrix(leaders, "bands", np.uint64)
    threshold = settings.near_duplicates.threshold
    compare = comparison(
        lambda numbers: prepared.fetch_matrix(leaders[numbers], "signature", np.uint8),
        lambda numbers: _fetch_shingles(prepared, leaders[numbers], settings),
        threshold,
    )
    kept = KeptSimilarities(similarities, texts, compare)
    near = find_near_duplicates(keys, kept.compare, threshold)
    kept.save()
    return near


def _fetch_shingles(
    prepared: Prepared, documents: np.ndarray, settings: CleanCorpusSettings
) -> list[np.ndarray]:
    """The shingle sets of documents: sorted hashes, each once."""
    sets: list[np.ndarray] = [np.empty(0, np.uint64)] * len(documents)
    for places, texts in prepared.fetch(documents, "text"):
        words = sum_words([fold(text) for text in texts.to_pylist()])
        shingles = shingle(words, settings.near_duplicates.shingle_words)
        for number, place in enumerate(places):
            first, last = shingles.offsets[number : number + 2]
            sets[place] = sorted_unique(shingles.hashes[first:last])
    return sets


def _survivors(documents: pa.Table, numbers: np.ndarray, component: np.ndarray) -> np.ndarray:
    """For each of some documents, the place among them of its component's survivor."""
    survivor = np.arange(len(numbers))
    # Nearly all are alone in their component, and need not be compared.
    several = np.flatnonzero(np.bincount(component)[component] > 1) if len(component) else survivor
    worth = documents.select([name for name, _ in _BY_WORTH]).take(numbers[several])
    rank = np.empty(len(several), np.int64)
    rank[np.asarray(pc.sort_indices(worth, sort_keys=_BY_WORTH))] = np.arange(len(several))
    survivor[several] = several[_first_of(component[several], rank)]
    return survivor


def _first_of(component: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """For each element, the element of lowest rank in its component."""
    order = np.lexsort((rank, component))
    first = order[run_starts(component[order])]
    best = np.empty(component.max(initial=-1) + 1, np.int64)
    best[component[first]] = first
    return best[component]


def _describe_exact(
    documents: pa.Table,
    copies: np.ndarray,
    leaders: np.ndarray,
    group: np.ndarray,
    survivor: np.ndarray,
) -> pa.Table:
    return _describe(
        documents, copies, leaders[survivor[group]], EXACT, leaders[group], np.ones(len(copies))
    )


def _describe_near(
    documents: pa.Table,
    copies: np.ndarray,
    leaders: np.ndarray,
    survivor: np.ndarray,
    near: NearDuplicates,
) -> pa.Table:
    """Near-copies with the most similar document that each was verified against."""
    ends = np.concatenate([near.edges.left, near.edges.right])
    others = np.concatenate([near.edges.right, near.edges.left])
    similarity = np.tile(near.edges.similarity, 2)
    order = np.lexsort((others, -similarity, ends))
    first = order[np.searchsorted(ends[order], copies)] if len(copies) else order[:0]
    return _describe(
        documents,
        leaders[copies],
        leaders[survivor[copies]],
        NEAR,
        leaders[others[first]],
        similarity[first],
    )


def _describe(
    documents: pa.Table,
    copies: np.ndarray,
    survivors: np.ndarray,
    reason: str,
    neighbours: np.ndarray,
    similarity: np.ndarray,
) -> pa.Table:
    ids = documents["id"].combine_chunks()
    return pa.table(
        {
            "id": ids.take(pa.array(copies)),
            "survivor": ids.take(pa.array(survivors)),
            "cluster": documents["cluster"].combine_chunks().take(pa.array(copies)),
            "reason": pa.array([reason] * len(copies), pa.string()),
            "neighbour": ids.take(pa.array(neighbours)),
            "similarity": similarity,
        },
        DUPLICATE_SCHEMA,
    )


def _fixed_strings(values: pa.ChunkedArray) -> np.ndarray:
    """Equally long ASCII strings as numpy bytes, which compare and sort without Python."""
    content = values.combine_chunks().cast(pa.binary(2 * CLUSTER_BYTES))
    return np.frombuffer(content.buffers()[1], f"S{2 * CLUSTER_BYTES}")[: len(content)].copy()


def _as_strings(values: np.ndarray) -> pa.StringArray:
    """`_fixed_strings` back again."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.itemsize
    content = [pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.StringArray.from_buffers(len(values), *content)
