"""The versions through time, one of them, and two compared."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from artifacts.progress import format_duration
from artifacts.store.store import Artifact, Store
from llm_assets.board.now import SizedScore, find_learned, read_scores
from llm_assets.board.pages import Board, find_behind, number, page_at
from llm_assets.exam.questions import AnswerPair, read_answers
from llm_assets.gate.verdict import Comparison
from llm_assets.registry.card import (
    describe_cost,
    describe_coverage,
    page_path,
    tell_story,
    training_cost,
)
from llm_assets.registry.start import find_manifest
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.explain import ORDER, explain, listed
from recipes.evaluation.exam import CLOSED_BOOK
from recipes.evaluation.settings import Metric
from recipes.spec import read_metrics

MOST_ON_PAGE = 50
MOST_POINTS = 200
"""Of a curve."""
ASKED = ("question", "value")
"""What identifies a question. If one of these was edited, as when a fact changes, another question
was asked. The wrong choices are not included: they change with each new fact."""
PAGE_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
"""For a version's own page, which contains its style and needs nothing else."""


@dataclass(frozen=True)
class VersionRow:
    """A version in the list."""

    version: ModelVersion
    aliases: list[str]
    outcome: str
    """Who decided, and how."""
    interval: Comparison | None
    """Against the champion of that day; None for a base model."""
    trained_on: str
    """How much of the text, and what it cost where that is on record."""


def routes(board: Board) -> list[Route]:
    """The pages below `/versions`."""

    def show_all(request: Request) -> dict[str, Any]:
        state = board.registry.state()
        newest = state.versions[::-1]
        first = number(request, "from", 0)
        rows = [
            describe_version(board, state, version) for version in newest[first:][:MOST_ON_PAGE]
        ]
        return {
            "rows": rows,
            "scale": _scale(rows),
            "first": first,
            "count": len(newest),
            "page_size": MOST_ON_PAGE,
        }

    def show_one(request: Request) -> dict[str, Any]:
        state = board.registry.state()
        version = state.get(request.path_params["version"])
        older = [entry.version for entry in state.versions if entry.version < version.version]
        return {
            "row": describe_version(board, state, version),
            "story": tell_story(state, version),
            "before": max(older, default=version.version),
            "learned": find_learned(board, state, version),
            "has_page": board.store.read_bytes(page_path(board.settings.name, version.version)),
            "provenance": explain(board.store, state, version),
        }

    def show_own_page(request: Request) -> Response:
        path = page_path(board.settings.name, request.path_params["version"])
        content = board.store.read_bytes(path)
        if content is None:
            raise HTTPException(
                404,
                "There is no page of this version: a base model has none, and forgetting text "
                "removes those of other versions",
            )
        return HTMLResponse(content, headers={"Content-Security-Policy": PAGE_POLICY})

    def compare(request: Request) -> dict[str, Any]:
        state = board.registry.state()
        newest = state.versions[-1].version if state.versions else 0
        pair = [state.get(number(request, name, newest)) for name in ("a", "b")]
        rows = [describe_version(board, state, version) for version in pair]
        return {"pair": rows} | _compared(board.store, *pair)

    return [
        page_at("/versions", board, "versions.html", show_all),
        page_at("/versions/compare", board, "compare.html", compare),
        page_at("/versions/{version:int}", board, "version.html", show_one),
        Route("/versions/{version:int}/page", show_own_page),
    ]


def describe_version(board: Board, state: RegistryState, version: ModelVersion) -> VersionRow:
    """A version as the list shows it."""
    verdicts = state.verdicts_of(version.weights)
    decisions = state.decisions_of(version.weights)
    if decisions:
        outcome = f"{'approved' if decisions[-1].approved else 'rejected'} by {decisions[-1].name}"
    elif verdicts:
        outcome = f"{'promoted' if verdicts[-1].promoted else 'rejected'} by the gate"
        if not verdicts[-1].promoted and state.was_wanted(version.version):
            outcome = "promoted by the gate, which rejected it when it was judged again"
    else:
        outcome = "the base model" if version.is_base else "not judged"
    reference = state.find_model(verdicts[-1].against or "") if verdicts else None
    comparisons = verdicts[-1].comparisons if verdicts else []
    if reference:
        outcome += f"; the gate compared it with version {reference.version}"
    if version.dollars is None:
        cost = _own_cost(board.store, version, board.settings.automation.cost_per_hour)
    else:
        cost = describe_cost(version)
    return VersionRow(
        version,
        [str(alias) for alias in state.aliases_of(version.version)],
        outcome,
        # What decided comes first.
        comparisons[0] if comparisons else None,
        "; ".join(filter(None, [describe_coverage(version), cost])),
    )


