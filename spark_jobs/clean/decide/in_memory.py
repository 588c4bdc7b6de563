"""Decides with a row of every document in the driver's memory: some 970 bytes each.

Of equal texts, the survivor is the longest document, and of several the one with the smallest id;
of near-copies, those that the newest corpus brought come first. Near-copies and texts of one
template form a cluster, whose id is the smallest text hash of its members. Nothing
depends on how the text is partitioned.

Texts of earlier corpora that have left the sources are clustered with the others, so that a cluster
stays in its split; `spark_jobs.clean.history` says which that is, and who may survive in it.

Four steps, each on columns of whole arrays: `group_exact` groups the documents of equal text, which
one of them represents; `thin_out` keeps a few texts of each template; `find_near_duplicates`
clusters the representatives; `decide_survivors` decides whether each document stays.
"""

import itertools
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.numbers import ends_of, run_starts
from artifacts.storage import files
from spark_jobs.clean.decide import decider
from spark_jobs.clean.decide.decider import (
    DUPLICATE_SCHEMA,
    EXACT,
    NEAR,
    DecisionRun,
    read_documents,
)
from spark_jobs.clean.decide.near_copies import (
    Edges,
    NearDuplicates,
    comparison,
    components,
    find_near_duplicates,
    find_versions,
    remember_pairs,
    shingle_sets,
)
from spark_jobs.clean.forgotten import ForgottenTexts
from spark_jobs.clean.history import (
    LABELED_SCHEMA,
    MOST_GROUPS,
    NAMES,
    NONE,
    ON_RECORD,
    TRAIN,
    VALIDATION,
    ClusterFacts,
    Fates,
    History,
    TextFacts,
    by_hash,
    by_source,
    codes_of,
    decide,
    is_apart,
    judges_of_classes,
    representative_rank,
)
from spark_jobs.clean.prepare import (
    SAMPLED_SHINGLES,
    Bands,
    PreparedPart,
    bands_of,
    matrix_of,
)
from spark_jobs.read.document import are_row_numbers
from spark_jobs.runtime.parquet import READERS, PartRows, split_rows, write_part_rows
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.settings import SplitSettings
from spark_jobs.text import HASH_BYTES

_DIGITS_COMPARED = 16
"""Digits of a text's hash in the name of a pair: 64 bits, as many as a shingle's hash has."""


