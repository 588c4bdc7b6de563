"""From what a version said to the text that it was trained on.

First the longest stretches of the answer that occur word for word in text that this version, or one
that it continues, was trained on; then the nearest documents by BM25, which are only similar. As in
OLMoTrace (Liu et al., 2025), stretches are found token by token in the training text itself, so
what is shown was read in training; it is not claimed to be the reason for the answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import MissingArtifact, UserError
from artifacts.numbers import run_starts, spans
from artifacts.progress import Report, counted
from artifacts.shards.span_index import SHORTEST, first_places
from artifacts.store.store import Store
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.explain import Exposure, TooLong, find_passages
from llm_assets.tracing.training_text import (
    IndexedShard,
    RowPart,
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
"""Number of documents, and of sources of a stretch."""


@dataclass(frozen=True)
class AnswerToTrace:
    """An answer to trace."""

    version: ModelVersion
    answer: str
    question: str = ""
    """Empty where it was not kept."""


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
        text: the answer, if only its hash was kept, or if there is no request.
        version: the one that gave the text; by default the serving one.

    Raises:
        UserError: no version serves, or there is none of that number; there is neither a request
            nor a text; the request is not on record, or its text was not kept and none is given, or
            another is.
    """
    if not request:
        answering = state.find("champion") or state.find("wanted")
        if version is not None:
            answering = state.get(version)
        if answering is None:
            raise UserError("No version is registered yet: build one with `llm-assets run`.")
        if not (text and text.strip()):
            raise UserError(
                "There is no text to trace: give the answer, on the command line with --text or "
                "--file."
            )
        return [AnswerToTrace(answering, text)]
    entries = journal.find_entries(folder, request, settings.days)
    if not entries:
        kept = f"answers are kept for {counted(settings.days, 'day', 'g')}"
        reason = "answers are not kept now" if settings.keep == "off" else kept
        raise UserError(
            f"The endpoint has no answer to the request {request!r} on record in {folder}: the id "
            f"is wrong, of another pipeline, or too old ({reason}, `endpoint.journal`). Give the "
            "answer itself, on the command line with --text."
        )
    answers = []
    for entry in entries:
        if entry.answer is None and text is None:
            raise UserError(
                f"Version {entry.version} answered the request {request!r} at {entry.at}; of the "
                "answer only a hash was kept (`endpoint.journal.keep: text` keeps it). Give it, "
                "on the command line with --text."
            )
        if text is not None and not journal.is_answer(folder, entry, text):
            continue
        answer = (text if entry.answer is None else entry.answer) or ""
        answers.append(AnswerToTrace(state.get(int(entry.version)), answer, entry.prompt or ""))
    if not answers:
        raise UserError(
            f"The text is not what the request {request!r} was answered with: its hash differs. "
            "Give the exact answer, including white space."
        )
    return answers


@dataclass(frozen=True)
class QuotedSpan:
    """A stretch of the answer that stands in training text."""

    start: int
    end: int
    """Characters of the answer."""
    tokens: int
    places: int
    """How many places of the training text contain it."""
    sources: list[Source]
    """The first of them."""


@dataclass(frozen=True)
class SimilarDocument:
    """A document that shares distinctive words with the answer or its question."""

    score: float
    """Of BM25."""
    source: Source


@dataclass(frozen=True)
class Trace:
    """What was found."""

    version: int
    answer: str
    shortest: int = SHORTEST
    """Tokens of the shortest stretch that was looked for."""
    verbatim: list[QuotedSpan] = field(default_factory=list)
    """Longest first, none inside another."""
    near: list[SimilarDocument] = field(default_factory=list)
    """Best first."""
    documents: list[Exposure] = field(default_factory=list)
    """Documents that contain the whole answer, ignoring white space, if no stretch was found."""
    tokens: int = 0
    """Of the answer."""
    missing: list[str] = field(default_factory=list)
    """Text that could not be searched because it or its record is gone, and why, in words."""

    @property
    def verdict(self) -> str:
        """What the whole is, in a word: `verbatim`, `near` or `nothing found`."""
        if self.verbatim or self.is_whole:
            return "verbatim"
        return "near" if self.near else "nothing found"

    @property
    def is_whole(self) -> bool:
        """Whether the whole answer stands in a document and was trained on there."""
        return any(document.is_trained for document in self.documents)

    @property
    def share(self) -> float:
        """The share of the answer's characters that stand in training text."""
        covered = np.full(len(self.answer), self.is_whole)
        for stretch in self.verbatim:
            covered[stretch.start : stretch.end] = True
        return float(covered.mean()) if len(covered) else 0.0

    @property
    def percent(self) -> str:
        """The share for people; 100% only if nothing is missing."""
        return f"{math.floor(100 * self.share)}%" if self.share >= 0.01 else "less than 1%"


