"""The first page: what the model knows now that it did not know before, and what goes on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow.parquet as pq
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Store, layout
from llm_assets.board.pages import Board, page
from llm_assets.exam.answers import AnswerPair, exam_shares, read_answers
from llm_assets.registry.state import ModelVersion, RegistryState
from recipes.evaluation.settings import SCORES_NAME, Metric
from recipes.spec import describe_progress, read_metrics

MOST_SHOWN = 8


@dataclass(frozen=True)
class DocumentGain:
    """A held-out document that the model reads better, or worse, than the one before."""

    document: str
    source: str
    before: float
    after: float
    """In the unit of the recipe's metric."""
    gain: float


@dataclass(frozen=True)
class Knowledge:
    """What a version can that the one before it could not."""

    before: str
    """The other one: `the base model` or `version 3`."""
    won: list[AnswerPair]
    lost: list[AnswerPair]
    shares: list[tuple[str, float | None, float | None]]
    """Condition of the exam, and the shares of right answers before and after."""
    gains: list[DocumentGain]
    """Best first; of text that neither was trained on."""
    unit: str
    figures: Mapping[str, float | None]
    """The metric on held-out text before and after."""


def routes(board: Board) -> list[Route]:
    """The page at `/`."""

    def show(request: Request) -> Response:
        state = board.registry.state()
        champion = state.find("champion")
        moves = [one for one in state.history if champion and one.version == champion.version]
        wanted = [move for move in moves if move.alias == "wanted"]
        return page(
            board,
            request,
            "now.html",
            state=state,
            champion=champion,
            chosen=wanted[-1] if wanted else None,
            served_since=moves[-1].at if moves else None,
            learned=find_learned(board.store, state, champion) if champion else None,
            now=board.status(),
            making=list(_making(board.store)),
            most=MOST_SHOWN,
        )

    return [Route("/", show)]


def find_learned(store: Store, state: RegistryState, version: ModelVersion) -> Knowledge | None:
    """By the version's own evaluation; None where that is gone, or there never was one."""
    evaluation = store.find_named("eval_metrics", version.lineage.get("eval_metrics", ""))
    if evaluation is None:
        return None
    verdicts = state.verdicts_of(version.weights)
    against = state.find_model(verdicts[-1].against or "") if verdicts else None
    metric = Metric.model_validate(evaluation.stats["metric"])
    measured = evaluation.stats["metrics"].get(f"held_out_{metric.name}", {})
    role = "incumbent" if "incumbent" in measured else "base"
    answers = read_answers(evaluation, role)
    is_base = role == "base" or against is None or against.is_base
    return Knowledge(
        before="the base model" if is_base or against is None else f"version {against.version}",
        won=[one for one in answers if one.is_won],
        lost=[one for one in answers if one.is_lost],
        shares=exam_shares(evaluation.stats, role),
        gains=_gains(evaluation, role, metric),
        unit=metric.unit,
        figures={
            "before": measured.get(role, {}).get("value"),
            "after": measured.get("candidate", {}).get("value"),
        },
    )


def _gains(evaluation: Artifact, role: str, metric: Metric) -> list[DocumentGain]:
    scores = pq.read_table(evaluation.path / SCORES_NAME, filters=[("task", "=", "held_out")])
    sign = 1 if metric.higher_is_better else -1
    found = []
    for row in scores.to_pylist():
        before, after = (row.get(f"score_{one}") for one in (role, "candidate"))
        if before is None or after is None or not row["size"]:
            continue
        values = before / row["size"], after / row["size"]
        gain = sign * (values[1] - values[0])
        found.append(DocumentGain(row["document"], row["source"], *values, gain))
    return sorted(found, key=lambda one: -one.gain)


def _making(store: Store) -> Iterator[tuple[Identity, str]]:
    """What is being made, and how far a training is."""
    for identity in store.in_the_making():
        run = f"{store.root}/{layout.run(identity.fingerprint)}"
        lines = read_metrics(run) if identity.kind == "checkpoint" else []
        # A line of an older version does not say how many steps there are.
        yield identity, describe_progress(lines) if lines and "steps" in lines[-1] else ""
