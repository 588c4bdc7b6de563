"""The first page: what the model has learned since the last version, and what is under way."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from starlette.requests import Request
from starlette.routing import Route

from artifacts.store.store import Artifact
from llm_assets.board.pages import Board, find_behind, page_at
from llm_assets.exam.questions import AnswerPair, exam_shares, find_exam, read_answers
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.explain import Exposure, exposures, read_texts
from llm_assets.tracing.training_text import runs_behind
from recipes.evaluation.exam import CLOSED_BOOK
from recipes.evaluation.settings import SCORES_NAME, Metric
from recipes.evaluation.statistics import interval
from spark_jobs.runtime.parquet import open_parts

MOST_SHOWN = 8
REFRESH_SECONDS = 15
BEGINNING = 160
"""Characters of a document that are shown."""
MOST_LOOKED_AT = 2_000
"""Documents of the text, when those are looked for that were read since."""


class SizedScore(NamedTuple):
    """Of a document or an answer; a figure is a sum of scores over a sum of sizes."""

    group: str
    """Its source or relation."""
    score: float
    size: float

    @property
    def value(self) -> float:
        """In the unit of the recipe's metric."""
        return self.score / self.size


class DocumentGain(NamedTuple):
    """A held-out document that the model reads better, or worse, than the one before."""

    gain: float
    document: str
    before: SizedScore
    after: SizedScore


@dataclass(frozen=True)
class Knowledge:
    """What a version knows that the one before it did not."""

    before: str
    """The other one: `the base model` or `version 3`."""
    won: list[AnswerPair]
    lost: list[AnswerPair]
    is_gain: bool
    """Whether more was won than lost beyond what choosing by chance explains."""
    shares: list[tuple[str, float | None, float | None]]
    """Condition of the exam, and the shares of right answers before and after."""
    gains: list[DocumentGain]
    """Best first; of text that neither was trained on."""
    unit: str


def routes(board: Board) -> list[Route]:
    """The page at `/`."""

    def look(_: Request) -> dict[str, Any]:
        state = board.registry.state()
        champion = state.find("champion")
        moves = [move for move in state.history if champion and move.version == champion.version]
        takeovers = [move for move in state.history if move.alias == "champion"]
        # If it is wanted again while it serves, that move is not what made it serve.
        earlier = moves[: moves.index(takeovers[-1])] if takeovers else []
        wanted_moves = [move for move in earlier if move.alias == "wanted"]
        verdicts = state.verdicts_of(champion.weights) if champion else []
        learned = find_learned(board, state, champion) if champion else None
        won = learned.won if learned else []
        # With an exam, the answers won already say what was learned from which document.
        new_text = find_new_text(board, state, champion) if champion and not won else NewText()
        pipeline = board.status()
        is_local = board.settings.platform == "local"
        # Vertex AI is not asked.
        answering = pipeline["served"]["versions"] if pipeline["served"] else {}
        is_busy = bool(pipeline["running"] or pipeline["machines"] or pipeline["making"])
        return {
            "state": state,
            "champion": champion,
            "decision": wanted_moves[-1] if wanted_moves else None,
            "takeovers": takeovers,
            "learned": learned,
            # The gate rejected it, so a person let it serve all the same.
            "is_overruled": verdicts and not any(verdict.promoted for verdict in verdicts),
            "new_text": new_text,
            "is_local": is_local,
            "is_serving": champion and (not is_local or str(champion.version) in answering),
            "pipeline": pipeline,
            "refreshes": REFRESH_SECONDS if is_busy else None,
            "most_shown": MOST_SHOWN,
        }

    return [page_at("/", board, "now.html", look)]


def find_learned(board: Board, state: RegistryState, version: ModelVersion) -> Knowledge | None:
    """From the version's own evaluation; None if that is gone, or there never was one."""
    evaluation = find_behind(board.store, version, "eval_metrics")
    if evaluation is None:
        return None
    previous = _version_before(state, version)
    number = None if previous is None or previous.is_base else previous.version
    past = find_behind(board.store, previous, "clean_corpus") if previous else None
    # `_learned` finds the exam by itself. It is given so that the result is made again once
    # forgetting has rewritten the exam.
    return board.remember(_learned, [evaluation, find_exam(evaluation), past], number)


