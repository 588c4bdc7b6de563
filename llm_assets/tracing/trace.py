"""From what a version said to the text that it was trained on.

First the longest stretches of the answer that stand word for word in text that this version, or one
that it continues, was trained on; then the nearest documents by BM25, which are only like it. As in
OLMoTrace (Liu and others, 2025) stretches are found token by token in the training text itself, so
what is shown was read in training; that it is why the model said it is not claimed.

BM25 is over the model's own tokens. Of a long text the most telling ones are looked for, those that
the fewest documents hold, as Lucene's MoreLikeThis does: the others are in so many documents that
they decide little and cost most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts.errors import MissingArtifact, UserError
from artifacts.numbers import spans
from artifacts.progress import Report
from artifacts.shards.span_index import SHORTEST, Matches, first_places
from artifacts.store.store import Store
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.explain import Exposure, find_passages
from llm_assets.tracing.training_text import (
    IndexedShard,
    Part,
    Source,
    TrainingText,
    in_forms_of,
    runs_behind,
    stretches_of,
)
from serving import journal
from serving.settings import JournalSettings

MOST_CHARACTERS = 100_000
MOST_SHOWN = 5
"""Documents, and sources of a stretch."""


@dataclass(frozen=True)
class AnswerToTrace:
    """An answer to trace."""

    version: ModelVersion
    answer: str


def find_answers(
    state: RegistryState,
    folder: Path,
    settings: JournalSettings,
    request: str | None,
    text: str | None,
    version: int | None,
) -> list[AnswerToTrace]:
    """The answers to a request, as the endpoint kept them; without one, a text as an answer.

    Args:
        folder: the endpoint's state folder.
        request: its `X-Request-Id`, or the `id` of the answer.
        text: the answer, where only its hash was kept, or there is no request.
        version: that gave the text, by default the serving one.

    Raises:
        UserError: no version serves, or there is none of that number; the request is not on record,
            or its text was not kept and none is given, or another is.
    """
    if not request:
        answered = state.find("champion") or state.find("wanted")
        if version is not None:
            answered = state.get(version)
        if answered is None:
            raise UserError("No version is registered yet: build one with `llm-assets run`.")
        return [AnswerToTrace(answered, text or "")]
    entries = journal.find_entries(folder, request, settings.days)
    if not entries:
        kept = f"answers are kept for {settings.days:g} day{'s' * (settings.days != 1)}"
        reason = "answers are not kept now" if settings.keep == "off" else kept
        raise UserError(
            f"The endpoint has no answer to the request {request!r} on record in {folder}: the id "
            f"is wrong, of another pipeline, or too old ({reason}, `endpoint.journal`). Give the "
            "answer itself, on the command line with --text."
        )
    asked = []
    for entry in entries:
        if entry.answer is None and text is None:
            raise UserError(
                f"Version {entry.version} answered the request {request!r} at {entry.at}; of the "
                "answer only a hash was kept (`endpoint.journal.keep: text` keeps it). Give it, "
                "on the command line with --text."
            )
        if text is not None and not journal.is_answer(folder, entry, text):
            continue
        answer = text if entry.answer is None else entry.answer
        asked.append(AnswerToTrace(state.get(int(entry.version)), answer or ""))
    if not asked:
        raise UserError(
            f"The text is not what the request {request!r} was answered with: its hash differs. "
            "Give the exact answer, including white space."
        )
    return asked


@dataclass(frozen=True)
class QuotedSpan:
    """A stretch of the answer that stands in training text."""

    start: int
    end: int
    """Characters of the answer."""
    tokens: int
    places: int
    """How many places of the training text hold it."""
    sources: list[Source]
    """The first of them."""


@dataclass(frozen=True)
class SimilarDocument:
    """A document that shares distinctive words with the answer."""

    score: float
    """Of BM25."""
    source: Source


@dataclass(frozen=True)
class Trace:
    """What was found."""

    version: int
    answer: str
    shortest: int
    """Tokens of the shortest stretch that was looked for."""
    verbatim: list[QuotedSpan]
    """Longest first, none inside another."""
    near: list[SimilarDocument]
    """Best first."""
    documents: list[Exposure]
    """Those that hold the whole answer, white space apart, where no stretch was found."""
    tokens: int
    """Of the answer."""
    missing: list[str]
    """Text that was not looked at, since it or its record is gone, and why, in words."""

    @property
    def verdict(self) -> str:
        """What the whole is, in a word: `verbatim`, `near` or `nothing found`."""
        if self.verbatim or self.is_whole:
            return "verbatim"
        return "near" if self.near else "nothing found"

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer stands in a document, and was trained on there."""
        return any(document.is_trained for document in self.documents)

    @property
    def share(self) -> float:
        """The share of the answer's characters that stand in training text."""
        covered = np.full(len(self.answer), self.is_whole)
        for one in self.verbatim:
            covered[one.start : one.end] = True
        return float(covered.mean()) if len(covered) else 0.0

    @property
    def percent(self) -> str:
        """The share for people; 100% only where nothing is missing."""
        return f"{math.floor(100 * self.share)}%" if self.share >= 0.01 else "less than 1%"


