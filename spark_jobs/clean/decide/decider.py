"""The interface by which the job decides which documents stay, and what its deciders share.

There are two deciders, whose results are equal to the byte: one holds a row of every document in
the driver's memory (`in_memory`), the other leaves all to Spark's joins (`by_spark`). Both use the
small columns of prepared documents, how similar two texts are, and the list of dropped copies,
each with the document that it was found a copy of.
"""

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.cache import cache_key
from artifacts.numbers import ends_of, run_starts, sorted_unique
from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.clean.forgotten import FORGOTTEN, SIMILAR, ForgottenTexts
from spark_jobs.clean.history import History, codes_of
from spark_jobs.clean.prepare import BUCKET_WINDOW, PreparedPart, fixed_binary, matrix_of
from spark_jobs.runtime import parquet
from spark_jobs.runtime.parquet import READERS, cached_rows
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.settings import CleanCorpusSettings, NearDuplicateSettings
from spark_jobs.text import fold, shingle, sum_words

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("text_hash", pa.string()),
        ("characters", pa.int64()),
        ("bytes", pa.int64()),
        ("fault", pa.string()),
        ("repaired", pa.bool_()),
        ("shape", pa.int64()),
        ("past", pa.bool_()),
        ("recorded_split", pa.int8()),
        ("recorded_slice", pa.int32()),
    ]
)
"""A prepared document (`prepare.prepared_schema`). `past` says whether it has left the sources; if
so, the code of its split and its slice are those on record, else 0."""


@dataclass(frozen=True)
class DocumentPart:
    """A prepared part, whose documents are decided over."""

    prepared: PreparedPart
    record: parquet.Part | None = None
    """Of texts that have left the sources: the record's rows that were prepared."""

    def read(self, forgotten: ForgottenTexts) -> pa.Table:
        """The part's documents, as rows of `DOCUMENT_SCHEMA`."""
        names = [name for name in DOCUMENT_SCHEMA.names if "record" not in name and name != "past"]
        documents = self.prepared.read(names)
        count = documents.num_rows
        # Codes and slices of the record; of documents in the sources, the deciders look them up.
        split, slices = np.zeros((2, count), np.int64)
        if self.record:
            recorded = self.record.read(["split", "slice"])
            split, slices = codes_of(recorded["split"]), recorded["slice"].to_numpy()
        columns = {name: documents[name] for name in names} | {
            "fault": _faults(documents, forgotten, self.record is not None),
            "past": pa.array(np.full(count, self.record is not None)),
            "recorded_split": pa.array(split, pa.int8()),
            "recorded_slice": pa.array(slices.astype(np.int32)),
        }
        return pa.table(columns, DOCUMENT_SCHEMA)

    def read_rows(self, column: str, rows: pa.Array) -> pa.Array:
        """A column of some of the part's rows."""
        return self.prepared.read([column])[column].take(rows).combine_chunks()


def _faults(documents: pa.Table, forgotten: ForgottenTexts, is_past: bool) -> pa.ChunkedArray:
    # A text that was once in a split stays on record, whatever the settings now say of it.
    nothing = pa.chunked_array([pa.nulls(documents.num_rows, pa.string())])
    is_forgotten = pc.or_(
        pc.is_in(documents["id"], pa.array(forgotten.ids, pa.string())),
        pc.is_in(documents["text_hash"], pa.array(forgotten.texts, pa.string())),
    )
    is_similar = pc.is_in(documents["text_hash"], pa.array(forgotten.similar, pa.string()))
    # These are ids of documents in the corpus; another text of the record may have had one.
    if not is_past:
        by_id = pc.is_in(documents["id"], pa.array(forgotten.similar_ids, pa.string()))
        is_similar = pc.or_(is_similar, by_id)
    other = pc.if_else(is_similar, SIMILAR, nothing if is_past else documents["fault"])
    return pc.if_else(is_forgotten, FORGOTTEN, other)


PAIRS_AT_ONCE = 20_000
SIGNATURE_DEVIATIONS = 5
"""A pair is ruled out if its signatures estimate the similarity this many standard deviations below
the threshold: fewer than one true pair in a million is lost by that."""


def plausible(left: np.ndarray, right: np.ndarray, threshold: float) -> np.ndarray:
    """Whether each pair of signatures may still reach the threshold: shape (m,).

    Args:
        left, right: shape (m, permutations), the lowest byte of each hash (`clean.prepare`).
    """
    width = left.shape[1]
    # Of a binomial: each of `width` hashes agrees with the probability of the true similarity.
    deviation = np.sqrt(threshold * (1 - threshold) / width)
    least = (threshold - SIGNATURE_DEVIATIONS * deviation) * width
    is_open: np.ndarray = (left == right).sum(axis=1) >= least
    return is_open


