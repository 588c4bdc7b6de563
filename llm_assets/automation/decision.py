"""Decides whether to train on the source text now; nothing else decides that.

The question is what the text is at one tick, and how much of it is new. Only the time since which
the text is unchanged is remembered: the registry tells what the endpoint reflects, and Dagster's
runs what was tried. So a daemon may be killed at any point and continues where it was.
"""

import io
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from textwrap import shorten
from typing import Any

import dagster as dg
import numpy as np

from artifacts.progress import counted
from artifacts.shards.shard_set import text_numbers
from artifacts.storage import files
from artifacts.store.identity import hash_json
from artifacts.store.store import Store, layout
from llm_assets.automation.launched import QUESTION_TAG, Runs, why_failed
from llm_assets.gate.verdict import Outcome
from llm_assets.operation_settings import WHOLE_TEXT, AutomationSettings
from llm_assets.registry.state import GATE, ModelVersion, RegistryState
from spark_jobs.read.opened import OpenedSource
from spark_jobs.read.snapshot import fingerprints_of


@dataclass(frozen=True)
class TextSnapshot:
    fingerprints: dict[str, str]
    """Source to a hash of its content, as the raw corpus names its inputs."""
    sizes: dict[str, int] = field(repr=False)
    """Digest of each file to its bytes; sources without files are not in here."""
    is_all_files: bool
    """Whether every source is made of files."""

    @property
    def name(self) -> str:
        """A short name of just this text: the hash of a raw corpus's inputs."""
        return hash_json(self.fingerprints)


def text_of(opened: Mapping[str, OpenedSource]) -> TextSnapshot:
    sizes: dict[str, int] = {}
    for source in opened.values():
        sizes.update(source.sizes)
    return TextSnapshot(fingerprints_of(opened), sizes, all(one.sizes for one in opened.values()))


class Surveys:
    """The files that a pipeline's texts consisted of, to measure how much has changed since."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._folder = layout.automation(pipeline)

    def write(self, text: TextSnapshot) -> None:
        """Record the files of a text; those of earlier texts are recorded already."""
        buffer = io.BytesIO()
        # A pickle could run code of whoever may write to the store.
        np.save(buffer, _as_array(text), allow_pickle=False)
        self._store.write_bytes(f"{self._folder}/{text.name}.npy", buffer.getvalue())

    def keep(self, names: Container[str]) -> None:
        """Remove the records of other texts: no question refers to them any more."""
        for file in self._store.list_folder(self._folder):
            name, _, ending = file.partition(".")
            # The folder also holds `told.json` and, with a dot first, what is being written.
            if name and ending == "npy" and name not in names:
                files.remove(f"{self._store.root}/{self._folder}/{file}")

    def changed_bytes(self, text: TextSnapshot, before: str | None) -> int | None:
        """Bytes of files added or removed since the text of this name; None if they are unknown."""
        content = self._store.read_bytes(f"{self._folder}/{before}.npy") if before else None
        try:
            # Where there is no record, numpy gets an empty one, which fails as a damaged one does.
            earlier = np.load(io.BytesIO(content or b""), allow_pickle=False)
        except (ValueError, EOFError):
            return None
        now = _as_array(text)
        came = now[~np.isin(now["digest"], earlier["digest"])]
        went = earlier[~np.isin(earlier["digest"], now["digest"])]
        return int(came["size"].sum() + went["size"].sum())


def _as_array(text: TextSnapshot) -> np.ndarray:
    table = np.empty(len(text.sizes), [("digest", np.uint64), ("size", np.int64)])
    table["digest"] = text_numbers(list(text.sizes))
    table["size"] = list(text.sizes.values())
    return table


MORE_MAY_HELP = {Outcome.NOT_BETTER, Outcome.TIE}
"""Reasons of the gate's that longer training can remove."""
MOST_TOLD = 500
"""Characters of the reason why a run failed."""
ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


@dataclass(frozen=True)
class Wait:
    """Nothing is to be launched, and why."""

    reason: str
    is_alarm: bool = False
    """Whether it stays so until a person does something."""


@dataclass(frozen=True)
class TextQuestion:
    """What a text asks: is a model trained on it better than the wanted one?"""

    text: str
    """The text's name."""
    against: int | None
    """The wanted version; None before anything is registered."""
    longer: int = 1
    """Multiplier of the usual training length."""
    is_unread: bool = False
    """Whether the wanted version has read too little of its own text, which may be this one."""

    @property
    def name(self) -> str:
        """One line that says it all, for a run's tag."""
        return f"{self.text}-{self.against}-{self.longer}"