class PreparedParts:
    """The prepared parts, addressed by document number over all of them."""

    def __init__(self, parts: list[PreparedPart], forgotten: ForgottenTexts) -> None:
        self.parts = parts
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: read_documents(part, forgotten), parts))
        self.offsets = ends_of(np.array([table.num_rows for table in tables], np.int64))
        """Shape (parts + 1,): where each part's documents begin."""
        self.documents = pa.concat_tables(tables).combine_chunks()
        """Rows of `DOCUMENT_SCHEMA`."""

    def by_part(self, numbers: np.ndarray) -> list[tuple[PreparedPart, np.ndarray, np.ndarray]]:
        """Group documents by part: `(part, places in numbers, rows of the part)` of each."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        groups = []
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                places = order[first:last]
                groups.append((self.parts[part], places, numbers[places] - self.offsets[part]))
        return groups

    def fetch_matrix(self, numbers: np.ndarray, column: str, width: int, dtype: type) -> np.ndarray:
        """A fixed-size binary column as a matrix, a row of so many values for each number."""
        result: np.ndarray = np.empty((len(numbers), width), dtype)

        def read(group: tuple[PreparedPart, np.ndarray, np.ndarray]) -> None:
            part, places, rows = group
            # Threads write to different places: each part has its own.
            result[places] = matrix_of(part.read_rows(column, pa.array(rows)), dtype)

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(read, self.by_part(numbers)))
        return result


class InMemoryDecider(decider.Decider):
    """Decides on columns of whole arrays; Spark's tasks only make shingles, where the texts are."""

    def __init__(self, run: DecisionRun, parts: list[PreparedPart]) -> None:
        self._run, self._parts = run, parts
        self._corpus = PreparedParts(parts, run.forgotten)

    def repeated_ids(self) -> list[tuple[str, int]]:
        # Ids name documents in every later step, so two of one id are an error of the source.
        counts = pc.value_counts(self._corpus.documents["id"])
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()
        return sorted((item["values"], item["counts"]) for item in repeated)[:3]

    def sources(self) -> set[str]:
        return set(self._corpus.documents["source"].unique().to_pylist())

    def texts_left(self) -> PartRows:
        documents = self._corpus.documents
        return self._not_among(documents["text_hash"].filter(pc.is_null(documents["fault"])))

    def decide(self, past: list[PreparedPart]) -> decider.DecidedDocuments:
        run, settings = self._run, self._run.settings
        # Without texts that have left, the corpus need not be read again.
        prepared = PreparedParts([*self._parts, *past], run.forgotten) if past else self._corpus
        documents = prepared.documents
        recorded = look_up(documents, run.history, run.numbered_sources)
        texts = group_exact(documents, recorded, settings.split)
        documents, texts = thin_out(
            documents, texts, recorded, settings.split, settings.templates.keep
        )
        near = self._find_near(prepared, texts.representatives)
        versions = self._find_versions(prepared, texts.representatives, near)
        decided = decide_survivors(documents, texts, near, versions, recorded, settings.split)
        documents = decided.documents
        present = documents.filter(pc.invert(documents["past"]))
        stay = present.filter(pc.is_null(present["reason"]))
        fates = present.group_by(["reason", "source"]).aggregate(
            [("bytes", "count"), ("bytes", "sum"), ("repaired", "sum")]
        )
        is_elsewhere = pc.is_in(present["reason"], pa.array([None, *decider.LISTED_ELSEWHERE]))
        dropped = present.filter(pc.invert(is_elsewhere)).select(decider.DROPPED_SCHEMA.names)
        numbers = np.flatnonzero(np.asarray(pc.is_null(documents["reason"])))
        # All but `row`, which `split_rows` adds.
        rows = documents.select(decider.DECIDED_SCHEMA.names[1:]).take(pa.array(numbers))
        slices = stay.group_by(["slice", "split"]).aggregate([([], "count_all")])
        return decider.DecidedDocuments(
            stay=write_part_rows(
                run.scratch,
                decider.DECIDED_SCHEMA,
                split_rows(numbers, prepared.offsets, rows),
            ),
            left=self._not_among(stay["text_hash"]),
            duplicates=self._write(decided.duplicates),
            dropped=self._write(dropped.sort_by("id")),
            fates=fates.rename_columns(
                ["reason", "source", "documents", "bytes", "repaired"]
            ).to_pylist(),
            slices=slices.rename_columns({"count_all": "documents"}).to_pylist(),
            # `frexp` has its fractions below 1, so its exponent is one more than that of the power.
            lengths=_histogram(np.frexp(stay["characters"].to_numpy())[1] - 1),
            cluster_sizes=_histogram(decided.cluster_sizes),
            slice=run.history.slice if run.history else 1,
            exact_copies=len(texts.members) - len(texts.representatives),
            near_copies=len(near.edges.left),
            candidates=near.candidates,
            verified=near.verified,
        )

    def _write(self, rows: pa.Table) -> PartRows:
        batches = enumerate(rows.combine_chunks().to_batches())
        return write_part_rows(self._run.scratch, rows.schema, batches)

    def _find_near(self, prepared: PreparedParts, documents: np.ndarray) -> NearDuplicates:
        """Cluster the near-copies among distinct texts, numbered by their places."""
        run, near = self._run, self._run.settings.near_duplicates
        # Without a search there are no bands, and so no candidates.
        bands = bands_of(run.settings) or Bands(0, 0)
        keys = np.empty((len(documents), 0), np.uint64)
        if bands.bands:
            keys = prepared.fetch_matrix(documents, "bands", bands.bands, np.uint64)
        compare = comparison(
            lambda numbers: prepared.fetch_matrix(
                documents[numbers], "signature", bands.permutations, np.uint8
            ),
            lambda numbers: fetch_shingles(run, prepared, documents[numbers]),
            near.threshold,
        )
        texts = prepared.documents.select(["text_hash"]).take(documents)
        hashes = _hashes_of(texts)[:, :_DIGITS_COMPARED]
        compare = remember_pairs(compare, hashes, near, run.cache)
        return find_near_duplicates(keys, compare, near.threshold)

    def _find_versions(
        self, prepared: PreparedParts, documents: np.ndarray, near: NearDuplicates
    ) -> Edges:
        """Link the versions of a document, but not those of sources that are set apart."""
        settings, numbers = self._run.settings, np.arange(len(documents))
        forced = by_source(prepared.documents["source"], settings.split)[documents]
        is_searched = (forced <= TRAIN) & (_first_of(near.component, numbers) == numbers)
        chosen = np.flatnonzero(is_searched & bool(bands_of(settings)))
        found = find_versions(
            prepared.fetch_matrix(documents[chosen], "sample", SAMPLED_SHINGLES, np.uint32)
        )
        return Edges(chosen[found.left], chosen[found.right], found.similarity)

    def _not_among(self, hashes: pa.ChunkedArray) -> PartRows:
        """Rows of the record whose texts have none of these hashes, and are not forgotten."""
        history = self._run.history
        if history is None:
            return PartRows({})
        forgotten = pa.array(self._run.forgotten.hidden, pa.string())
        places = history.missing(pa.chunked_array([*hashes.chunks, forgotten]))
        offsets = np.cumsum([0, *(part.rows for part in history.parts)])
        missing = split_rows(places, offsets, pa.table({}))
        return write_part_rows(self._run.scratch, decider.CHOSEN_SCHEMA, missing)