def shingle_sets(texts: list[str], words: int) -> list[np.ndarray]:
    """Each text's shingles of so many words: sorted hashes, each once."""
    shingles = shingle(sum_words(list(map(fold, texts))), words)
    return [sorted_unique(shingles.hashes[a:b]) for a, b in itertools.pairwise(shingles.offsets)]


def jaccard(shingles: list[np.ndarray], pairs: np.ndarray) -> np.ndarray:
    """Jaccard similarities of shingle sets: shape (m,).

    Args:
        shingles: of `shingle_sets`.
        pairs: shape (m, 2), places in `shingles`.
    """
    sets = _as_matrix(shingles)
    sizes = np.diff(sets.indptr)
    similarity = [np.empty(0)]
    for chunk in chunks(pairs):
        left, right = chunk[:, 0], chunk[:, 1]
        # The product of two 0/1 rows has an entry for each hash that both hold.
        common = np.diff(sets[left].multiply(sets[right]).tocsr().indptr)
        similarity.append(common / (sizes[left] + sizes[right] - common))
    return np.concatenate(similarity)


def _as_matrix(sets: list[np.ndarray]) -> "csr_matrix":
    """Shingle sets as rows of a sparse 0/1 matrix whose columns are the hashes."""
    from scipy.sparse import csr_matrix

    # scipy's column numbers are signed, so the lowest of a hash's 64 bits is dropped.
    sets = [(hashes >> np.uint64(1)).astype(np.int64) for hashes in sets]
    indices = np.concatenate(sets)
    offsets = ends_of(np.array([len(hashes) for hashes in sets]))
    matrix = csr_matrix(
        (np.ones(len(indices), np.int32), indices, offsets), shape=(len(sets), 2**63 - 1)
    )
    # `shingle_sets` sorts them and removes repetitions; scipy would search everything for these.
    matrix.has_canonical_format = True
    return matrix


def chunks(pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Split pairs into chunks, which bound the memory of a comparison."""
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        yield pairs[first : first + PAIRS_AT_ONCE]


DECIDED_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("slice", pa.int64()),
    ]
)
"""A document that stays: its row in its part, and what was decided of it."""
CHOSEN_SCHEMA = pa.schema([("row", pa.int64())])
"""A row of the record that was chosen."""

GUARDED, SPOILT, PAST = "copy_of_held_out", "trained_on_before", "left_the_sources"
TEMPLATE = "template"
"""Reasons for dropping documents, besides those of `duplicates` and the faults of `prepare`;
`PAST` is the reason of texts that are only on record."""


@dataclass(frozen=True)
class DecisionContext:
    """What every decider works with."""

    spark: SparkSession
    settings: CleanCorpusSettings
    history: History | None
    numbered_sources: Sequence[str]
    """Sources whose rows are named by their numbers."""
    forgotten: ForgottenTexts
    scratch: str
    """Folder for what is needed only until the job ends."""
    report: Report
    cache: str | None = None
    """Folder of what earlier runs made (`artifacts.cache`)."""


class Example(NamedTuple):
    """Where a document is."""

    id: str
    part: int
    row: int


@dataclass(frozen=True)
class DecidedDocuments:
    """What was decided over all documents."""

    stay: parquet.PartRows
    """Rows of `DECIDED_SCHEMA`, by the number of the document part."""
    left: parquet.PartRows
    """Rows of the record that no document which stays has, by the number of the record's part."""
    duplicates: parquet.PartRows
    """Rows of `DUPLICATE_SCHEMA`, numbered in the order of their ids."""
    fates: list[dict[str, Any]]
    """`documents`, `bytes` and `repaired` by `reason` (None: stays) and `source`; those that have
    left the sources are not counted."""
    slices: list[dict[str, Any]]
    """`documents` that stay, by `slice` and `split`."""
    lengths: dict[int, int]
    """Documents that stay, by length: those of exponent e have from 2**e to less than 2**(e + 1)
    characters."""
    cluster_sizes: dict[int, int]
    """Number of clusters by their number of documents, survivor included."""
    examples: dict[str, list[Example]]
    """The first dropped documents of each reason by id, as many as the settings show."""
    slice: int
    """Number of this corpus in its lineage, from 1."""
    exact_copies: int
    near_copies: int
    """Verified pairs."""
    candidates: int
    """Pairs that shared a band."""
    verified: int
    """Pairs whose true similarity was worked out."""


class Decider(ABC):
    """Decides which documents of a corpus stay."""

    @abstractmethod
    def repeated_ids(self) -> list[tuple[str, int]]:
        """The first three ids that several documents of the corpus have, and how often."""

    @abstractmethod
    def sources(self) -> set[str]:
        """The sources of the corpus's documents."""

    @abstractmethod
    def texts_left(self) -> parquet.PartRows:
        """Rows of the record whose text no document without a fault has."""

    @abstractmethod
    def decide(self, past: list[DocumentPart]) -> DecidedDocuments:
        """Decide over the corpus, and the texts that have left it.

        Args:
            past: parts of `texts_left`, in that order; their numbers follow those of the corpus.
        """


EXACT, NEAR = "exact_duplicate", "near_duplicate"

DUPLICATE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("survivor", pa.string()),
        ("cluster", pa.string()),
        ("reason", pa.string()),
        ("neighbor", pa.string()),
        ("similarity", pa.float64()),
    ]
)
"""A dropped copy: the document kept in its place, and the most similar document that was compared
with it (Jaccard similarity of the shingle sets; 1 for an exact copy)."""

