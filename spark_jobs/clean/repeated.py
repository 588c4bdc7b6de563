"""Takes spans that several documents repeat out of all but one, and counts what that changes.

Taking exact repeats out of documents follows "Deduplicating Training Data Makes Language Models
Better" (Lee and others, 2022); fingerprints and joins find them in place of a suffix array, for
which all text would have to be in one memory.

A window of words is identified by a 128-bit digest of its folded words, as an exact copy is by that
of its text. Fingerprints are those of winnowing (Schleimer, Wilkerson and Aiken, "Winnowing: Local
Algorithms for Document Fingerprinting", 2003): of all hashes of shorter runs within a window, the
smallest. Equal windows have an equal fingerprint, and there is one in some thirteen words (at 50
words a window), so that few rows are shuffled.

Two joins: fingerprints that occur repeatedly tell which windows are looked at whole; the digests of
these tell which are equal. Both are over small columns, and nothing of any document is on the
driver. The result follows from the documents alone, whatever parts they lie in.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from artifacts.numbers import run_starts
from spark_jobs.clean.decide.decider import DecidedDocuments, DecisionContext, DocumentPart, Example
from spark_jobs.clean.history import PAST_FOLDER, RECORD_COLUMNS
from spark_jobs.clean.prepare import EXAMPLE_COLUMN, PreparedPart
from spark_jobs.clean.write import CLEAN_SCHEMA
from spark_jobs.decontaminate.overlap import ngrams_of
from spark_jobs.runtime.parquet import PartRows, RowLocation, write_part_rows, write_table
from spark_jobs.runtime.tasks import Work, map_tasks
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.text import HASH_BYTES, fold, sum_words

_WORD = re.compile(r"\S+\s*")


def fold_words(text: str) -> str:
    """A text as `fold` leaves it, but with just the words of `word_spans`, in their order."""
    if text.isascii():
        return fold(text)
    # A character may fold to several, a space among them.
    return " ".join(fold(word).replace(" ", "") or word for word in text.split())


def word_spans(text: str) -> np.ndarray:
    """Shape (words, 2): where each word begins, and where the space after it ends, in characters.

    Args:
        text: without space before its first word.
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    return np.array(spans, np.int64).reshape(-1, 2)


