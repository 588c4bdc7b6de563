"""Takes spans that several documents repeat out of all but one, and counts what that changes.

Taking exact repeats out of documents follows "Deduplicating Training Data Makes Language Models
Better" (Lee and others, 2022); fingerprints and joins (`repeated_spans`) find them in place of a
suffix array, for which all text would have to be in one memory.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from spark_jobs.clean.decide.decider import DecidedDocuments, DecisionContext, DocumentPart, Example
from spark_jobs.clean.history import PAST_FOLDER, RECORD_COLUMNS
from spark_jobs.clean.repeated_spans import StayingPart, by_row, find_repeats, word_spans
from spark_jobs.clean.write import CLEAN_SCHEMA
from spark_jobs.runtime.parquet import PartRows, RowLocation, write_part_rows, write_table
from spark_jobs.runtime.tasks import Work, map_tasks
from spark_jobs.settings import CleanCorpusSettings

REPEATED = "repeated_spans"
"""Reason of a document of which too little is left; also the folder of the list of all spans."""
DROPPED_PREFIX = "part-repeated-"
"""Of files with the dropped documents, in the folder of past texts."""
SPAN_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("words", pa.int64()),
        ("neighbor", pa.string()),
        ("fate", pa.string()),
    ]
)
"""A span of a document's normalized text, in characters, and the document where it stands first.
`fate` is `counted` (it stays), `removed` or `dropped` (with the whole document, in which too little
else is)."""
TRIMMED_SCHEMA = pa.schema([("row", pa.int64()), ("text", pa.string())])
"""What is left of a document."""
_DROPPED_SCHEMA = pa.schema([CLEAN_SCHEMA.field(name) for name in (*RECORD_COLUMNS, "cluster")])

Changes = Counter[tuple[str, ...]]
"""What is to be added to the stats, by the path of keys to each figure."""


class Trimming(NamedTuple):
    """What was done to one part."""

    stay: RowLocation | None
    """Of the documents that stay; None where none does."""
    texts: RowLocation | None
    """Rows of `TRIMMED_SCHEMA`; None where no text changes."""
    changes: Changes
    examples: list[tuple[str, int]]
    """Id and row of the first dropped documents by id."""


class Span(NamedTuple):
    """Words `first` to `last` (exclusive), which stand in another document, or earlier in this."""

    first: int
    last: int
    neighbor: str


class TrimmedText(NamedTuple):
    """A document without its repeated spans."""

    document: dict[str, Any]
    """The row of the prepared part, and what was decided of it."""
    spans: list[tuple[int, int, int, str]]
    """Begin and end in characters, words, neighbor."""
    text: str
    """What is left."""
    is_dropped: bool


def trim_part(
    item: tuple[int, StayingPart, RowLocation],
    settings: CleanCorpusSettings,
    output: str,
    scratch: str,
) -> dict[str, Any]:
    """Trim one part, list its spans, and put on record what is dropped: fields of `Trimming`.

    Args:
        item: the part's number, the part, and its repeated windows (`REPEAT_SCHEMA`).
        output: folder of the clean corpus.
    """
    number, part, repeats = item
    trimmed = list(_trim(part, repeats, settings))
    is_counted = settings.repeated_spans.action == "count"
    spans = _list_spans(trimmed, is_counted)
    write_table(f"{output}/{REPEATED}/part-{number:05d}.parquet", spans)
    changes = _count_spans(trimmed)
    if is_counted:
        return Trimming(part.stay, None, changes, [])._asdict()
    dropped = [one.document for one in trimmed if one.is_dropped]
    left = [one for one in trimmed if not one.is_dropped]
    if dropped:
        # They are on record like texts that left, so that they are never taken for new ones.
        record = pa.Table.from_pylist(dropped, _DROPPED_SCHEMA)
        write_table(f"{output}/{PAST_FOLDER}/{DROPPED_PREFIX}{number:05d}.parquet", record)
    decided = part.stay.read()
    is_left = np.isin(decided["row"], [one["row"] for one in dropped], invert=True)
    texts = {"row": [one.document["row"] for one in left], "text": [one.text for one in left]}
    changes.update(_count_changes(trimmed))
    examples = sorted((one["id"], one["row"]) for one in dropped)
    return Trimming(
        _write(number, decided.filter(pa.array(is_left)), scratch),
        _write(number, pa.record_batch(texts, TRIMMED_SCHEMA), scratch),
        changes,
        examples[: settings.examples_per_reason],
    )._asdict()


def repeated_spans(identifier: str, repeats: pa.RecordBatch, window: int) -> Iterator[Span]:
    """The spans that a document's repeated windows cover, one after another.

    A window that overlaps its own first place leaves that place whole.

    Args:
        identifier: the document's id.
        repeats: its rows of `repeated_spans.REPEAT_SCHEMA`, by word.
    """
    current: Span | None = None
    for row in sorted(repeats.to_pylist(), key=lambda row: row["word"]):
        first, neighbor = row["word"], row["neighbor"]
        last = first + window
        if neighbor == identifier:
            first = max(first, row["neighbor_word"] + window)
        if current and first <= current.last and neighbor == current.neighbor:
            current = current._replace(last=last)
            continue
        if current:
            yield current
            first = max(first, current.last)
        current = Span(first, last, neighbor)
    if current:
        yield current


def _trim(
    part: StayingPart, repeats: RowLocation, settings: CleanCorpusSettings
) -> Iterator[TrimmedText]:
    found = dict(by_row(repeats.read()))
    documents = part.read(["id", "text", "source", "bytes", "text_hash"])
    documents = documents.filter(pa.array(np.isin(documents["row"], list(found))))
    for document in documents.to_pylist():
        text: str = document["text"]
        words = word_spans(text)
        spans, left, before = [], [], 0
        repeated = repeated_spans(
            document["id"], found[document["row"]], settings.repeated_spans.minimum_words
        )
        for span in repeated:
            begin, end = int(words[span.first, 0]), int(words[span.last - 1, 1])
            spans.append((begin, end, span.last - span.first, span.neighbor))
            left.append(text[before:begin])
            before = end
        rest = "".join([*left, text[before:]]).strip()
        yield TrimmedText(document, spans, rest, len(rest) < settings.minimum_characters)


def _list_spans(trimmed: list[TrimmedText], is_counted: bool) -> pa.Table:
    rows = []
    for one in trimmed:
        fate = "counted" if is_counted else "dropped" if one.is_dropped else "removed"
        rows += [(one.document["id"], *span, fate) for span in one.spans]
    named = [dict(zip(SPAN_SCHEMA.names, row, strict=True)) for row in sorted(rows)]
    return pa.Table.from_pylist(named, SPAN_SCHEMA)


def _count_spans(trimmed: list[TrimmedText]) -> Changes:
    changes: Changes = Counter()
    for one in trimmed:
        text = one.document["text"]
        changes[REPEATED, "documents"] += 1
        changes[REPEATED, "spans"] += len(one.spans)
        for begin, end, words, _ in one.spans:
            changes[REPEATED, "words"] += words
            changes[REPEATED, "bytes"] += len(text[begin:end].encode())
    return changes


def _count_changes(trimmed: list[TrimmedText]) -> Changes:
    changes: Changes = Counter()
    for document, _, rest, is_dropped in trimmed:
        changes["length_histogram", _length(document["text"])] -= 1
        changes["bytes",] -= document["bytes"]
        if not is_dropped:
            changes["length_histogram", _length(rest)] += 1
            changes["bytes",] += len(rest.encode())
            continue
        changes["documents",] -= 1
        changes["past",] += 1
        changes["sources", document["source"]] -= 1
        changes["splits", document["split"]] -= 1
        changes["slices", str(document["slice"]), document["split"]] -= 1
        changes["dropped", REPEATED] += 1
        changes["dropped_bytes", REPEATED] += document["bytes"]
    return changes


def _length(text: str) -> str:
    """The bar of the stats' histogram."""
    return str(1 << (len(text).bit_length() - 1))


