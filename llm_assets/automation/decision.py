"""Whether the source text is to be trained on now; the one place where that is decided.

Nothing is remembered but the time since which the text is as it is: what the endpoint reflects is
told by the registry, what was tried by Dagster's runs. So a daemon that is killed anywhere goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from dagster import DagsterRunStatus, RunRecord

from llm_assets.automation.launched import Runs
from llm_assets.automation_settings import AutomationSettings
from llm_assets.gate.verdict import Outcome, Verdict
from llm_assets.registry.records import GATE, ModelVersion
from llm_assets.registry.state import RegistryState

MORE_MAY_HELP = {Outcome.NOT_BETTER, Outcome.TIE}
"""Reasons of the gate's that longer training can remove."""
ENDED = (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED)


@dataclass(frozen=True)
class Launch:
    """A run is to be launched."""

    key: str
    """Of one launch: the same for every tick that decides on it."""
    question: str
    """What the run is to answer: this text, against this model, this much training."""
    longer: int
    """Times the usual training."""


@dataclass(frozen=True)
class Wait:
    """Nothing is to be launched, and why."""

    reason: str
    is_alarm: bool = False
    """Whether it stays so until a person does something."""


@dataclass(frozen=True)
class Question:
    """What a text asks: is a model that knows it better than the one that is wanted?"""

    text: str
    """The text's name."""
    against: int | None
    """The wanted version; None before anything is registered."""
    longer: int = 1
    """Times the usual training."""

    @property
    def name(self) -> str:
        """One line that says it all, for a run's tag."""
        return f"{self.text}-{self.against}-{self.longer}"


def ask(
    text: str,
    state: RegistryState,
    versions: Sequence[ModelVersion],
    settings: AutomationSettings,
) -> Question | Wait:
    """The question that a text asks now, or why it asks none.

    Args:
        text: the name of the text.
        versions: those that were trained on just this text, oldest first.
    """
    wanted = state.find("wanted")
    if wanted is None or not versions:
        return Question(text, wanted.version if wanted else None)
    for version in versions:
        if version.version == wanted.version:
            return Wait(f"Version {wanted.version}, which is wanted, knows this text.")
    newest = versions[-1]
    if state.is_rejected(newest.weights):
        said = state.decisions_of(newest.weights)[-1]
        return Wait(
            f"{said.name} rejected version {newest.version}, which knows this text: {said.reason}"
        )
    moved = [move for move in state.history if move.alias == "wanted"][-1]
    if state.was_wanted(newest.version) and moved.by != GATE:
        return Wait(
            f"{moved.by} took version {newest.version}, which knows this text, out of service: "
            f"{moved.reason}"
        )
    judged = [
        verdict
        for version in versions
        for verdict in state.verdicts_of(version.weights)
        if verdict.against == wanted.weights
    ]
    if judged and not _is_worth_more(judged, settings):
        return Wait(
            f"The gate rejected {len(judged)} of the models that know this text; version "
            f"{wanted.version} stays until there is more text, or a person approves one. "
            f"{judged[-1].summary}",
            is_alarm=True,
        )
    return Question(text, wanted.version, 2 ** len(judged))


def _is_worth_more(judged: Sequence[Verdict], settings: AutomationSettings) -> bool:
    reasons = {reason.outcome for reason in judged[-1].reasons}
    return len(judged) <= settings.longer_attempts and reasons <= MORE_MAY_HELP


def answer(
    question: Question,
    runs: Sequence[RunRecord],
    settings: AutomationSettings,
    now: datetime,
) -> Launch | Wait:
    """Whether to launch a run for a question, by the runs that were launched for it before.

    Args:
        runs: those, in any order.
    """
    ordered = sorted(runs, key=lambda run: run.create_timestamp)
    for run in ordered:
        if run.dagster_run.status not in ENDED:
            return Wait(f"Run {_short(run)} is under way for it.")
    tries = len(ordered)
    launch = Launch(f"{question.name}-{tries}", question.name, question.longer)
    if not ordered:
        return launch
    last = ordered[-1]
    if last.dagster_run.status is DagsterRunStatus.CANCELED:
        return Wait(f"Run {_short(last)} for it was canceled: not launched again.", is_alarm=True)
    if tries > settings.retries:
        return Wait(
            f"{tries} runs for it ended without a model; the last is {_short(last)}. Mend what its "
            "log says, then materialize the graph in the UI.",
            is_alarm=True,
        )
    pause = timedelta(minutes=settings.retry_minutes * 2 ** (tries - 1))
    due = datetime.fromtimestamp(last.end_time or 0, now.tzinfo) + pause
    if now < due and due - now <= pause:
        return Wait(f"Run {_short(last)} for it failed; the next try is at {due:%H:%M:%S %Z}.")
    return launch


def launch_or_wait(
    question: Question, runs: Runs, settings: AutomationSettings, now: datetime
) -> Launch | Wait:
    """As `answer`; besides, any other run of the pipeline is waited for."""
    launch = answer(question, runs.asking(question.name), settings, now)
    if isinstance(launch, Launch) and (busy := runs.unfinished()):
        return Wait(f"Run {busy[0].run_id[:8]} ({busy[0].job_name}) is under way; waiting for it.")
    return launch


def _short(run: RunRecord) -> str:
    return run.dagster_run.run_id[:8]