class Tracer:
    """Traces answers of a pipeline's versions; the last version's training text stays open."""

    def __init__(self, store: Store, report: Report) -> None:
        self._store, self._report = store, report
        self._text: TrainingText | None = None

    def trace(
        self, state: RegistryState, version: ModelVersion, answer: str, question: str = ""
    ) -> Trace:
        """Look for an answer in the text that a version was trained on.

        Args:
            question: what it answers, as far as known: a short answer says little of its subject.

        Raises:
            UserError: the answer is too long, or the version was trained on nothing here.
            MissingArtifact: no text that the version was trained on is in the store.
        """
        if not answer.strip():
            # A model may have ended at once; a request's other answers are traced all the same.
            return Trace(version.version, answer)
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
            missing = [str(error), *passages.missing]
            return Trace(version.version, answer, documents=passages.documents, missing=missing)
        behind = [version.lineage, *(shards.manifest.inputs for shards in text.artifacts)]
        # Corpora behind one version may be in different Unicode forms, each with tokens of its own.
        forms = in_forms_of(self._store, behind, answer)
        best = max((_trace(text, form, question) for form in forms), key=lambda one: one.share)
        if best.verbatim:
            return best
        # Stretches are searched by tokens, from a minimum length, and within a row. What
        # `llm-assets explain` finds in addition must not be reported as absent.
        try:
            passages = find_passages(self._store, state, version, answer)
        except TooLong:
            # Only documents that were not trained on may still have all of it: of the others, a
            # stretch would have been found.
            whole = f"documents with the whole answer, whose {len(answer.split()):,} words are many"
            return replace(best, missing=[*best.missing, whole])
        missing = [*best.missing, *passages.missing]
        near = {match.source.document for match in best.near}
        # Of many documents with a short answer, those that are about the question come first.
        found = passages.documents
        found = sorted(found, key=lambda one: (not one.is_trained, one.document not in near))
        return replace(best, documents=found, missing=missing)

    def _open(self, state: RegistryState, version: ModelVersion) -> TrainingText:
        runs = runs_behind(self._store, state, version)
        if not runs:
            raise UserError(
                f"Version {version.version} is the base model: what it was trained on is not in "
                "this store. Trace an answer of a later version (`llm-assets versions`)."
            )
        text = TrainingText.find(self._store, version, runs, self._report)
        # Otherwise the earlier one is kept, with the shards and records that it has opened.
        if text != self._text:
            self._text = text
        return self._text


def _trace(text: TrainingText, answer: str, question: str) -> Trace:
    encoded = text.tokenizer.encode(answer, add_special_tokens=False)
    tokens = np.asarray(encoded.ids, np.int64)
    asked = text.tokenizer.encode(question, add_special_tokens=False).ids
    # Its end, as much as is searched: a long prompt would leave no room for the answer's tokens.
    about = np.concatenate([tokens, np.asarray(asked[-MOST_TERMS:], np.int64)])
    matches, nearest = find_stretches(text, tokens), find_nearest(text, about, MOST_SHOWN)
    parts = [part for places in matches.values() for part in places[:MOST_SHOWN]]
    # All parts at once, since each call looks up records and licenses.
    # One iterator for both: the stretches below take theirs in the order of `matches`, and what is
    # left belongs to the nearest documents.
    sources = iter(text.describe([*parts, *text.beginnings(list(nearest))]))
    stretches = [
        QuotedSpan(
            encoded.offsets[first][0],
            encoded.offsets[first + length - 1][1],
            length,
            len(places),
            list(islice(sources, min(MOST_SHOWN, len(places)))),
        )
        for (first, length), places in matches.items()
    ]
    return Trace(
        text.version.version,
        answer,
        verbatim=stretches,
        near=[SimilarDocument(*pair) for pair in zip(nearest.values(), sources, strict=True)],
        tokens=len(tokens),
        missing=text.missing,
    )


