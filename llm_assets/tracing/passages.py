"""Which documents hold a piece of text or are near it, and whether a version was trained on it.

`llm-assets explain` and `llm-assets trace` ask here, so what they say of a text is the same. The
nearest documents are found by BM25, over the model's own tokens. Of a long text the most telling
tokens are looked for, those that the fewest documents hold, as Lucene's MoreLikeThis does: the
others are in so many documents that they decide little and cost most.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from artifacts.errors import UserError, shown_in_line
from artifacts.numbers import spans
from artifacts.shards.shard_set import text_numbers
from artifacts.shards.span_index import SHORTEST, Matches, first_places
from artifacts.store.store import Store
from llm_assets.registry.start import find_manifest, tell_removal
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing import training_text
from spark_jobs.runtime.parquet import open_parts

_COLUMNS = ["id", "source", "split", "text_hash", "text"]


@dataclass(frozen=True)
class Exposure:
    """What runs were trained on of a document."""

    document: str
    source: str
    split: str
    lessons: list[training_text.Lesson]
    unknown: list[training_text.TrainingRun]
    """Runs whose record is gone."""
    passage: bool | None = None
    """Whether that was all of the text that was looked for in it; None where nobody knows, or the
    document itself was asked for."""

    @property
    def is_trained(self) -> bool:
        """Whether what was asked for was trained on, as far as is known."""
        return bool(self.lessons) and self.passage is not False

    def __str__(self) -> str:
        return f"{shown_in_line(self.document)} {self.without_id}"

    @property
    def without_id(self) -> str:
        """The same, to be shown beside the document's id."""
        gone = "; no record of " + ", ".join(run.name for run in self.unknown)
        return f"({shown_in_line(self.source)}): {self._fate()}" + (gone if self.unknown else "")

    def _fate(self) -> str:
        if self.lessons:
            fate = "trained on by " + "; by ".join(map(str, self.lessons))
            return fate if self.is_trained else f"{fate}, but not in this place"
        aside = self.split.replace("_", " ") if self.split in ("validation", "held_out") else ""
        trained = "not known whether trained on" if self.unknown else "never trained on"
        return f"{aside} text, {trained}" if aside else trained


@dataclass(frozen=True)
class Passages:
    """Where a text stands, in all corpora that a version was made from."""

    documents: list[Exposure]
    """Those that hold the whole of it, white space apart, those trained on first."""
    searched: int
    """Corpora."""
    missing: list[str]
    """The others, and what became of them, in words."""


def find_passages(store: Store, state: RegistryState, version: ModelVersion, text: str) -> Passages:
    """Look for a text in the clean corpora behind a version and the models that it continues.

    Raises:
        UserError: the text is empty, or the version is a base model.
    """
    if not text.split():
        raise UserError("Give a piece of text to look for.")
    runs = training_text.runs_behind(store, state, version)
    read = (training_text.shards_of(store, run) for run in reversed(runs))
    manifests = (find_manifest(store, "tokenized_shards", name) for name in read)
    # Newest first, as far as it is known what they were.
    shards = [one for one in manifests if one]
    behind = (version.lineage, *(one.inputs for one in shards))
    names = [(kind, of[kind]) for of in behind for kind in training_text.TEXT_KINDS if kind in of]
    corpora = {name: store.find_named(*name) for name in names}
    if not corpora and not runs:
        raise UserError(f"Version {version.version} is the base model: it has no text here.")
    there = [corpus.url for corpus in corpora.values() if corpus]
    forms = [form.split() for form in training_text.in_forms_of(store, behind, text)]
    pattern = "|".join(r"[\s\p{Z}]+".join(map(re.escape, words)) for words in forms)
    holds = pc.match_substring_regex(pc.field("text"), pattern)
    try:
        held = open_parts(there, _COLUMNS).to_table(filter=holds).to_pylist() if there else []
    except pa.ArrowInvalid as error:
        if "pattern too large" not in str(error):
            raise
        raise UserError(
            f"A text of {len(forms[0]):,} words is too long to be looked for. Give a part of it."
        ) from None
    # A text that several corpora have is told of as the first one has it.
    rows = {row["text_hash"]: row for row in reversed(held)}
    tokenizer = training_text.find_tokenizer(store, version) if rows and shards else None
    passages: dict[str, bool] = {}
    # Of examples, the tokens are not the text's alone.
    if tokenizer and shards[0].stats.get("form", "pretraining") == "pretraining":
        records = [run.record for run in runs if run.record]
        first = 0 if shards[0].stats["start_token_id"] is None else 1
        passages = _trained_passages(records, tokenizer, first, rows, forms)
    found = exposures(runs, list(rows.values()), passages)
    return Passages(
        sorted(found, key=lambda one: (not one.is_trained, one.document)),
        searched=len(there),
        missing=[tell_removal(store, *name) for name, corpus in corpora.items() if corpus is None],
    )