def _write(number: int, rows: pa.RecordBatch, scratch: str) -> RowLocation | None:
    if not rows.num_rows:
        return None
    return write_part_rows(scratch, rows.schema, [(number, rows)]).places[number]


_BYTES_PER_FINGERPRINT = 75
"""Of text, by which `Work` cuts shuffles."""


@dataclass(frozen=True)
class TrimmedCorpus:
    """What a corpus is without its repeated spans."""

    outcome: DecidedDocuments
    """What stays, and examples of what does not."""
    texts: PartRows
    """Rows of `TRIMMED_SCHEMA` by the number of the part."""
    changes: Changes

    def stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The stats of the corpus with what was changed."""
        changed = _added(stats, self.changes)
        for name in ("dropped", "dropped_bytes"):
            changed[name] = dict(sorted(changed[name].items()))
        lengths = sorted(changed["length_histogram"].items(), key=lambda bar: int(bar[0]))
        changed["length_histogram"] = {length: count for length, count in lengths if count}
        return changed


_FIGURES = ("documents", "spans", "words", "bytes")


def trim_repeats(
    run: DecisionContext, outcome: DecidedDocuments, parts: list[DocumentPart], output: str
) -> TrimmedCorpus:
    """Find the repeated spans of the documents that stay, and take them out or count them.

    Args:
        output: folder of the clean corpus, where the spans are listed.
    """
    staying = {
        number: StayingPart(parts[number].prepared, place)
        for number, place in outcome.stay.places.items()
    }
    size = sum(row["bytes"] for row in outcome.fates.to_pylist() if row["reason"] is None)
    work = Work(run.spark, size // _BYTES_PER_FINGERPRINT, run.scratch, run.report)
    settings = run.settings
    repeats = find_repeats(work, staying, settings.repeated_spans.minimum_words)
    items = [(number, staying[number], place) for number, place in sorted(repeats.places.items())]
    trim = partial(trim_part, settings=settings, output=output, scratch=run.scratch)
    records = map_tasks(run.spark, "trimming repeated spans", items, trim, run.report)
    trimmed = {number: Trimming(**one) for (number, *_), one in zip(items, records, strict=True)}
    changes: Changes = Counter({(REPEATED, figure): 0 for figure in _FIGURES})
    for one in trimmed.values():
        changes.update(one.changes)
    run.report(
        f"{changes[REPEATED, 'words']:,} words in {changes[REPEATED, 'documents']:,} documents "
        f"stand in others too"
    )
    return TrimmedCorpus(
        _outcome(outcome, trimmed, settings.examples_per_reason), _texts(trimmed), changes
    )


def _outcome(
    outcome: DecidedDocuments, trimmed: dict[int, Trimming], shown: int
) -> DecidedDocuments:
    places = outcome.stay.places | {number: one.stay for number, one in trimmed.items()}
    stay = PartRows({number: place for number, place in places.items() if place})
    dropped = sorted(
        Example(identifier, number, row)
        for number, one in trimmed.items()
        for identifier, row in one.examples
    )
    examples = outcome.examples | ({REPEATED: dropped[:shown]} if dropped else {})
    return replace(outcome, stay=stay, examples=dict(sorted(examples.items())))


def _texts(trimmed: dict[int, Trimming]) -> PartRows:
    return PartRows({number: one.texts for number, one in trimmed.items() if one.texts})


def _added(stats: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Nested counts, to some of which is added."""
    result = dict(stats)
    for key in dict.fromkeys(path[0] for path in changes):
        within = Counter({path[1:]: n for path, n in changes.items() if path[0] == key})
        if () in within:
            result[key] = result.get(key, 0) + within[()]
        else:
            result[key] = _added(result.get(key, {}), within)
    return result