ROWS_IN_FILE = 500_000
"""Rows of a list's file, which the task that writes it holds in memory."""


def write_duplicates(
    spark: SparkSession, copies: parquet.PartRows, folder: str, report: Report
) -> None:
    """Write the list as `duplicates-NNNNN.parquet`, one file per task.

    Args:
        copies: rows of `DUPLICATE_SCHEMA`; their numbers give the order, which is that of the ids.
    """
    groups = list(enumerate(copies.groups(ROWS_IN_FILE)))
    map_tasks(spark, "listing copies", groups, partial(_write_file, folder=folder), report)


def _write_file(
    group: tuple[int, list[tuple[int, parquet.RowLocation, int, int]]], folder: str
) -> dict[str, Any]:
    number, pieces = group
    batches = [place.read().slice(first, last - first) for _, place, first, last in pieces]
    copies = pa.Table.from_batches(batches, DUPLICATE_SCHEMA).combine_chunks()
    parquet.write_table(f"{folder}/duplicates-{number:05d}.parquet", copies)
    return {}


def find_duplicates(clean_corpus: str, column: str, values: pa.Array) -> pa.Table:
    """Find the dropped copies with one of some values in a column: rows of `DUPLICATE_SCHEMA`."""
    tables = [DUPLICATE_SCHEMA.empty_table()]
    for url in parquet.list_files(clean_corpus, "duplicates*.parquet"):
        copies = parquet.read_table(url, DUPLICATE_SCHEMA.names)
        tables.append(copies.filter(pc.is_in(copies[column], values)).cast(DUPLICATE_SCHEMA))
    return pa.concat_tables(tables)