def _learned(
    evaluation: Artifact, _: Artifact | None, past: Artifact | None, before: int | None
) -> Knowledge:
    metric = Metric.model_validate(evaluation.stats["metric"])
    by_role = evaluation.stats["metrics"].get(f"held_out_{metric.name}", {})
    role = "incumbent" if "incumbent" in by_role else "base"
    answers = read_answers(evaluation, role)
    is_base = role == "base" or before is None
    won = [answer for answer in answers if answer.is_won]
    added = _added(past, {answer.document for answer in won if answer.document}) if past else set()
    closed_book = [answer for answer in answers if answer.task == CLOSED_BOOK]
    gains = np.array([answer.after - answer.before for answer in closed_book])
    facts = np.array([f"{one.question.get('subject')}\0{one.relation}" for one in closed_book])
    # Answers from old text come last: an earlier version may have known them too.
    won.sort(key=lambda pair: pair.document not in added)
    return Knowledge(
        before="the base model" if is_base else f"version {before}",
        won=won,
        lost=[answer for answer in answers if answer.is_lost],
        is_gain=len(facts) > 0 and interval(gains, np.ones(len(gains)), facts).low > 0,
        shares=exam_shares(evaluation.stats, role),
        gains=_gains(evaluation, role, metric),
        unit=metric.unit,
    )


class NewText(NamedTuple):
    """Documents that only the newer of two versions has read."""

    documents: Sequence[tuple[Exposure, str]] = ()
    """The first MOST_SHOWN, with how they begin."""
    total: int = 0
    is_partial: bool = False
    """Whether there may be more."""


def find_new_text(board: Board, state: RegistryState, version: ModelVersion) -> NewText:
    """Documents that a version was trained on and the one before was not, added text first.

    They are counted among the first MOST_LOOKED_AT of its text.
    """
    clean = find_behind(board.store, version, "clean_corpus")
    previous = _version_before(state, version)
    if clean is None or previous is None:
        return NewText()
    past = find_behind(board.store, previous, "clean_corpus")
    runs, older = (runs_behind(board.store, state, entry) for entry in (version, previous))

    # The numbers of the versions are only part of the key by which `remember` keeps the result.
    def find(clean: Artifact, *_: int) -> NewText:
        columns, is_train = ["id", "source", "split", "text_hash"], pc.field("split") == "train"
        parts = open_parts([clean.url], columns)
        rows = parts.scanner(columns, is_train).head(MOST_LOOKED_AT).to_pylist()
        trained_on = [exposure for exposure in exposures(runs, rows) if exposure.lessons]
        unseen = [exposure for exposure in trained_on if exposure.lessons[0].run not in older]
        if past:
            added = _added(past, {exposure.document for exposure in unseen})
            unseen.sort(key=lambda entry: entry.document not in added)
        texts = read_texts(clean.url, [exposure.document for exposure in unseen[:MOST_SHOWN]])
        beginnings = {
            name: shorten(text[: 2 * BEGINNING], BEGINNING, placeholder=" …")
            for name, text in texts.items()
        }
        shown = [
            (exposure, beginnings.get(exposure.document, "")) for exposure in unseen[:MOST_SHOWN]
        ]
        return NewText(shown, len(unseen), len(rows) == MOST_LOOKED_AT)

    return board.remember(find, [clean], version.version, previous.version)


def _added(past: Artifact, documents: set[str]) -> set[str]:
    """Of documents, those that an earlier text did not have."""
    ids = pa.array(sorted(documents), pa.string())
    present = open_parts([past.url], ["id"]).to_table(filter=pc.field("id").isin(ids))
    return documents - set(present["id"].to_pylist())


def _version_before(state: RegistryState, version: ModelVersion) -> ModelVersion | None:
    """The one that it was measured against in its own evaluation, which is what is shown of it."""
    # Not a later verdict: it may have been judged again, as against the target of a rollback.
    incumbent = version.evaluation.get("models", {}).get("incumbent")
    references = [verdict.against for verdict in state.verdicts_of(version.weights)]
    return state.find_model(incumbent or (references or [None])[-1] or "")


def _gains(evaluation: Artifact, role: str, metric: Metric) -> list[DocumentGain]:
    earlier, later = (read_scores(evaluation, model) for model in (role, "candidate"))
    sign = 1 if metric.higher_is_better else -1
    gains = (
        DocumentGain(sign * (later[name].value - before.value), name, before, later[name])
        for name, before in earlier.items()
        if name in later
    )
    return sorted(gains, reverse=True)


def read_scores(evaluation: Artifact, role: str) -> dict[str, SizedScore]:
    """The scores of each held-out document, of those that have one."""
    columns = ["document", "source", f"score_{role}", "size"]
    held_out = [("task", "=", "held_out")]
    scores = pq.read_table(evaluation.path / SCORES_NAME, columns=columns, filters=held_out)
    rows = zip(*(scores[name].to_pylist() for name in columns), strict=True)
    return {name: SizedScore(*row) for name, *row in rows if row[1] is not None and row[2]}
