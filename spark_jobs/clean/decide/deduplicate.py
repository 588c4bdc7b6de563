"""Decides which of the prepared documents stay: a few of a template, one survivor of near-copies.

The survivor is the longest document, of several the one with the smallest id. Near-copies and texts
of one template are a cluster, whose id is the smallest of its members'. None of it depends on how
the text is partitioned.

Texts of earlier corpora that have left the sources are clustered with the others, so that a cluster
stays in its split; `spark_jobs.clean.history` says which that is, and who may survive in it.

Four steps, each on columns of whole arrays: `group_exact` finds the documents of equal text, one of
which represents them; `thin_out` leaves a few texts of each template; `find_near` clusters the
representatives; `decide_survivors` says of every document whether it stays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.numbers import run_starts
from spark_jobs.clean.decide.decider import (
    DUPLICATE_SCHEMA,
    EXACT,
    GUARDED,
    NEAR,
    PAST,
    SPOILT,
    TEMPLATE,
)
from spark_jobs.clean.decide.near_duplicates import (
    Edges,
    NearDuplicates,
    PreparedParts,
    comparison,
    components,
    find_near_duplicates,
)
from spark_jobs.clean.history import (
    NAMES,
    NONE,
    ON_RECORD,
    VALIDATION,
    ClusterFacts,
    Fates,
    History,
    TextFacts,
    by_hash,
    by_source,
    codes_of,
    decide,
    final_splits,
    representative_rank,
)
from spark_jobs.clean.prepare import bands_of
from spark_jobs.settings import CleanCorpusSettings, SplitSettings
from spark_jobs.text import HASH_BYTES


@dataclass(frozen=True)
class Texts:
    """Documents grouped by equal texts."""

    members: np.ndarray
    """Document numbers, group by group in the order of the texts' hashes."""
    group: np.ndarray
    """The group of each."""
    representatives: np.ndarray
    """Of each group, the document that stands for it."""


def text_facts(
    documents: pa.Table, texts: Texts, history: History | None, split: SplitSettings
) -> TextFacts:
    """What is known of each text, the strictest where its documents differ.

    Args:
        documents: rows of `decider.DOCUMENT_SCHEMA`.
    """
    by_text, by_id, slices = _look_up(documents, history)
    strictest_text, strictest_id = np.zeros((2, len(texts.representatives)), np.int64)
    np.maximum.at(strictest_text, texts.group, by_text[texts.members])
    np.maximum.at(strictest_id, texts.group, by_id[texts.members])
    return TextFacts(
        present=~documents["past"].to_numpy()[texts.representatives],
        forced=by_source(documents["source"], split)[texts.representatives],
        by_text=strictest_text,
        by_id=np.where(strictest_text == NONE, strictest_id, NONE),
        slices=slices[texts.representatives],
    )


def recorded_ranks(documents: pa.Table, history: History | None) -> np.ndarray:
    """What the record adds to each document's `history.representative_rank`: shape (documents,)."""
    if history is None:
        return np.zeros(documents.num_rows, np.int64)
    record, present = history.documents, ~documents["past"].to_numpy()
    places = pc.index_in(documents["text_hash"], record["text_hash"])
    is_same = pc.equal(record["id"].take(places), documents["id"]).fill_null(False)
    judges = codes_of(record["split"])[np.asarray(places.fill_null(0))] >= VALIDATION
    return np.where(np.asarray(is_same) & present, np.where(judges, ON_RECORD, 1), 0)