def ask(
    text: str, state: RegistryState, versions: Sequence[ModelVersion], settings: AutomationSettings
) -> TextQuestion | Wait:
    """The question that a text asks now, or why it asks none.

    Args:
        text: the name of the text.
        versions: those that were trained on just this text, oldest first.
    """
    wanted = state.find("wanted")
    if wanted is None:
        return TextQuestion(text, None)
    coverage = 1.0 if wanted.coverage is None else wanted.coverage
    is_unread = coverage < settings.least_coverage
    if not versions:
        # Otherwise each small change would try again what the gate found to add nothing.
        was_tried = any(one.against == wanted.weights for one in state.verdicts)
        return TextQuestion(text, wanted.version, is_unread=is_unread and not was_tried)
    knows_text = any(entry.version == wanted.version for entry in versions)
    if knows_text and not is_unread:
        told = f"Version {wanted.version}, which is wanted, knows this text"
        if coverage >= WHOLE_TEXT:
            return Wait(f"{told}.")
        return Wait(f"{told}; it has read {coverage:.1%} of it (`automation.least_coverage`).")
    newest = versions[-1]
    if state.is_rejected(newest.weights):
        last = state.decisions_of(newest.weights)[-1]
        return Wait(
            f"{last.name} rejected version {newest.version}, which knows this text: {last.reason}"
        )
    last_move = [move for move in state.history if move.alias == "wanted"][-1]
    # Also one before the newest, where that one was read on from it and never wanted.
    set_aside = [
        entry.version
        for entry in versions
        if (entry == newest or entry.version > wanted.version)
        and entry.version != wanted.version
        and state.was_wanted(entry.version)
    ]
    # Training on this text would make again what a person took out of service, so it waits for
    # another text.
    if set_aside and last_move.by != GATE:
        return Wait(
            f"{last_move.by} took version {set_aside[-1]}, which knows this text, out of service: "
            f"{last_move.reason}"
        )
    # Of a model that was evaluated again, the last word counts.
    latest = [
        verdicts[-1]
        for version in versions
        if (verdicts := state.verdicts_of(version.weights, wanted.weights))
    ]
    # Only a training that continues from the champion is longer the second time.
    is_longer = settings.continue_from_champion and len(latest) <= settings.longer_attempts
    if latest and not (is_longer and {one.outcome for one in latest[-1].reasons} <= MORE_MAY_HELP):
        advice = "Training again as `checkpoint` says would make the same model. "
        return Wait(
            f"The gate rejected {counted(len(latest), 'candidate')} trained on this "
            f"text; version {wanted.version} stays until there is more text, or a person approves "
            "another. "
            f"{'' if settings.continue_from_champion else advice}{latest[-1].summary}",
            # That the rest of a text adds nothing is no reason to call somebody.
            is_alarm=not knows_text,
        )
    # Each rejected candidate doubles the length of the next training.
    return TextQuestion(text, wanted.version, 2 ** len(latest), is_unread=is_unread)


def run_key(question: TextQuestion, runs: Runs, now: datetime) -> str | Wait:
    """The key of the run to launch for a question, by the runs that were launched for it before.

    It is the same for every tick that decides on this launch.
    """
    settings, launched = runs.settings.automation, runs.launched_for(question.name)
    ordered = sorted(launched, key=lambda run: run.create_timestamp)
    # Also one that somebody launched again in the UI, which has the same tag.
    if going := [run for run in ordered if run.dagster_run.status not in ENDED]:
        return Wait(f"Run {_short(going[0])} is under way for this.")
    tries = len(ordered)
    if not ordered:
        return f"{question.name}-0"
    last = ordered[-1]
    # The last run's id, not a count: a count falls when somebody deletes a run, and Dagster never
    # launches a key twice.
    key = f"{question.name}-{last.dagster_run.run_id}"
    # Whoever cancels a run does not want this training, so it waits for another text.
    if last.dagster_run.status is dg.DagsterRunStatus.CANCELED:
        return Wait(f"Run {_short(last)} for this was canceled: not launched again.", is_alarm=True)
    reason = why_failed(runs.instance, last.dagster_run.run_id)
    # A line of `llm-assets status`; what Spark and torch raise may have hundreds.
    why = f" It failed: {shorten(reason, MOST_TOLD, placeholder=' …')}" if reason else ""
    if tries > settings.retries:
        return Wait(
            f"{tries} runs did not resolve this; the last is {_short(last)}. Fix what its log "
            f"reports, then materialize the graph in the UI.{why}",
            is_alarm=True,
        )
    pause = timedelta(minutes=settings.retry_minutes * 2 ** (tries - 1))
    due = datetime.fromtimestamp(last.end_time or 0, now.tzinfo) + pause
    # If the clock was put back, the pause would never end.
    if now < due and due - now <= pause:
        return Wait(
            f"Run {_short(last)} did not resolve this; the next try is at {due:%H:%M:%S %Z}.{why}"
        )
    return key


def request_run(
    question: TextQuestion,
    runs: Runs,
    now: datetime,
    launched_by: str,
    run_config: dict[str, Any] | None = None,
    is_limited: bool = True,
    busy: Sequence[dg.DagsterRun] | None = None,
) -> dg.RunRequest | Wait:
    """The run that is to answer a question now, or why none is launched.

    Args:
        is_limited: whether blackout windows and the month's budget hold it back.
        busy: the runs under way that do; unless given, all of the pipeline's.
    """
    key = run_key(question, runs, now)
    if isinstance(key, Wait):
        return key
    # It does not matter who launched it: its model may become the wanted version, against which the
    # question is asked.
    if busy := runs.unfinished() if busy is None else busy:
        return Wait(f"Run {busy[0].run_id[:8]} ({busy[0].job_name}) is under way; waiting for it.")
    # The budget first: reported after a blackout, it would be told again after each of them.
    if is_limited and (reason := runs.budget_spent(now)):
        return Wait(reason, is_alarm=True)
    if is_limited and (reason := runs.blackout(now)):
        return Wait(reason)
    tags = runs.tags(launched_by) | {QUESTION_TAG: question.name}
    return dg.RunRequest(run_key=key, run_config=run_config, tags=tags)


def _short(run: dg.RunRecord) -> str:
    return run.dagster_run.run_id[:8]
