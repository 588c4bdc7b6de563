"""From what a version said to the text that it was trained on.

First the longest stretches of the answer that stand word for word in text that this version, or one
that it continues, was trained on; then the nearest documents by BM25, which are only like it. As in
OLMoTrace (Liu and others, 2025) stretches are found token by token in the training text itself, so
what is shown was read in training; that it is why the model said it is not claimed.
"""

import math
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from artifacts.errors import MissingArtifact, UserError
from artifacts.progress import Report
from artifacts.shards.span_index import SHORTEST
from artifacts.store.store import Store
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.passages import Exposure, find_nearest, find_passages, find_stretches
from llm_assets.tracing.training_text import Source, TrainingText, in_forms_of, runs_behind
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
    found = find_stretches(text.shards, tokens, text.records, text.read)
    near = find_nearest(text.shards, tokens, text.texts, MOST_SHOWN)
    parts = [part for one in found for part in one.places[:MOST_SHOWN]]
    # Told of all at once, since records and licenses are looked up by it.
    sources = iter(text.describe([*parts, *text.beginnings(list(near))]))
    stretches = [
        QuotedSpan(
            encoded.offsets[one.first][0],
            encoded.offsets[one.first + one.length - 1][1],
            one.length,
            len(one.places),
            list(islice(sources, min(MOST_SHOWN, len(one.places)))),
        )
        for one in found
    ]
    scored = [SimilarDocument(*one) for one in zip(near.values(), sources, strict=True)]
    version = text.version.version
    return Trace(version, answer, SHORTEST, stretches, scored, [], len(tokens), text.missing)