# Near-copies among signed documents, in the memory of one machine.
# Candidates share a band of their MinHash signatures. A candidate pair is accepted only if the true
# Jaccard similarity of its shingle sets reaches the threshold, and the connected components of the
# accepted pairs are the duplicate clusters. The order of the documents changes nothing.
# All work is on whole arrays: 168 bytes per document for the bands, 16 bytes per edge for the
# components, and some 150 bytes per document for the other small columns, mostly ids.
class PreparedParts:
    """The prepared parts, addressed by document number over all of them."""

    def __init__(self, parts: list[DocumentPart], forgotten: ForgottenTexts) -> None:
        self.parts = parts
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: part.read(forgotten), parts))
        self.offsets = ends_of(np.array([table.num_rows for table in tables], np.int64))
        """Shape (parts + 1,): where each part's documents begin."""
        self.documents = pa.concat_tables(tables).combine_chunks()
        """Rows of `DOCUMENT_SCHEMA`."""

    def by_part(self, numbers: np.ndarray) -> list[tuple[DocumentPart, np.ndarray, np.ndarray]]:
        """Group documents by part: `(part, places in numbers, rows of the part)` of each."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        groups = []
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                places = order[first:last]
                groups.append((self.parts[part], places, numbers[places] - self.offsets[part]))
        return groups

    def fetch_matrix(self, numbers: np.ndarray, column: str, dtype: type) -> np.ndarray:
        """A fixed-size binary column as a matrix, one row a number."""

        def read(
            group: tuple[DocumentPart, np.ndarray, np.ndarray],
        ) -> tuple[np.ndarray, np.ndarray]:
            part, places, rows = group
            return places, matrix_of(part.read_rows(column, pa.array(rows)), dtype)

        result: np.ndarray = np.empty((len(numbers), 0), dtype)
        with ThreadPoolExecutor(READERS) as readers:
            for places, values in readers.map(read, self.by_part(numbers)):
                # How wide the matrix is, only the first part that arrives tells.
                if result.shape[1] != values.shape[1]:
                    result = np.empty((len(numbers), values.shape[1]), dtype)
                result[places] = values
        return result


Compare = Callable[[np.ndarray], np.ndarray]
"""Pairs of document numbers, of shape (m, 2), to their Jaccard similarities; NaN where the
signatures have ruled out that the threshold is reached."""


def comparison(
    fetch_signatures: Callable[[np.ndarray], np.ndarray],
    fetch_shingles: Callable[[np.ndarray], list[np.ndarray]],
    threshold: float,
) -> Compare:
    """Compare pairs of documents, by their signatures first, since these are cheaper.

    Args:
        fetch_signatures: document numbers (sorted) to their signatures.
        fetch_shingles: document numbers (sorted) to their shingle sets: sorted hashes, each once.
    """

    def compare(pairs: np.ndarray) -> np.ndarray:
        similarity = np.full(len(pairs), np.nan)
        if len(pairs):
            # A document's signature is fetched once, however many pairs it is in.
            numbers, places = np.unique(pairs, return_inverse=True)
            signatures = fetch_signatures(numbers)
            is_open = np.concatenate(
                [
                    plausible(signatures[chunk[:, 0]], signatures[chunk[:, 1]], threshold)
                    for chunk in chunks(places)
                ]
            )
            if is_open.any():
                numbers, places = np.unique(pairs[is_open], return_inverse=True)
                similarity[is_open] = jaccard(fetch_shingles(numbers), places)
        return similarity

    return compare


def fetch_shingles(
    run: DecisionContext, prepared: PreparedParts, numbers: np.ndarray
) -> list[np.ndarray]:
    """The shingle sets of documents, made by tasks where their texts are: sorted hashes.

    Args:
        numbers: of documents in `prepared`; only candidates for near-copies are asked for.
    """
    words = run.settings.near_duplicates.shingle_words
    groups = prepared.by_part(numbers)
    # Tasks return only small records, so they hand the sets over in files.
    items = [(part, rows, f"{run.scratch}/shingles-{uuid.uuid4().hex}") for part, _, rows in groups]
    work = partial(_shingle, words=words)
    map_tasks(run.spark, "shingling candidates", items, work, run.report)
    sets: list[np.ndarray] = [np.empty(0, np.uint64)] * len(numbers)
    for (_, places, _), (_, _, url) in zip(groups, items, strict=True):
        with files.open_file(url) as file, pa.ipc.open_stream(file) as stream:
            column = stream.read_all()["shingles"]
        for place, hashes in zip(places, column, strict=True):
            sets[place] = hashes.values.to_numpy()
    return sets


def _shingle(item: tuple[DocumentPart, np.ndarray, str], words: int) -> dict[str, Any]:
    part, rows, target = item
    sets = shingle_sets(part.read_rows("text", pa.array(rows)).to_pylist(), words)
    table = pa.table({"shingles": pa.array(sets, pa.list_(pa.uint64()))})
    with files.open_file(target, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return {}


def remember_pairs(
    compare: Compare, hashes: np.ndarray, settings: NearDuplicateSettings, cache: str | None
) -> Compare:
    """Wrap a comparison: pairs of texts that an earlier run has compared come from the cache.

    Args:
        hashes: uint8 of shape (documents, bytes); equal texts have equal rows.
        cache: folder of what earlier runs made.
    """
    decided_by = settings.model_dump(mode="json")
    key = cache_key("similarities", __name__, ["numpy", "scipy"], settings=decided_by)

    def compare_new(pairs: np.ndarray) -> np.ndarray:
        # A pair is named by its texts' hashes, since the numbers of documents change between runs.
        names = hashes[pairs].reshape(len(pairs), 2 * hashes.shape[1])
        similarity = cached_rows(
            cache,
            key,
            pa.chunked_array([fixed_binary(names)]),
            lambda places: pa.table({"similarity": compare(pairs[places])}),
        )
        return similarity["similarity"].to_numpy()

    return compare_new


BANDS_AT_ONCE = 4
"""Bands that are sorted at a time; each needs some 40 bytes per document besides the bands."""

Buckets = tuple[np.ndarray, np.ndarray]
"""Of one band: the documents of shared buckets side by side, and where each one's bucket begins."""


@dataclass(frozen=True)
class Edges:
    """Verified pairs of documents."""

    left: np.ndarray
    right: np.ndarray
    similarity: np.ndarray

    def __add__(self, other: "Edges") -> "Edges":
        return Edges(
            np.concatenate([self.left, other.left]),
            np.concatenate([self.right, other.right]),
            np.concatenate([self.similarity, other.similarity]),
        )


