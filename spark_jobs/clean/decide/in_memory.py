"""Decides with a row of every document in the driver's memory: some 970 bytes each."""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.clean.decide.decider import (
    CHOSEN_SCHEMA,
    DECIDED_SCHEMA,
    DUPLICATE_SCHEMA,
    PAST,
    DecidedDocuments,
    Decider,
    DecisionContext,
    DocumentPart,
    Example,
)
from spark_jobs.clean.decide.deduplicate import (
    Decisions,
    decide_survivors,
    find_near,
    group_exact,
    thin_out,
)
from spark_jobs.clean.decide.near_duplicates import PreparedParts, fetch_shingles
from spark_jobs.clean.forgotten import FORGOTTEN, SIMILAR
from spark_jobs.runtime.parquet import PartRows, split_rows, write_part_rows


class InMemoryDecider(Decider):
    """Decides on columns of whole arrays; Spark's tasks only make shingles, where the texts are."""

    def __init__(self, run: DecisionContext, parts: list[DocumentPart]) -> None:
        self._run = run
        self._parts = parts
        self._corpus = PreparedParts(parts, run.forgotten)

    def repeated_ids(self) -> list[tuple[str, int]]:
        ids = self._corpus.documents["id"]
        if len(ids.unique()) == len(ids):
            return []
        counts = pc.value_counts(ids)
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()
        repeated.sort(key=lambda item: item["values"])
        return [(item["values"], item["counts"]) for item in repeated[:3]]

    def sources(self) -> set[str]:
        return set(self._corpus.documents["source"].unique().to_pylist())

    def texts_left(self) -> PartRows:
        documents = self._corpus.documents
        sound = documents["text_hash"].filter(pc.is_null(documents["fault"]))
        return self._not_among(sound)

    def decide(self, past: list[DocumentPart]) -> DecidedDocuments:
        run, settings = self._run, self._run.settings
        prepared = PreparedParts([*self._parts, *past], run.forgotten) if past else self._corpus
        texts = group_exact(prepared.documents, run.history, settings.split)
        keep = settings.templates.keep
        documents, texts = thin_out(prepared.documents, texts, run.history, keep)
        words = settings.near_duplicates.shingle_words
        shingles = partial(
            fetch_shingles,
            run.spark,
            prepared,
            words=words,
            scratch=run.scratch,
            cache=run.cache,
            report=run.report,
        )
        near = find_near(prepared, texts, settings, shingles)
        decisions = decide_survivors(documents, texts, near, run.history, settings.split)
        documents = decisions.documents
        present = documents.filter(pc.invert(documents["past"]))
        stay = present.filter(pc.is_null(present["reason"]))
        return DecidedDocuments(
            stay=_stay(decisions, prepared, run.scratch),
            left=self._not_among(stay["text_hash"]),
            duplicates=_duplicates(decisions, run.scratch),
            fates=_fates(present),
            slices=_slices(stay),
            lengths=_lengths(stay),
            cluster_sizes=_histogram(decisions.cluster_sizes),
            examples=_examples(documents, prepared, settings.examples_per_reason),
            slice=run.history.slice if run.history else 1,
            exact_copies=len(texts.members) - len(texts.representatives),
            near_copies=len(near.edges.left),
            candidates=near.candidates,
            verified=near.verified,
        )

    def _not_among(self, hashes: pa.ChunkedArray) -> PartRows:
        """Rows of the record whose texts have none of these hashes, and are not forgotten."""
        history = self._run.history
        if history is None:
            return PartRows({})
        forgotten = pa.array(self._run.forgotten.hidden, pa.string())
        places = history.missing(pa.chunked_array([*hashes.chunks, forgotten]))
        offsets = np.cumsum([0, *(part.rows for part in history.parts)])
        chosen = split_rows(places, offsets, pa.table({}))
        return write_part_rows(self._run.scratch, CHOSEN_SCHEMA, chosen)


def _stay(decisions: Decisions, prepared: PreparedParts, scratch: str) -> PartRows:
    numbers = np.flatnonzero(decisions.stays)
    columns = decisions.documents.select(DECIDED_SCHEMA.names[1:]).take(pa.array(numbers))
    return write_part_rows(scratch, DECIDED_SCHEMA, split_rows(numbers, prepared.offsets, columns))


def _duplicates(decisions: Decisions, scratch: str) -> PartRows:
    batches = enumerate(decisions.duplicates.combine_chunks().to_batches())
    return write_part_rows(scratch, DUPLICATE_SCHEMA, batches)


def _fates(present: pa.Table) -> pa.Table:
    groups = present.group_by(["reason", "source"])
    sums = [("bytes", "count"), ("bytes", "sum"), ("repaired", "sum")]
    found = groups.aggregate(sums)
    names = {"bytes_count": "documents", "bytes_sum": "bytes", "repaired_sum": "repaired"}
    return found.rename_columns([names.get(name, name) for name in found.column_names])


def _slices(stay: pa.Table) -> pa.Table:
    found = stay.group_by(["slice", "split"]).aggregate([([], "count_all")])
    return found.rename_columns({"count_all": "documents"})


def _lengths(stay: pa.Table) -> dict[int, int]:
    return _histogram(np.frexp(stay["characters"].to_numpy())[1] - 1)


def _histogram(values: np.ndarray) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _examples(documents: pa.Table, prepared: PreparedParts, count: int) -> dict[str, list[Example]]:
    examples: dict[str, list[Example]] = {}
    unshown = {None, PAST, FORGOTTEN, SIMILAR}
    for reason in sorted({*pc.unique(documents["reason"]).to_pylist()} - unshown):
        is_meant = np.asarray(pc.equal(documents["reason"], reason).fill_null(False))
        numbers = np.flatnonzero(is_meant)
        ids = documents["id"].take(pa.array(numbers)).combine_chunks()
        examples[reason] = []
        for place in np.asarray(pc.sort_indices(ids))[:count].tolist():
            number = int(numbers[place])
            part = int(np.searchsorted(prepared.offsets, number, side="right")) - 1
            row = number - int(prepared.offsets[part])
            examples[reason].append(Example(ids[place].as_py(), part, row))
    return examples