def exposures(
    runs: Sequence[training_text.TrainingRun],
    documents: Sequence[dict[str, Any]],
    passages: dict[str, bool] | None = None,
) -> list[Exposure]:
    """What runs were trained on of documents.

    Args:
        documents: `id`, `source`, `split` and `text_hash` of each.
        passages: text to whether the passage that was looked for was trained on, where known.
    """
    lessons = training_text.lessons_of(runs, [record["text_hash"] for record in documents])
    unknown = [run for run in runs if run.record is None]
    known = passages or {}
    return [
        Exposure(
            one["id"],
            one["source"],
            one["split"],
            lessons[one["text_hash"]],
            unknown,
            known.get(one["text_hash"]),
        )
        for one in documents
    ]


def _trained_passages(
    records: Sequence[str],
    tokenizer: Tokenizer,
    first: int,
    rows: dict[str, dict[str, Any]],
    forms: Sequence[Sequence[str]],
) -> dict[str, bool]:
    """Text to whether all tokens of a passage, wherever it stands in it, were trained on.

    Texts that nothing was trained on of are left out.

    Args:
        records: URLs of what the runs were trained on (`recipes.data.records`).
        first: number of a text's own first token.
        forms: the words of the passage, as texts may have them.
    """
    pattern = re.compile("|".join(r"\s+".join(map(re.escape, words)) for words in forms))
    numbers = text_numbers(list(rows))
    stretches = training_text.stretches_of(records, numbers)
    found = {}
    for number, (text, row) in zip(numbers.tolist(), rows.items(), strict=True):
        of_text = training_text.rows_of(stretches, number).to_pylist()
        if of_text:
            read = np.zeros(max(one["end"] for one in of_text), bool)
            for one in of_text:
                read[one["start"] : one["end"]] = True
            places = _places(row["text"], pattern, tokenizer)
            found[text] = any(
                first + end <= len(read) and read[first + begin : first + end].all()
                for begin, end in places
            )
    return found


def _places(text: str, pattern: re.Pattern[str], tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Bounds of the tokens that a passage has a part in, wherever it stands."""
    offsets = np.array(tokenizer.encode(text, add_special_tokens=False).offsets)
    for match in pattern.finditer(text):
        begin = np.searchsorted(offsets[:, 1], match.start(), side="right")
        yield int(begin), int(np.searchsorted(offsets[:, 0], match.end()))


K1, B = 1.5, 0.75
"""Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009)."""
COMMON_SHARE = 0.2
"""A token that this share of the documents has says nothing about any of them."""
MOST_TERMS = 32
"""Different tokens of a text that are looked for."""
_BLOCK = 1_024
"""Documents that are asked at a time whether they were trained on."""


def find_nearest(
    shards: Sequence[training_text.IndexedShard], tokens: np.ndarray, texts: np.ndarray, count: int
) -> dict[int, float]:
    """The nearest among some texts (`artifacts.shards.shard_set`), best first, to their scores.

    How telling a token is, all documents of the shards say.

    Args:
        tokens: of the text to look for.
        texts: shape (texts,), uint64, sorted: those to look among.

    Returns:
        Fewer than `count`, or none, where no others share a telling token. Scores are those of
        BM25, comparable within one search.
    """
    if not shards:
        return {}
    terms, weights = _telling_terms(shards, tokens)
    documents = sum(len(one.index.texts) for one in shards)
    length = sum(one.index.tokens for one in shards) / max(1, documents)
    best = [
        near
        for one in shards
        for near in _best(one, _scores(one, terms, weights, length), texts, count)
    ]
    found: dict[int, float] = {}
    for text, score in sorted(best, key=lambda near: -near[1]):
        found.setdefault(text, score)
    return dict(islice(found.items(), count))


def _telling_terms(
    shards: Sequence[training_text.IndexedShard], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that are looked for and the weight of each, two arrays of one length."""
    terms = np.unique(tokens)
    total = sum(len(one.index.texts) for one in shards)
    frequency = sum(one.index.offsets[terms + 1] - one.index.offsets[terms] for one in shards)
    weights = np.log1p((total - frequency + 0.5) / (frequency + 0.5))
    is_telling = (frequency > 0) & ((frequency <= COMMON_SHARE * total) | (frequency == 1))
    terms, weights = terms[is_telling], weights[is_telling]
    rarest = np.argsort(-weights, kind="stable")[:MOST_TERMS]
    return terms[rarest], weights[rarest]


def _scores(
    shard: training_text.IndexedShard, terms: np.ndarray, weights: np.ndarray, length: float
) -> np.ndarray:
    """Shape (documents,): BM25 of each document of a shard; `length` is the mean of all."""
    index = shard.index
    first = index.offsets[terms]
    counts = index.offsets[terms + 1] - first
    places = spans(first, counts)
    documents, times = index.documents[places], index.counts[places].astype(np.float64)
    size = K1 * (1 - B + B * index.lengths[documents] / length)
    gains = np.repeat(weights, counts) * times * (K1 + 1) / (times + size)
    return np.bincount(documents, gains, len(index.texts))