@dataclass(frozen=True)
class NearDuplicates:
    """The outcome for documents numbered 0 to n - 1."""

    component: np.ndarray
    """Shape (n,): equal numbers mean one cluster."""
    edges: Edges
    candidates: int
    """Pairs that shared a band."""
    verified: int
    """Pairs whose true similarity was worked out."""


def find_near_duplicates(bands: np.ndarray, compare: Compare, threshold: float) -> NearDuplicates:
    """Cluster documents, of which no two are exact copies, by their near-copies.

    Args:
        bands: uint64 of shape (n, bands), from `spark_jobs.clean.prepare.band_keys`.
        compare: true similarities of pairs.
    """
    count = len(bands)
    with ThreadPoolExecutor(BANDS_AT_ONCE) as threads:
        buckets = list(threads.map(_buckets, bands.T if count else []))
    # First each document with its bucket's first only: so few pairs mostly connect the bucket.
    stars = _unique(_star_pairs(buckets), count)
    first, compared_first = _verify(stars, count, compare, threshold)
    component = components(first, count)
    # Most pairs of a large bucket are connected by now; only the others can change a component.
    window = _unique(_window_pairs(buckets, component), count)
    # The stars are among them, and were compared already.
    rest = np.setdiff1d(window, stars, assume_unique=True)
    second, compared_second = _verify(rest, count, compare, threshold)
    edges = first + second
    return NearDuplicates(
        components(edges, count),
        edges,
        candidates=len(stars) + len(rest),
        verified=compared_first + compared_second,
    )


def components(edges: Edges, count: int) -> np.ndarray:
    """The connected component of each of `count` documents; the numbers have no meaning."""
    # Imported here, since all commands load this module, and only cleaning needs scipy.
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(edges.left), np.bool_)
    graph = coo_matrix((ones, (edges.left, edges.right)), shape=(count, count))
    return connected_components(graph, directed=False)[1]


def _verify(codes: np.ndarray, count: int, compare: Compare, threshold: float) -> tuple[Edges, int]:
    """Compare the pairs of these codes (`_unique`); return those that reach the threshold.

    Also returns how many were compared, which the signatures had not ruled out.
    """
    pairs = np.stack([codes // count, codes % count], axis=1) if count else np.empty((0, 2), int)
    similarity = compare(pairs)
    # NaN, of a pair that was ruled out, is not above any threshold.
    kept = similarity >= threshold
    edges = Edges(pairs[kept, 0], pairs[kept, 1], similarity[kept])
    return edges, int(np.sum(~np.isnan(similarity)))


def _star_pairs(buckets: list[Buckets]) -> Iterator[np.ndarray]:
    """Pair every document of a bucket with the bucket's first."""
    for order, first in buckets:
        member = first != np.arange(len(order))
        yield np.stack([order[first[member]], order[member]], axis=1)


def _window_pairs(buckets: list[Buckets], component: np.ndarray) -> Iterator[np.ndarray]:
    """Pair every document of a bucket with those after it, unless they are in one component."""
    for order, first in buckets:
        places = np.arange(len(order))
        pairs = [np.empty((0, 2), np.int64)]
        for distance in range(1, BUCKET_WINDOW + 1):
            # Buckets lie one after another, so the same bucket this far on is a pair.
            places = places[places + distance < len(order)]
            places = places[first[places] == first[places + distance]]
            if not len(places):
                break
            left, right = order[places], order[places + distance]
            apart = component[left] != component[right]
            pairs.append(np.stack([left[apart], right[apart]], axis=1))
        yield np.concatenate(pairs)


def _buckets(keys: np.ndarray) -> Buckets:
    """The shared buckets of a band, from its keys: shape (n,)."""
    # Stable, so that the documents of a bucket stay in the order of their numbers.
    order = np.argsort(keys, kind="stable")
    is_new = run_starts(keys[order])
    # A bucket is shared if the key before or behind is the same.
    is_shared = ~is_new
    is_shared[:-1] |= ~is_new[1:]
    order, is_new = order[is_shared], is_new[is_shared]
    return order, np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))


def _unique(groups: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Encode pairs as sorted numbers, each once: the smaller document times `count`, plus the
    larger."""
    codes = [np.empty(0, np.int64)]
    for pairs in groups:
        low, high = pairs.min(axis=1, initial=count), pairs.max(axis=1, initial=0)
        codes.append(low * count + high)
    return sorted_unique(np.concatenate(codes))