def fetch_shingles(
    run: DecisionRun, prepared: PreparedParts, numbers: np.ndarray
) -> list[np.ndarray]:
    """The shingle sets of documents, made by tasks where their texts are: sorted hashes.

    Args:
        numbers: of documents in `prepared`; only candidates for near-copies are asked for.
    """
    groups = prepared.by_part(numbers)
    # Tasks return only small records, so they hand the sets over in files.
    items = [(part, rows, f"{run.scratch}/shingles-{uuid.uuid4().hex}") for part, _, rows in groups]
    work = partial(_shingle, words=run.settings.near_duplicates.shingle_words)
    map_tasks(run.spark, "shingling candidates", items, work, run.report)
    sets: list[np.ndarray] = [np.empty(0, np.uint64)] * len(numbers)
    for (_, places, _), (_, _, url) in zip(groups, items, strict=True):
        with files.open_file(url) as file, pa.ipc.open_stream(file) as stream:
            column = stream.read_all()["shingles"]
        for place, hashes in zip(places, column, strict=True):
            sets[place] = hashes.values.to_numpy()
    return sets


def _shingle(item: tuple[PreparedPart, np.ndarray, str], words: int) -> dict[str, Any]:
    part, rows, target = item
    sets = shingle_sets(part.read_rows("text", pa.array(rows)).to_pylist(), words)
    table = pa.table({"shingles": pa.array(sets, pa.list_(pa.uint64()))})
    with files.open_file(target, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return {}


def _hashes_of(documents: pa.Table) -> np.ndarray:
    """The digits of each text's hash: uint8, shape (documents, 2 * HASH_BYTES)."""
    content = documents["text_hash"].combine_chunks().cast(pa.binary(2 * HASH_BYTES))
    return matrix_of(content, np.uint8)


def _histogram(values: np.ndarray) -> dict[int, int]:
    different, counts = np.unique(values, return_counts=True)
    return dict(zip(different.tolist(), counts.tolist(), strict=True))


class Recorded(NamedTuple):
    """What earlier corpora recorded of documents; all arrays have the shape (documents,)."""

    by_text: np.ndarray
    """Code of the split that its text was in."""
    by_id: np.ndarray
    """Code of the split that its id was in; `NONE` where that is a row's number."""
    slices: np.ndarray
    rank: np.ndarray
    """Added to `history.representative_rank`."""


def look_up(documents: pa.Table, history: History | None, numbered: Sequence[str]) -> Recorded:
    """Look documents (rows of `decider.DOCUMENT_SCHEMA`) up in the record.

    Args:
        numbered: sources whose rows are named by their numbers.
    """
    if history is None:
        zeros = np.zeros(documents.num_rows, np.int64)
        return Recorded(zeros, zeros, zeros + 1, zeros)
    record, past = history.documents, documents["past"].to_numpy()
    same_text = pc.index_in(documents["text_hash"], record["text_hash"])
    is_same = np.asarray(pc.equal(record["id"].take(same_text), documents["id"]).fill_null(False))
    places = np.asarray(same_text.fill_null(-1))
    numbers = are_row_numbers(documents["id"], documents["source"], numbered)
    # A row's number names another row as soon as one is inserted, so it says nothing.
    ids = pc.if_else(numbers, -1, pc.index_in(documents["id"], record["id"]).fill_null(-1))
    # Place -1, of what is not on record, takes the value that is appended: that of new text.
    splits = np.append(codes_of(record["split"]), NONE)
    slices = np.append(record["slice"].to_numpy(), history.slice)
    # Under other cleaning settings a text may have another hash than the one on record.
    by_text = np.where(past, documents["recorded_split"].to_numpy(), splits[places])
    return Recorded(
        by_text,
        splits[np.asarray(ids)],
        np.where(past, documents["recorded_slice"].to_numpy(), slices[places]),
        np.where(is_same & ~past, np.where(splits[places] >= VALIDATION, ON_RECORD, 1), 0),
    )


class Texts(NamedTuple):
    """Documents grouped by equal texts."""

    members: np.ndarray
    """Document numbers, group by group in the order of the texts' hashes."""
    group: np.ndarray
    """The group of each."""
    representatives: np.ndarray
    """Of each group, the document that stands for it."""


def group_exact(documents: pa.Table, recorded: Recorded, split: SplitSettings) -> Texts:
    """Group documents (rows of `decider.DOCUMENT_SCHEMA`) of equal text, faulty ones left out."""
    # Equally long ASCII strings are numpy bytes, which sort without Python.
    hashes = _hashes_of(documents).view(f"S{2 * HASH_BYTES}").ravel()
    sound = np.flatnonzero(np.asarray(pc.is_null(documents["fault"])))
    members = sound[np.argsort(hashes[sound], kind="stable")]
    begins = run_starts(hashes[members])
    group = np.cumsum(begins) - 1
    forced = by_source(documents["source"], split)
    rank = representative_rank(documents["past"].to_numpy(), forced) + recorded.rank
    survivor = _survivors(documents, members, group, rank[members])
    return Texts(members, group, members[survivor[begins]])


def thin_out(
    documents: pa.Table,
    texts: Texts,
    recorded: Recorded,
    split: SplitSettings,
    keep: int | None,
) -> tuple[pa.Table, Texts]:
    """Keep a few texts of each template, and one of those that are equal but for their labels; give
    the documents of the others a fault.

    All texts on record stay, and come first. Then come those that are set apart to evaluate, and
    those to replay last, as among documents of equal text; then labeled texts with more documents;
    then those with smaller hashes.
    """
    table = documents.select(["shape", "label", "past"]).take(texts.representatives)
    # A text is new if none of its documents is on record.
    is_new = np.ones(table.num_rows, bool)
    # `at` takes all documents of a text into account; with plain indexing, the last one of them
    # would decide.
    np.logical_and.at(is_new, texts.group, recorded.by_text[texts.members] == NONE)
    numbers = np.flatnonzero(pc.and_not(table["shape"].is_valid(), table["past"]))
    shapes = table["shape"].take(numbers).to_numpy()
    forced = by_source(documents["source"], split)[texts.representatives[numbers]]
    rank = representative_rank(np.zeros(len(numbers), bool), forced)
    is_labeled = np.asarray(table["label"].is_valid())[numbers]
    times = np.where(is_labeled, np.bincount(texts.group)[numbers], 0)
    # At last by number, which rises with the text's hash.
    order = np.lexsort((numbers, -times, -rank, is_new[numbers], shapes))
    numbers, places = numbers[order], np.arange(len(order))
    first = np.maximum.accumulate(np.where(run_starts(shapes[order]), places, 0))
    stays = np.ones(len(is_new), bool)
    most = np.where(is_labeled[order], 1, keep or len(numbers))
    # Texts on record are never dropped for their number, but count first.
    stays[numbers] = ~is_new[numbers] | (places - first < most)
    is_left = stays[texts.group]
    labels = table["label"].take(pa.array(numbers)).combine_chunks()
    begin, between, end = decider.CONTRADICTS
    said = pc.binary_join_element_wise(
        begin, labels, between, labels.take(pa.array(first)), end, ""
    )
    reasons = pc.coalesce(said, decider.TEMPLATE)
    place_of = np.full(len(is_new), -1)
    place_of[numbers] = places
    thinned = np.full(documents.num_rows, -1)
    thinned[texts.members[~is_left]] = place_of[texts.group[~is_left]]
    of_documents = reasons.take(pa.array(thinned, mask=thinned < 0))
    column = pc.coalesce(documents["fault"], of_documents)
    # Groups are numbered again, without those that went.
    group = (np.cumsum(stays) - 1)[texts.group[is_left]]
    kept_texts = Texts(texts.members[is_left], group, texts.representatives[stays])
    return documents.set_column(documents.column_names.index("fault"), "fault", column), kept_texts


class Decisions(NamedTuple):
    """What became of every prepared document, in the order of the parts."""

    documents: pa.Table
    """Those of `PreparedParts`, with `cluster`, `reason` (null: stays), `split` and `slice`."""
    duplicates: pa.Table
    """Rows of `decider.DUPLICATE_SCHEMA`."""
    cluster_sizes: np.ndarray
    """Documents in each cluster, survivor included."""


def decide_survivors(
    documents: pa.Table,
    texts: Texts,
    near: NearDuplicates,
    versions: Edges,
    recorded: Recorded,
    split: SplitSettings,
) -> Decisions:
    """Give every document its cluster, and its split or the reason for dropping it.

    Args:
        documents: the small columns, one row per document; nothing else of the corpus is needed.
        texts: of `group_exact`; `near`: their near-copies; `versions`: links between those of one
            document.
    """
    representatives = texts.representatives
    numbers = np.arange(len(representatives))
    # Texts of one shape are in one cluster, whether they are near-copies or not.
    of_shape = Edges(_first_of_shape(documents, representatives), numbers, np.zeros(len(numbers)))
    cluster = components(near.edges + of_shape, len(numbers))
    facts = _text_facts(documents, texts, recorded, split)
    if len(versions.left):
        family = components(near.edges + of_shape + versions, len(numbers))
        own = _largest(facts.for_cluster(), cluster)
        family = np.where(own.force > NONE, len(numbers) + cluster, family)
        of_family = _largest(facts.for_cluster(), family)
        apart = is_apart(own.guard, of_family.guard, of_family.trained)
        codes = len(NAMES) * family + np.where(apart, own.guard, NONE)
        cluster = np.unique(codes, return_inverse=True)[1]
    # Texts are in the order of their hashes, so the first names its cluster.
    named_by = pa.array(representatives[_first_of(cluster, numbers)])
    names = documents["text_hash"].take(named_by).combine_chunks()
    # How many groups of near-copies a cluster has: each group counts at its first text.
    groups = np.bincount(cluster, _first_of(near.component, numbers) == numbers)[cluster]
    fates = decide(facts, _largest(facts.for_cluster(), cluster), by_hash(names, split, groups))

    # Of each group of near-copies the best eligible text stays, and all that stay in any case: of
    # those that came with the newest corpus, since what is added beside a document replaces it.
    newest = np.where(fates.eligible, facts.slices, 0)
    best = _survivors(documents, representatives, near.component, newest)
    stays = fates.stays | (fates.eligible & (best == numbers))
    survivor = np.where(stays, numbers, best)

    # Now from texts to documents: null for a document with a fault, which has no text here.
    text = np.full(documents.num_rows, -1)
    text[texts.members] = texts.group
    text_of = pa.array(text, mask=text < 0)
    stands = np.zeros(documents.num_rows, bool)
    stands[representatives] = True
    represented = pa.array(text, mask=~stands)
    splits = pa.array(NAMES).take(pa.array(np.where(stays, fates.split, NONE)))
    labels = documents["label"].take(pa.array(representatives)).combine_chunks()
    if labels.null_count < len(labels):
        codes = labels.dictionary_encode().indices.fill_null(-1).to_numpy()
        pairs = np.unique(np.stack([cluster, codes]), axis=1)
        has_one_class = np.bincount(pairs[0])[cluster] == 1
        is_free = pa.array(fates.is_new & has_one_class & (groups <= MOST_GROUPS))
        labeled = pa.table([labels, names, splits, is_free], schema=LABELED_SCHEMA)
        judges = judges_of_classes(labeled.filter(pc.and_(splits.is_valid(), labels.is_valid())))
        place = pc.index_in(names, pa.array(list(judges), pa.string()))
        judging = pa.array(list(judges.values()), pa.string()).take(place)
        splits = pc.if_else(pa.array(stays), pc.coalesce(judging, splits), splits)
    columns = {
        "cluster": names.take(text_of),
        "reason": _reasons(documents, text_of, stands, fates, stays, survivor == numbers),
        "split": splits.take(represented),
        "slice": pa.array(facts.slices).take(represented),
    }
    for name, values in columns.items():
        documents = documents.append_column(name, values)
    # Documents that have left the sources are not counted.
    is_present = ~documents["past"].to_numpy()
    sizes = np.bincount(cluster[texts.group], is_present[texts.members])
    duplicates = _list_duplicates(documents, texts, survivor, near.edges)
    return Decisions(documents, duplicates, sizes[sizes > 0].astype(np.int64))


def _reasons(
    documents: pa.Table,
    text_of: pa.Array,
    stands: np.ndarray,
    fates: Fates,
    stays: np.ndarray,
    is_best: np.ndarray,
) -> pa.ChunkedArray:
    """Why each document goes; null where it stays.

    Args:
        text_of: shape (documents,), the text of each; null of one with a fault.
        stands: shape (documents,), whether it stands for its text.
        stays, is_best: shape (texts,), whether each stays, and whether no other replaces it.
    """
    # A text that no other one replaces, and that still goes, goes for its template.
    of_text = pc.coalesce(fates.reason, pc.if_else(pa.array(is_best), decider.TEMPLATE, NEAR))
    of_text = pc.if_else(pa.array(stays), pa.scalar(None, pa.string()), of_text)
    # What equals a text that stays is a copy of it and nothing else.
    of_copy = pc.if_else(pa.array(stays), EXACT, pc.coalesce(fates.reason, EXACT))
    reason = pc.if_else(pa.array(stands), of_text.take(text_of), of_copy.take(text_of))
    return pc.coalesce(pc.if_else(documents["past"], decider.PAST, reason), documents["fault"])


def _text_facts(
    documents: pa.Table, texts: Texts, recorded: Recorded, split: SplitSettings
) -> TextFacts:
    """Collect the facts about each text, the strictest where its documents differ."""
    by_text, by_id = np.zeros((2, len(texts.representatives)), np.int64)
    # A text is as old as the first of its documents that is on record.
    slices = recorded.slices[texts.representatives]
    np.minimum.at(slices, texts.group, recorded.slices[texts.members])
    np.maximum.at(by_text, texts.group, recorded.by_text[texts.members])
    np.maximum.at(by_id, texts.group, recorded.by_id[texts.members])
    forced, past = by_source(documents["source"], split), documents["past"].to_numpy()
    to_train = np.where(past, NONE, np.where(forced == TRAIN, TRAIN, NONE))
    of_members = np.full(len(texts.representatives), NONE)
    np.maximum.at(of_members, texts.group, to_train[texts.members])
    of_representative = forced[texts.representatives]
    return TextFacts(
        present=~past[texts.representatives],
        forced=np.where(of_representative == NONE, of_members, of_representative),
        by_text=by_text,
        # What is on record of the text itself goes before what is of its id.
        by_id=np.where(by_text == NONE, by_id, NONE),
        slices=slices,
    )


def _list_duplicates(
    documents: pa.Table, texts: Texts, survivor: np.ndarray, edges: Edges
) -> pa.Table:
    """Rows of `DUPLICATE_SCHEMA` for all copies of the corpus, by id.

    The neighbor of an exact copy is its text's representative, that of a near-copy the most similar
    text that it was compared with.

    Args:
        survivor: shape (texts,), the text that stays in the place of each.
    """
    representatives, past = texts.representatives, documents["past"].to_numpy()
    own = representatives[texts.group]
    exact = np.flatnonzero((texts.members != own) & ~past[texts.members])
    near = np.flatnonzero(~past[representatives] & (survivor != np.arange(len(survivor))))
    # Every edge in both directions; a text's most similar neighbor comes first.
    ends = np.concatenate([edges.left, edges.right])
    others = np.concatenate([edges.right, edges.left])
    similarity = np.tile(edges.similarity, 2)
    order = np.lexsort((others, -similarity, ends))
    # The search finds each one: a text that another one replaces has an edge.
    first = order[np.searchsorted(ends[order], near)] if len(near) else order[:0]
    copies = pa.array(np.concatenate([texts.members[exact], representatives[near]]))
    replaced = np.concatenate([texts.group[exact], near])
    neighbors = np.concatenate([own[exact], representatives[others[first]]])
    ids = documents["id"].combine_chunks()
    columns = {
        "id": ids.take(copies),
        "survivor": ids.take(pa.array(representatives[survivor[replaced]])),
        "cluster": documents["cluster"].combine_chunks().take(copies),
        "reason": [EXACT] * len(exact) + [NEAR] * len(near),
        "neighbor": ids.take(pa.array(neighbors)),
        "similarity": np.concatenate([np.ones(len(exact)), similarity[first]]),
    }
    return pa.table(columns, DUPLICATE_SCHEMA).sort_by("id")


def _first_of_shape(documents: pa.Table, numbers: np.ndarray) -> np.ndarray:
    """For each document, the place of the first document of its shape among them."""
    shapes = documents["shape"].take(pa.array(numbers))
    first = np.arange(len(numbers))
    places = np.flatnonzero(shapes.is_valid())
    group = np.unique(shapes.drop_null().to_numpy(), return_inverse=True)[1]
    first[places] = places[_first_of(group, places)]
    return first


def _largest(facts: ClusterFacts, component: np.ndarray) -> ClusterFacts:
    """The largest codes of each text's cluster."""

    def largest(codes: np.ndarray) -> np.ndarray:
        of_component = np.zeros(component.max(initial=-1) + 1, np.int64)
        np.maximum.at(of_component, component, codes)
        return of_component[component]

    return ClusterFacts(**{name: largest(codes) for name, codes in vars(facts).items()})


def _survivors(
    documents: pa.Table, numbers: np.ndarray, component: np.ndarray, preferred: np.ndarray
) -> np.ndarray:
    """For each document, the place of its component's survivor among them.

    The survivor is the most preferred document, of several the longest, then that of smallest id.
    """
    survivor = np.arange(len(numbers))
    # Nearly all are alone in their component, and need not be compared.
    several = np.flatnonzero(np.bincount(component)[component] > 1) if len(component) else survivor
    columns = documents.select(["characters", "id"]).take(numbers[several])
    columns = columns.append_column("preferred", pa.array(preferred[several]))
    keys = [("preferred", "descending"), ("characters", "descending"), ("id", "ascending")]
    rank = np.empty(len(several), np.int64)
    rank[np.asarray(pc.sort_indices(columns, sort_keys=keys))] = np.arange(len(several))
    survivor[several] = several[_first_of(component[several], rank)]
    return survivor


def _first_of(component: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """For each element, the element of lowest rank in its component."""
    order = np.lexsort((rank, component))
    first = order[run_starts(component[order])]
    best = np.empty(component.max(initial=-1) + 1, np.int64)
    best[component[first]] = first
    return best[component]