def fingerprints(folded: list[str], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of which each window of a text has at least one, and equal windows the same.

    Args:
        folded: texts as `fold_words` leaves them.
        window: words in a window.

    Returns:
        `(hashes, texts)`, int64 of shape (fingerprints,): a hash, and the number of its text.
    """
    long = [number for number, text in enumerate(folded) if text.count(" ") + 1 >= window]
    width = _runs(window)
    ngrams = ngrams_of(sum_words([folded[number] for number in long]), window // 2)
    hashes = ngrams.hashes.view(np.int64)
    # Windows that reach over the end of a text choose some hashes too many, and none too few.
    smallest = ~_sliding_maximum(~hashes, width)
    edge = np.full(width - 1, np.iinfo(np.int64).min)
    reached = _sliding_maximum(np.concatenate([edge, smallest, edge]), width)
    chosen = np.flatnonzero(reached == hashes) if len(smallest) else np.empty(0, np.int64)
    owners = np.searchsorted(ngrams.offsets, chosen, side="right") - 1
    return hashes[chosen], np.array(long, np.int64)[owners]


def windows_with(folded: str, window: int, hashes: Collection[int]) -> list[tuple[int, bytes]]:
    """The windows of a text that have one of these fingerprints: `(first word, digest)`.

    Args:
        folded: a text of at least `window` words, as `fold_words` leaves it.
    """
    ngrams = ngrams_of(sum_words([folded]), window // 2).hashes.view(np.int64)
    found = np.isin(ngrams, np.fromiter(hashes, np.int64))
    firsts = np.flatnonzero(_sliding_maximum(found, _runs(window)))
    content = folded.encode("utf-8", "surrogatepass")
    spaces = np.flatnonzero(np.frombuffer(content, np.uint8) == ord(" "))
    starts, ends = np.append(0, spaces + 1), np.append(spaces, len(content))
    windows = ((n, content[starts[n] : ends[n + window - 1]]) for n in firsts.tolist())
    return [(n, hashlib.blake2b(one, digest_size=HASH_BYTES).digest()) for n, one in windows]


def _runs(window: int) -> int:
    """Hashed runs in a window; each has half its words, since few of these repeat by chance."""
    return window - window // 2 + 1


def _sliding_maximum(values: np.ndarray, width: int) -> np.ndarray:
    """Shape (n - width + 1,): the largest of each `width` neighbors; none where n is smaller."""
    reached = 1
    while reached < width and len(values):
        step = min(reached, width - reached)
        values = np.maximum(values[:-step], values[step:])
        reached += step
    return values


_NUMBER, _STRING = pa.int64(), pa.string()
_FOUND_SCHEMA = pa.schema([("row", _NUMBER), ("hash", _NUMBER)])
_FINGERPRINT_SCHEMA = pa.schema([("part", _NUMBER), *_FOUND_SCHEMA])
_WINDOW_SCHEMA = pa.schema(
    [
        ("part", _NUMBER),
        ("row", _NUMBER),
        ("digest", pa.binary()),
        ("changes", pa.bool_()),
        ("slice", _NUMBER),
        ("id", _STRING),
        ("word", _NUMBER),
    ]
)
REPEAT_SCHEMA = pa.schema(
    [("row", _NUMBER), ("word", _NUMBER), ("neighbor", _STRING), ("neighbor_word", _NUMBER)]
)
"""A window that stands in an earlier place too: its document's row and its first word, and the same
of the first place, by its document's id."""


class StayingPart(NamedTuple):
    """A prepared part, and which of its documents stay (`decider.DECIDED_SCHEMA`)."""

    prepared: PreparedPart
    stay: RowLocation

    def read(self, columns: list[str]) -> pa.Table:
        """The documents that stay: what was decided of them, and columns of theirs."""
        stay = pa.Table.from_batches([self.stay.read()])
        found = self.prepared.read(columns).take(stay["row"])
        for name in columns:
            stay = stay.append_column(name, found[name])
        return stay


def may_change(documents: pa.Table) -> np.ndarray:
    """Shape (documents,): whether a document may lose text.

    What models are measured on stays whole, and so do examples, whose texts belong together.

    Args:
        documents: `split` and `example`.
    """
    is_training = pc.is_in(documents["split"], pa.array(["train", "replay"]))
    return np.asarray(pc.and_(is_training, documents[EXAMPLE_COLUMN].is_null()))


def find_repeats(work: Work, parts: dict[int, StayingPart], window: int) -> PartRows:
    """The windows that stand in an earlier place too: rows of `REPEAT_SCHEMA`, by part.

    First come the documents that may not change, then those that came first in the lineage, then
    those of smaller id. Only windows of documents that may change are listed.
    """
    read = partial(_read_fingerprints, window=window)
    every = work.keep_parts(sorted(parts.items()), read, _FINGERPRINT_SCHEMA, "fingerprinting")
    several = every.groupBy("hash").count().where("count > 1").select("hash")
    found = every.join(several, "hash", "left_semi").distinct()
    chosen = work.by_part(found, _FOUND_SCHEMA, "comparing fingerprints")
    items = [(number, parts[number], place) for number, place in sorted(chosen.places.items())]
    read_windows = partial(_read_windows, window=window)
    windows = work.keep_parts(items, read_windows, _WINDOW_SCHEMA, "reading windows")
    place = F.struct("changes", "slice", "id", "word")
    firsts = windows.groupBy("digest").agg(F.min(place).alias("first"), F.count("*").alias("n"))
    later = windows.where("changes").join(firsts.where("n > 1"), "digest")
    repeats = later.where(place != F.col("first")).select(
        *("part", "row", "word"),
        F.col("first.id").alias("neighbor"),
        F.col("first.word").alias("neighbor_word"),
    )
    return work.by_part(repeats, REPEAT_SCHEMA, "comparing windows")


def _read_fingerprints(_: int, item: tuple[int, StayingPart], window: int) -> pa.Table:
    number, part = item
    documents = part.read(["text"])
    folded = list(map(fold_words, documents["text"].to_pylist()))
    hashes, texts = fingerprints(folded, window)
    rows = documents["row"].to_numpy()[texts]
    columns = [pa.array(np.full(len(rows), number)), pa.array(rows), pa.array(hashes)]
    return pa.Table.from_arrays(columns, schema=_FINGERPRINT_SCHEMA)


def _read_windows(_: int, item: tuple[int, StayingPart, RowLocation], window: int) -> pa.Table:
    number, part, place = item
    found = dict(by_row(place.read()))
    documents = part.read(["id", "text", EXAMPLE_COLUMN])
    documents = documents.filter(pa.array(np.isin(documents["row"], list(found))))
    changes = may_change(documents).tolist()
    tables = [_WINDOW_SCHEMA.empty_table()]
    for document, is_changeable in zip(documents.to_pylist(), changes, strict=True):
        hashes = found[document["row"]]["hash"].to_pylist()
        windows = windows_with(fold_words(document["text"]), window, hashes)
        count = len(windows)
        columns = {
            "part": [number] * count,
            "row": [document["row"]] * count,
            "digest": [digest for _, digest in windows],
            "changes": [is_changeable] * count,
            "slice": [document["slice"]] * count,
            "id": [document["id"]] * count,
            "word": [first for first, _ in windows],
        }
        tables.append(pa.table(columns, _WINDOW_SCHEMA))
    return pa.concat_tables(tables)


def by_row(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each document, which lie together."""
    rows = batch["row"].to_numpy()
    starts = np.flatnonzero(run_starts(rows)).tolist()
    for first, last in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield int(rows[first]), batch.slice(first, last - first)


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
    changes = _count_changes(trimmed, is_counted)
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
    examples = sorted((one["id"], one["row"]) for one in dropped)
    return Trimming(
        _write(number, decided.filter(pa.array(is_left)), scratch),
        _write(number, pa.record_batch(texts, TRIMMED_SCHEMA), scratch),
        changes,
        examples[: settings.examples_per_reason],
    )._asdict()


def repeated_spans(
    identifier: str, repeats: pa.RecordBatch, window: int
) -> Iterator[tuple[int, int, str]]:
    """The spans that a document's repeated windows cover, one after another.

    Each is its first word, the word after its last, and the document where it stands first. A
    window that overlaps its own first place leaves that place whole.

    Args:
        identifier: the document's id.
        repeats: its rows of `repeated_spans.REPEAT_SCHEMA`, by word.
    """
    current: tuple[int, int, str] | None = None
    for row in sorted(repeats.to_pylist(), key=lambda row: row["word"]):
        first, neighbor = row["word"], row["neighbor"]
        last = first + window
        if neighbor == identifier:
            first = max(first, row["neighbor_word"] + window)
        if current and first <= current[1] and neighbor == current[2]:
            current = (current[0], last, neighbor)
            continue
        if current:
            yield current
            first = max(first, current[1])
        current = (first, last, neighbor)
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
        for first, last, neighbor in repeated:
            begin, end = int(words[first, 0]), int(words[last - 1, 1])
            spans.append((begin, end, last - first, neighbor))
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


def _count_changes(trimmed: list[TrimmedText], is_counted: bool) -> Changes:
    changes: Changes = Counter()
    for document, spans, rest, is_dropped in trimmed:
        changes[REPEATED, "documents"] += 1
        changes[REPEATED, "spans"] += len(spans)
        for begin, end, words, _ in spans:
            changes[REPEATED, "words"] += words
            changes[REPEATED, "bytes"] += len(document["text"][begin:end].encode())
        if is_counted:
            continue
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
    figures = ("documents", "spans", "words", "bytes")
    changes: Changes = Counter({(REPEATED, figure): 0 for figure in figures})
    for one in trimmed.values():
        changes.update(one.changes)
    run.report(
        f"{changes[REPEATED, 'words']:,} words in {changes[REPEATED, 'documents']:,} documents "
        f"stand in others too"
    )
    places = outcome.stay.places | {number: one.stay for number, one in trimmed.items()}
    stay = PartRows({number: place for number, place in places.items() if place})
    dropped = sorted(
        Example(identifier, number, row)
        for number, one in trimmed.items()
        for identifier, row in one.examples
    )
    shown = {REPEATED: dropped[: settings.examples_per_reason]} if dropped else {}
    examples = dict(sorted((outcome.examples | shown).items()))
    texts = PartRows({number: one.texts for number, one in trimmed.items() if one.texts})
    return TrimmedCorpus(replace(outcome, stay=stay, examples=examples), texts, changes)


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