def _own_cost(store: Store, version: ModelVersion, cost_per_hour: float | None) -> str:
    """What its training took on one's own machine; empty if that is not on record."""
    manifest = find_manifest(store, "checkpoint", version.lineage.get("checkpoint", ""))
    cost = training_cost(manifest.stats, cost_per_hour) if manifest else {}
    if not cost:
        return ""
    duration = f"trained for {format_duration(cost['training_seconds'])}"
    if cost_per_hour is None:
        return duration
    return f"{duration}, which cost {cost['cost']:,.2f} at {cost_per_hour:g} per hour"


def _scale(rows: list[VersionRow]) -> float:
    """The value at the ends of the drawn lines: the few rows with larger ones are cut."""
    gains = (row.interval for row in rows if row.interval)
    bounds = ((gain.surest_gain, gain.largest_gain, gain.gain) for gain in gains)
    largest = sorted(max(abs(bound or 0) for bound in ends) for ends in bounds)
    return (largest[len(largest) * 3 // 4] or largest[-1] or 1.0) if largest else 1.0


def _compared(store: Store, one: ModelVersion, other: ModelVersion) -> dict[str, Any]:
    """What was measured of both: by source, by relation, examples won and lost, and settings."""
    places = _measured(store, one, other), _measured(store, other, one)
    scores = [read_scores(*place) if place else {} for place in places]
    # With different metrics, as after a change of the recipe, figures do not belong in one table.
    metrics = {Metric.model_validate(place[0].stats["metric"]) for place in places if place}
    shared = sorted(scores[0].keys() & scores[1].keys()) if len(metrics) == 1 else []
    answers = [_closed_book(*place) if place else {} for place in places]
    pairs = [
        (answers[0][name], pair) for name, pair in sorted(answers[1].items()) if name in answers[0]
    ]
    same_questions = [
        # Each version's answers were read as both sides of a pair; the first version's become the
        # earlier.
        replace(pair, before=before.after, said_before=before.said_after)
        for before, pair in pairs
        if all(before.question[part] == pair.question[part] for part in ASKED)
    ]
    return {
        "unit": next((metric.unit for metric in metrics), ""),
        "sources": _figures((scores[0][name], scores[1][name]) for name in shared),
        "relations": _figures(
            (SizedScore(pair.relation, pair.before, 1), SizedScore(pair.relation, pair.after, 1))
            for pair in same_questions
        ),
        "asked_otherwise": len(pairs) - len(same_questions),
        "won": [pair for pair in same_questions if pair.is_won],
        "lost": [pair for pair in same_questions if pair.is_lost],
        "losses": [_losses(store, version) for version in (one, other)],
        "settings": list(_differences(store, one, other)),
    }


def _measured(
    store: Store, version: ModelVersion, other: ModelVersion
) -> tuple[Artifact, str] | None:
    """The evaluation and the version's role in it: a base model is in that of its descendant."""
    own = find_behind(store, version, "eval_metrics")
    if own:
        return own, "candidate"
    if not version.is_base or other.lineage.get("base_model") != version.model_fingerprint:
        return None
    descendants = find_behind(store, other, "eval_metrics")
    return (descendants, "base") if descendants else None


def _losses(store: Store, version: ModelVersion) -> list[tuple[float, float]]:
    """Step and training loss, a mean over a stretch of steps where there are many."""
    checkpoint = find_behind(store, version, "checkpoint")
    lines = read_metrics(checkpoint.url) if checkpoint else []
    losses = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
    finite = [point for point in losses if math.isfinite(point[1])]
    width = math.ceil(len(finite) / MOST_POINTS) or 1
    stretches = (finite[start : start + width] for start in range(0, len(finite), width))
    return [(stretch[-1][0], fmean(loss for _, loss in stretch)) for stretch in stretches]


def _figures(pairs: Iterable[tuple[SizedScore, SizedScore]]) -> dict[str, tuple[float, float, int]]:
    """Group to the figures of both sides, and of how many."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4))
    counts: Counter[str] = Counter()
    for one, two in pairs:
        sums[one.group] += (one.score, one.size, two.score, two.size)
        counts[one.group] += 1
    return {name: (a / b, c / d, counts[name]) for name, (a, b, c, d) in sums.items()}


def _closed_book(evaluation: Artifact, role: str) -> dict[str, AnswerPair]:
    answers = read_answers(evaluation, role, role)
    return {str(answer.question["id"]): answer for answer in answers if answer.task == CLOSED_BOOK}


def _differences(
    store: Store, one: ModelVersion, other: ModelVersion
) -> Iterator[tuple[str, str, str]]:
    """Settings of the stages behind two versions that are not the same: name and both values."""
    for kind in [*ORDER, *sorted({*one.lineage, *other.lineage} - set(ORDER))]:
        manifests = [
            find_manifest(store, kind, version.lineage.get(kind, "")) for version in (one, other)
        ]
        sides = [dict(listed(manifest.settings if manifest else {})) for manifest in manifests]
        # A base model has only the stage that made it: nothing to compare.
        for name in sorted({*sides[0], *sides[1]}) if all(sides) else ():
            first, second = (side.get(name, "-") for side in sides)
            if first != second:
                yield f"{kind}.{name}", first, second