def _look_up(
    documents: pa.Table, history: History | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each document, the split its text was in, the one its id was in, and its text's slice."""
    if history is None:
        zeros = np.zeros(documents.num_rows, np.int64)
        return zeros, zeros, zeros + 1
    record = history.documents
    places = np.asarray(pc.index_in(documents["text_hash"], record["text_hash"]).fill_null(-1))
    splits = np.append(codes_of(record["split"]), NONE)
    slices = np.append(record["slice"].to_numpy(), history.slice)
    ids = np.asarray(pc.index_in(documents["id"], record["id"]).fill_null(-1))
    # Under other cleaning settings a text may have another hash than it was recorded with.
    past = documents["past"].to_numpy()
    by_text = np.where(past, documents["recorded_split"].to_numpy(), splits[places])
    of_texts = np.where(past, documents["recorded_slice"].to_numpy(), slices[places])
    return by_text, np.where(by_text == NONE, splits[ids], NONE), of_texts


def list_duplicates(
    documents: pa.Table, texts: Texts, survivor: np.ndarray, near: NearDuplicates
) -> pa.Table:
    """Rows of `DUPLICATE_SCHEMA` for all copies of the corpus, by id.

    Args:
        documents: `id`, `cluster` and `past`, one row a document.
        survivor: shape (texts,), the text that stays in the place of each.
    """
    past = documents["past"].to_numpy()
    exact = _describe_exact(documents, texts, past, survivor)
    return pa.concat_tables(
        [exact, _describe_near(documents, texts, past, survivor, near)]
    ).sort_by("id")


def _describe_exact(
    documents: pa.Table, texts: Texts, past: np.ndarray, survivor: np.ndarray
) -> pa.Table:
    """The exact copies, each with its text's representative as the neighbor."""
    representative = texts.representatives[texts.group]
    is_copy = (texts.members != representative) & ~past[texts.members]
    copies, group = texts.members[is_copy], texts.group[is_copy]
    survivors = texts.representatives[survivor[group]]
    similarity = np.ones(len(copies))
    return _describe(documents, copies, survivors, EXACT, representative[is_copy], similarity)


def _describe_near(
    documents: pa.Table,
    texts: Texts,
    past: np.ndarray,
    survivor: np.ndarray,
    near: NearDuplicates,
) -> pa.Table:
    """The near-copies, each with the most similar document that it was verified against."""
    representatives = texts.representatives
    is_dropped = ~past[representatives] & (survivor != np.arange(len(representatives)))
    dropped = np.flatnonzero(is_dropped)
    ends = np.concatenate([near.edges.left, near.edges.right])
    others = np.concatenate([near.edges.right, near.edges.left])
    similarity = np.tile(near.edges.similarity, 2)
    order = np.lexsort((others, -similarity, ends))
    first = order[np.searchsorted(ends[order], dropped)] if len(dropped) else order[:0]
    return _describe(
        documents,
        representatives[dropped],
        representatives[survivor[dropped]],
        NEAR,
        representatives[others[first]],
        similarity[first],
    )


def _describe(
    documents: pa.Table,
    copies: np.ndarray,
    survivors: np.ndarray,
    reason: str,
    neighbors: np.ndarray,
    similarity: np.ndarray,
) -> pa.Table:
    ids = documents["id"].combine_chunks()
    return pa.table(
        {
            "id": ids.take(pa.array(copies)),
            "survivor": ids.take(pa.array(survivors)),
            "cluster": documents["cluster"].combine_chunks().take(pa.array(copies)),
            "reason": pa.array([reason] * len(copies), pa.string()),
            "neighbor": ids.take(pa.array(neighbors)),
            "similarity": similarity,
        },
        DUPLICATE_SCHEMA,
    )


_REASONS = (None, EXACT, NEAR, GUARDED, SPOILT, PAST, TEMPLATE)
_STAYS, _EXACT, _NEAR, _GUARDED, _SPOILT, _PAST, _TEMPLATE = range(len(_REASONS))
"""Places in `_REASONS`."""

_SURVIVAL_ORDER = [
    ("preferred", "descending"),
    ("characters", "descending"),
    ("id", "ascending"),
]


@dataclass(frozen=True)
class Decisions:
    """What became of every prepared document, in the order of the parts."""

    documents: pa.Table
    """Those of `PreparedParts`, with `cluster`, `reason` (null: stays), `split` and `slice`."""
    duplicates: pa.Table
    """Rows of `decider.DUPLICATE_SCHEMA`."""
    cluster_sizes: np.ndarray
    """Documents in each cluster, survivor included."""

    @cached_property
    def stays(self) -> np.ndarray:
        """Shape (documents,): whether each stays."""
        return np.asarray(pc.is_null(self.documents["reason"]))


def group_exact(documents: pa.Table, history: History | None, split: SplitSettings) -> Texts:
    """Group documents of equal text, those with a fault left out.

    Args:
        documents: rows of `decider.DOCUMENT_SCHEMA`.
    """
    hashes = _fixed_strings(documents["text_hash"])
    sound = np.flatnonzero(np.asarray(pc.is_null(documents["fault"])))
    members = sound[np.argsort(hashes[sound], kind="stable")]
    begins = run_starts(hashes[members])
    group = np.cumsum(begins) - 1
    forced = by_source(documents["source"], split)
    rank = representative_rank(documents["past"].to_numpy(), forced)
    rank += recorded_ranks(documents, history)
    survivor = _survivors(documents, members, group, rank[members])
    return Texts(members, group, members[survivor[begins]])


def thin_out(
    documents: pa.Table, texts: Texts, history: History | None, keep: int | None
) -> tuple[pa.Table, Texts]:
    """Leave a few texts of each template, and give the documents of the others a fault.

    Those on record all stay, and come first; then those of smaller hash.
    """
    table = documents.select(["shape", "text_hash", "past"]).take(texts.representatives)
    known = history.documents["text_hash"] if history else pa.array([], pa.string())
    is_new = np.asarray(pc.invert(pc.is_in(table["text_hash"], known)))
    numbers = np.flatnonzero(pc.and_not(table["shape"].is_valid(), table["past"]))
    shapes = table["shape"].take(numbers).to_numpy()
    order = np.lexsort((numbers, is_new[numbers], shapes))
    numbers, places = numbers[order], np.arange(len(order))
    first = np.maximum.accumulate(np.where(run_starts(shapes[order]), places, 0))
    stays = np.ones(len(is_new), bool)
    stays[numbers] = ~is_new[numbers] | (places - first < (keep or len(numbers)))
    is_left = stays[texts.group]
    faults = np.zeros(documents.num_rows, bool)
    faults[texts.members[~is_left]] = True
    column = pc.if_else(pa.array(faults), TEMPLATE, documents["fault"])
    group = (np.cumsum(stays) - 1)[texts.group[is_left]]
    left = Texts(texts.members[is_left], group, texts.representatives[stays])
    return documents.set_column(documents.column_names.index("fault"), "fault", column), left


def find_near(
    prepared: PreparedParts,
    texts: Texts,
    settings: CleanCorpusSettings,
    fetch_shingles: Callable[[np.ndarray], list[np.ndarray]],
) -> NearDuplicates:
    """Cluster the near-copies among different texts, numbered as in `texts.representatives`.

    Args:
        fetch_shingles: document numbers to shingle sets (`near_duplicates.fetch_shingles`).
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
    sizes = np.bincount(chosen.cluster[texts.group], present)
    duplicates = list_duplicates(documents, texts, chosen.survivor, near)
    return Decisions(documents, duplicates, sizes[sizes > 0].astype(np.int64))


@dataclass(frozen=True)
class _Chosen:
    """What was decided of each different text; all arrays have the shape (texts,)."""

    fates: Fates
    cluster: np.ndarray
    """Equal numbers mean one cluster."""
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
    linked = Edges(_first_of_shape(documents, representatives), numbers, np.zeros(len(numbers)))
    cluster = components(near.edges + linked, len(numbers))
    named_by = _first_of(cluster, numbers)
    facts = text_facts(documents, texts, history, split)
    names = documents["text_hash"].take(pa.array(representatives[named_by])).combine_chunks()
    clusters = _largest(facts.for_cluster(), cluster)
    groups = np.bincount(cluster, _first_of(near.component, numbers) == numbers)[cluster]
    fates = decide(facts, clusters, by_hash(names, split, groups))
    eligible = fates.eligible.astype(np.int64)
    best = _survivors(documents, representatives, near.component, eligible)
    stays = fates.stays | (fates.eligible & (best == numbers))
    return _Chosen(
        fates,
        cluster,
        named_by,
        np.where(stays, numbers, best),
        stays,
        np.where(stays, final_splits(fates, facts), 0),
        np.where(stays, facts.slices, 0),
    )


def _first_of_shape(documents: pa.Table, numbers: np.ndarray) -> np.ndarray:
    """For each of some documents, the place among them of the first of its shape."""
    shapes = documents["shape"].take(pa.array(numbers))
    first = np.arange(len(numbers))
    places = np.flatnonzero(shapes.is_valid())
    group = np.unique(shapes.drop_null().to_numpy(), return_inverse=True)[1]
    first[places] = places[_first_of(group, places)]
    return first


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
    of_cluster = np.where(
        chosen.fates.guarded, _GUARDED, np.where(chosen.fates.spoilt, _SPOILT, _STAYS)
    )
    reasons[texts.members] = np.where(of_cluster, of_cluster, _EXACT)[texts.group]
    is_alone = chosen.survivor == np.arange(len(chosen.survivor))
    of_representative = np.where(of_cluster, of_cluster, np.where(is_alone, _TEMPLATE, _NEAR))
    reasons[texts.representatives] = np.where(chosen.stays, _STAYS, of_representative)
    reasons[documents["past"].to_numpy()] = _PAST
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
