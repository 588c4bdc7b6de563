"""The first page: what the model knows now that it did not know before, and what goes on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from artifacts.shards.shard_set import text_numbers
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Store, layout
from llm_assets.board.pages import Board, page
from llm_assets.exam.answers import AnswerPair, exam_shares, read_answers
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.passages import Exposure, exposures
from llm_assets.tracing.training_text import TrainingRun, runs_behind
from recipes.data.records import read_trained, texts_of
from recipes.evaluation.settings import SCORES_NAME, Metric
from recipes.spec import describe_progress, read_metrics
from spark_jobs.runtime.parquet import open_parts

MOST_SHOWN = 8
MOST_LOOKED_AT = 2_000
"""Documents of the text, when those are looked for that were read since."""


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
        learned = find_learned(board.store, state, champion) if champion else None
        won = learned.won if learned else []
        return page(
            board,
            request,
            "now.html",
            state=state,
            champion=champion,
            chosen=wanted[-1] if wanted else None,
            served_since=moves[-1].at if moves else None,
            learned=learned,
            # An exam says what was learned from which document.
            read=find_new_text(board.store, state, champion) if champion and not won else ([], 0),
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
    against = _version_before(state, version)
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


def find_new_text(
    store: Store, state: RegistryState, version: ModelVersion
) -> tuple[list[Exposure], int]:
    """Documents that a version was trained on and the one before was not, and how many.

    The first MOST_SHOWN, counted among the first MOST_LOOKED_AT of its text.
    """
    clean = store.find_named("clean_corpus", version.lineage.get("clean_corpus", ""))
    before = _version_before(state, version)
    if clean is None or before is None:
        return [], 0
    columns, is_train = ["id", "source", "split", "text_hash"], pc.field("split") == "train"
    rows = open_parts([clean.url], columns).head(MOST_LOOKED_AT, filter=is_train).to_pylist()
    known = {run.checkpoint for run in runs_behind(store, state, before)}
    runs = runs_behind(store, state, version)
    own = [run for run in runs if run.checkpoint not in known]
    older = [run for run in runs if run.checkpoint in known]
    texts = text_numbers([row["text_hash"] for row in rows])
    is_new = _are_read(own, texts) & ~_are_read(older, texts)
    new = [row for row, is_one in zip(rows, is_new, strict=True) if is_one]
    return exposures(own, new[:MOST_SHOWN]), len(new)


def _are_read(runs: Sequence[TrainingRun], texts: np.ndarray) -> np.ndarray:
    """Shape (texts,): whether any run was trained on each."""
    wanted = np.sort(texts)
    read = [texts_of(read_trained(run.record, wanted)) for run in runs if run.record]
    return np.isin(texts, np.concatenate([*read, np.array([], np.uint64)]))


def _version_before(state: RegistryState, version: ModelVersion) -> ModelVersion | None:
    """The one that it was judged against."""
    verdicts = state.verdicts_of(version.weights)
    return state.find_model(verdicts[-1].against or "") if verdicts else None


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