class Tracer:
    """Traces answers of a pipeline's versions; what the last one was trained on stays open."""

    def __init__(self, store: Store, report: Report) -> None:
        self._store, self._report = store, report
        self._text: TrainingText | None = None

    def trace(self, state: RegistryState, version: ModelVersion, answer: str) -> Trace:
        """Look for an answer in the text that a version was trained on.

        Raises:
            UserError: the answer is empty or too long, or the version was trained on nothing here.
            MissingArtifact: no text that the version was trained on is in the store.
        """
        if not answer.strip():
            raise UserError(
                "There is no text to trace: give the answer, on the command line with --text or "
                "--file."
            )
        if len(answer) > MOST_CHARACTERS:
            raise UserError(
                f"The text has {len(answer):,} characters, more than the {MOST_CHARACTERS:,} that "
                "are traced at a time: give a part of it."
            )
        try:
            text = self._open(state, version)
        except MissingArtifact as error:
            passages = find_passages(self._store, state, version, answer)
            if not passages.searched:
                raise
            gone = [str(error), *passages.missing]
            return Trace(version.version, answer, SHORTEST, [], [], passages.documents, 0, gone)
        behind = [version.lineage, *(shards.manifest.inputs for shards in text.artifacts)]
        forms = in_forms_of(self._store, behind, answer)
        found = max((_trace(text, form) for form in forms), key=lambda one: one.share)
        if found.verbatim:
            return found
        # Nothing is said not to be there that `llm-assets explain` finds: stretches are looked for
        # by tokens, from some length on, and within a row.
        passages = find_passages(self._store, state, version, answer)
        missing = [*found.missing, *passages.missing]
        return replace(found, documents=passages.documents, missing=missing)

    def _open(self, state: RegistryState, version: ModelVersion) -> TrainingText:
        runs = runs_behind(self._store, state, version)
        if not runs:
            raise UserError(
                f"Version {version.version} is the base model: what it was trained on is not in "
                "this store. Trace an answer of a later version (`llm-assets versions`)."
            )
        text = TrainingText.find(self._store, version, runs, self._report)
        if text != self._text:
            self._text = text
        return self._text


def _trace(text: TrainingText, answer: str) -> Trace:
    encoded = text.tokenizer.encode(answer, add_special_tokens=False)
    tokens = np.asarray(encoded.ids, np.int64)
    found, near = find_stretches(text, tokens), find_nearest(text, tokens, MOST_SHOWN)
    parts = [part for places in found.values() for part in places[:MOST_SHOWN]]
    # Told of all at once, since records and licenses are looked up by it.
    sources = iter(text.describe([*parts, *text.beginnings(list(near))]))
    stretches = [
        QuotedSpan(
            encoded.offsets[first][0],
            encoded.offsets[first + length - 1][1],
            length,
            len(places),
            list(islice(sources, min(MOST_SHOWN, len(places)))),
        )
        for (first, length), places in found.items()
    ]
    scored = [SimilarDocument(*one) for one in zip(near.values(), sources, strict=True)]
    version = text.version.version
    return Trace(version, answer, SHORTEST, stretches, scored, [], len(tokens), text.missing)