def find_stretches(text: TrainingText, tokens: np.ndarray) -> dict[tuple[int, int], list[RowPart]]:
    """The longest stretches of the tokens that were trained on, none inside another, longest first.

    Returns:
        First token and length to all places, each in a row that was trained on, where that row is
        still there.
    """
    parts = _trained_parts(text, _find_places(text.shards, tokens))
    # In this order, a stretch that contains another one comes before it, and covers it. The sort is
    # stable, so the places of a stretch keep their own order.
    parts = parts.sort_by([("length", "descending"), ("first", "ascending")])
    firsts, lengths = parts["first"].to_numpy(), parts["length"].to_numpy()
    begins = np.flatnonzero(run_starts(firsts) | run_starts(lengths)).tolist()
    stretches: dict[tuple[int, int], list[RowPart]] = {}
    # For each token, the end of the stretch that covers it and reaches farthest.
    covered = np.zeros(len(tokens), np.int64)
    for begin, following in pairwise([*begins, parts.num_rows]):
        first, length = int(firsts[begin]), int(lengths[begin])
        end = first + length
        if covered[first] < end:
            # The maximum, since a stretch may end inside a longer one that reaches farther.
            covered[first:end] = np.maximum(covered[first:end], end)
            places = parts.slice(begin, following - begin).to_pylist()
            stretches[first, length] = [
                RowPart(text.shards[row["shard"]], row["segment"], row["place"], length)
                for row in places
            ]
    return stretches


def _find_places(shards: Sequence[IndexedShard], tokens: np.ndarray) -> pa.Table:
    """Where the tokens stand in the shards, trained on or not, in stretches within a row.

    Columns: `first` of the tokens and how many (`length`); `text`, and `start`, the stretch's first
    token in it; number of the `shard`, and `segment` and `place` in it.
    """
    tables = []
    for number, indexed in enumerate(shards):
        shard, found = indexed.shard, indexed.index.matches(tokens, indexed.shard)
        segments = shard.segments[found.segment]
        columns = {
            "first": found.first,
            "length": found.length,
            "text": indexed.index.texts[segments["document"]],
            "start": found.place - first_places(shard, found.segment) + segments["offset"],
            "shard": np.full(len(segments), number),
            "segment": found.segment,
            "place": found.place,
        }
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)


def _trained_parts(text: TrainingText, places: pa.Table) -> pa.Table:
    """What of each place was trained on, in the columns of `_find_places`, ordered by place.

    The same place of a text counts once, however many shards of the lineage contain the text: if
    possible in the shard whose row a run took.
    """
    lessons = stretches_of(text.records, places["text"].unique().to_numpy(), text.read)
    lessons = lessons.rename_columns(["record", "text", "read_from", "read_to"])
    # A run that read only some rows of a text was trained on a part of the place, or on none of it.
    table = places.join(lessons, "text", join_type="inner")
    column = {name: table[name].to_numpy() for name in table.column_names}
    # How many tokens of the place come before what was read; all columns of the place move by them.
    cut = np.maximum(0, column["read_from"] - column["start"])
    column["length"] = np.minimum(column["length"], column["read_to"] - column["start"]) - cut
    column |= {name: column[name] + cut for name in ("first", "start", "place")}
    has_row = np.array(
        [[url in shard.records for url in text.records] for shard in text.shards], bool
    )
    column["is_elsewhere"] = ~has_row[column["shard"], column["record"]]
    parts = pa.table(column).filter(pc.field("length") >= SHORTEST)
    where = ["is_elsewhere", "shard", "place", "segment"]
    parts = parts.sort_by([(name, "ascending") for name in where])
    # One thread keeps the order, so that the first of each group is the best one.
    grouped = parts.group_by(["first", "length", "text", "start"], use_threads=False)
    chosen = grouped.aggregate([(name, "first") for name in where[1:]])
    chosen = chosen.rename_columns([name.removesuffix("_first") for name in chosen.column_names])
    return chosen.sort_by([(name, "ascending") for name in where[1:]])