def _best(
    shard: training_text.IndexedShard, scores: np.ndarray, wanted: np.ndarray, count: int
) -> list[tuple[int, float]]:
    """The wanted texts of a shard with the highest scores above 0, each once, and these scores.

    So of a shard no more is held than may be shown, however many documents share a token.
    """
    documents = np.flatnonzero(scores)
    order = documents[np.argsort(-scores[documents], kind="stable")]
    found: dict[int, float] = {}
    # Few are asked for, so only the first blocks are looked up among the wanted, which are sorted.
    for first in range(0, len(order) if len(wanted) else 0, _BLOCK):
        block = order[first : first + _BLOCK]
        texts = shard.index.texts[block]
        places = np.minimum(np.searchsorted(wanted, texts), len(wanted) - 1)
        is_wanted = wanted[places] == texts
        for text, place in zip(texts[is_wanted].tolist(), block[is_wanted].tolist(), strict=True):
            found.setdefault(text, float(scores[place]))
        if len(found) >= count:
            break
    return list(islice(found.items(), count))


@dataclass(frozen=True)
class TextMatch:
    """A stretch of the text, and everywhere that it was trained on."""

    first: int
    length: int
    """Tokens of the text."""
    places: list[training_text.Part]


def find_stretches(
    shards: Sequence[training_text.IndexedShard],
    tokens: np.ndarray,
    records: Sequence[str],
    read: training_text.Reader,
) -> list[TextMatch]:
    """The longest stretches, none inside another, longest first.

    Each place of a text is given in a row that was trained on, where that row is still there.

    Args:
        tokens: of the text.
        records: URLs of what the runs were trained on (`recipes.data.records`).
        read: gives the records of some texts.
    """
    matches = [one.index.matches(tokens, one.shard) for one in shards]
    texts = [
        np.asarray(one.index.texts[one.shard.segments["document"][found.segment]])
        for one, found in zip(shards, matches, strict=True)
    ]
    lessons = training_text.stretches_of(records, np.unique(np.concatenate(texts)), read)
    readers = [np.array([url in shard.records for url in records], bool) for shard in shards]
    columns = [
        _trained_part(one, found, of, lessons, number, readers[number])
        for number, (one, found, of) in enumerate(zip(shards, matches, texts, strict=True))
    ]
    every = np.concatenate(columns)
    every = every[every[:, 1] >= SHORTEST]
    every = every[np.argsort(every[:, 7], kind="stable")]
    # A place of a text counts once, in however many shards of the lineage the text lies.
    every = every[np.unique(every[:, :4], axis=0, return_index=True)[1]]
    found: list[TextMatch] = []
    covered = np.zeros(len(tokens), np.int64)
    # A stretch begins no earlier and ends no later than one that holds it, and is shorter.
    stretches = {(int(first), int(length)) for first, length in every[:, :2]}
    for first, length in sorted(stretches, key=lambda one: (-one[1], one[0])):
        if covered[first] >= first + length:
            continue
        covered[first : first + length] = np.maximum(
            covered[first : first + length], first + length
        )
        same = every[(every[:, 0] == first) & (every[:, 1] == length)][:, 4:7]
        places = [(shards[n], segment, at, length) for n, at, segment in sorted(same.tolist())]
        found.append(TextMatch(first, length, places))
    return found


def _trained_part(
    shard: training_text.IndexedShard,
    matches: Matches,
    texts: np.ndarray,
    lessons: pa.Table,
    number: int,
    reads: np.ndarray,
) -> np.ndarray:
    """Shape (parts, 8): what of each match was trained on, as one stretch of one row.

    Columns: first token of the answer, tokens, the text and the stretch's first token in it; the
    shard's number, the place in the shard and the segment; and 1 where the stretch was trained on
    in a row of another shard.

    Args:
        lessons: of `stretches_of`.
        number: the shard's.
        reads: shape (records,), whether the run of each took rows of the shard.
    """
    order = np.argsort(lessons["text"].to_numpy(), kind="stable")
    of, start, end, record = (
        lessons[name].to_numpy()[order] for name in ("text", "start", "end", "record")
    )
    first = np.searchsorted(of, texts)
    counts = np.searchsorted(of, texts, side="right") - first
    match, lesson = np.repeat(np.arange(len(texts)), counts), spans(first, counts)
    segment = matches.segment[match]
    segments = shard.shard.segments[segment]
    begin = matches.place[match] - first_places(shard.shard, segment) + segments["offset"]
    cut = np.maximum(0, start[lesson] - begin)
    length = np.minimum(begin + matches.length[match], end[lesson]) - begin - cut
    of_text = (matches.first[match] + cut, length, texts[match].view(np.int64), begin + cut)
    of_shard = (np.full(len(match), number), matches.place[match] + cut, segment)
    return np.column_stack([*of_text, *of_shard, ~reads[record[lesson]]]).astype(np.int64)