K1, B = 1.5, 0.75
"""Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009)."""
COMMON_SHARE = 0.2
"""A token that this share of the documents has says nothing about any of them."""
MOST_TERMS = 32
"""Different tokens of a text that are looked for."""
_BLOCK = 1_024
"""Documents that are asked at a time whether they were trained on."""


def find_nearest(text: TrainingText, tokens: np.ndarray, count: int) -> dict[int, float]:
    """The texts nearest to these tokens, of those trained on, best first, to their scores.

    How telling a token is, all documents of the shards say.

    Returns:
        Texts as `artifacts.shards.shard_set` numbers them: fewer than `count`, or none, where no
        others share a telling token. Scores are those of BM25, comparable within one search.
    """
    shards = text.shards
    terms, weights = _telling_terms(shards, tokens)
    documents = sum(len(one.index.texts) for one in shards)
    length = sum(one.index.tokens for one in shards) / max(1, documents)
    best = [
        near
        for one in shards
        for near in _best(one, _scores(one, terms, weights, length), text.texts, count)
    ]
    found: dict[int, float] = {}
    for number, score in sorted(best, key=lambda near: -near[1]):
        found.setdefault(number, score)
    return dict(islice(found.items(), count))


def _telling_terms(
    shards: Sequence[IndexedShard], tokens: np.ndarray
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
    shard: IndexedShard, terms: np.ndarray, weights: np.ndarray, length: float
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
    shard: IndexedShard, scores: np.ndarray, wanted: np.ndarray, count: int
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


def find_stretches(text: TrainingText, tokens: np.ndarray) -> dict[tuple[int, int], list[Part]]:
    """The longest stretches of the tokens that were trained on, none inside another, longest first.

    Returns:
        First token and length to all places, each in a row that was trained on, where that row is
        still there.
    """
    shards = text.shards
    matches = [one.index.matches(tokens, one.shard) for one in shards]
    texts = [
        np.asarray(one.index.texts[one.shard.segments["document"][found.segment]])
        for one, found in zip(shards, matches, strict=True)
    ]
    lessons = stretches_of(text.records, np.unique(np.concatenate(texts)), text.read)
    columns = [
        _trained_part(text, number, found, of, lessons)
        for number, (found, of) in enumerate(zip(matches, texts, strict=True))
    ]
    every = np.concatenate(columns)
    every = every[every[:, 1] >= SHORTEST]
    every = every[np.argsort(every[:, 7], kind="stable")]
    # A place of a text counts once, in however many shards of the lineage the text lies.
    every = every[np.unique(every[:, :4], axis=0, return_index=True)[1]]
    stretches: dict[tuple[int, int], list[Part]] = {}
    covered = np.zeros(len(tokens), np.int64)
    # A stretch begins no earlier and ends no later than one that holds it, and is shorter.
    distinct = {(int(first), int(length)) for first, length in every[:, :2]}
    for first, length in sorted(distinct, key=lambda one: (-one[1], one[0])):
        if covered[first] >= first + length:
            continue
        covered[first : first + length] = np.maximum(
            covered[first : first + length], first + length
        )
        same = every[(every[:, 0] == first) & (every[:, 1] == length)][:, 4:7]
        places = [(shards[n], segment, at, length) for n, at, segment in sorted(same.tolist())]
        stretches[first, length] = places
    return stretches


def _trained_part(
    text: TrainingText, number: int, matches: Matches, texts: np.ndarray, lessons: pa.Table
) -> np.ndarray:
    """Shape (parts, 8): what of each match in a shard was trained on, as one stretch of one row.

    Columns: first token of the answer, tokens, the text and the stretch's first token in it; the
    shard's number, the place in the shard and the segment; and 1 where the stretch was trained on
    in a row of another shard.

    Args:
        texts: shape (matches,), uint64, that each match stands in.
        lessons: of `stretches_of`.
    """
    shard = text.shards[number]
    reads = np.array([url in shard.records for url in text.records], bool)
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