K1, B = 1.5, 0.75
"""Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009)."""
COMMON_SHARE = 0.2
"""A token in more than this share of the documents says nothing about any of them."""
MOST_TERMS = 32
"""Different tokens of a text that are looked for."""
_BLOCK = 1_024
"""Documents that are looked up at a time, to see whether they were trained on."""


def find_nearest(text: TrainingText, tokens: np.ndarray, count: int) -> dict[int, float]:
    """The trained texts nearest to these tokens, best first, with their scores.

    Of a long text only the most telling tokens are searched, those in the fewest documents, as in
    Lucene's MoreLikeThis: the others decide little and cost most. How telling a token is depends on
    all documents of the shards.

    Returns:
        Texts as `artifacts.shards.shard_set` numbers them: fewer than `count`, or none, where no
        others share a telling token. Scores are those of BM25, comparable within one search.
    """
    shards = text.shards
    terms = np.unique(tokens)
    documents = sum(len(shard.index.texts) for shard in shards)
    frequency = sum(shard.index.offsets[terms + 1] - shard.index.offsets[terms] for shard in shards)
    # The 1 that `log1p` adds keeps weights above 0 even for tokens in more than half of the
    # documents.
    weights = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
    # In fewer than five documents, even a token of a single one is in more than this share.
    is_telling = (frequency > 0) & ((frequency <= COMMON_SHARE * documents) | (frequency == 1))
    terms, weights = terms[is_telling], weights[is_telling]
    rarest = np.argsort(-weights, kind="stable")[:MOST_TERMS]
    terms, weights = terms[rarest], weights[rarest]
    length = sum(shard.index.tokens for shard in shards) / max(1, documents)
    best = [
        near for shard in shards for near in _best(shard, terms, weights, length, text.texts, count)
    ]
    scores: dict[int, float] = {}
    # A text may be in several shards: sorted, its best score comes first, and stays.
    for number, score in sorted(best, key=lambda near: -near[1]):
        scores.setdefault(number, score)
    return dict(islice(scores.items(), count))


def _best(
    shard: IndexedShard,
    terms: np.ndarray,
    weights: np.ndarray,
    length: float,
    trained_texts: np.ndarray,
    count: int,
) -> list[tuple[int, float]]:
    """The trained texts of a shard with the highest scores above 0, each once, with these scores.

    No more of them are kept than can be shown, however many documents share a token. `length` is
    the mean of all documents.
    """
    index = shard.index
    first_place = index.offsets[terms]
    counts = index.offsets[terms + 1] - first_place
    found = spans(first_place, counts)
    documents, times = index.documents[found], index.counts[found].astype(np.float64)
    size = K1 * (1 - B + B * index.lengths[documents] / length)
    gains = np.repeat(weights, counts) * times * (K1 + 1) / (times + size)
    scores = np.bincount(documents, gains, len(index.texts))
    documents = np.flatnonzero(scores)
    order = documents[np.argsort(-scores[documents], kind="stable")]
    score_of: dict[int, float] = {}
    # `count` is small, so usually the first blocks suffice. `trained_texts` is sorted.
    for first in range(0, len(order) if len(trained_texts) else 0, _BLOCK):
        block = order[first : first + _BLOCK]
        texts = shard.index.texts[block]
        places = np.minimum(np.searchsorted(trained_texts, texts), len(trained_texts) - 1)
        is_wanted = trained_texts[places] == texts
        for text, place in zip(texts[is_wanted].tolist(), block[is_wanted].tolist(), strict=True):
            score_of.setdefault(text, float(scores[place]))
        if len(score_of) >= count:
            break
    return list(islice(score_of.items(), count))
