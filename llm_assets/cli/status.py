"""`llm-assets status`: what serves, runs and waits, and what a person has to do about it."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

from rich.filesize import decimal

from artifacts.errors import DamagedArtifact, materialize_command
from artifacts.reasons import reason_of
from artifacts.store.store import Store, layout
from llm_assets.cli.session import Session
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_status, why_unable
from llm_assets.history import Activity, dagster_home, read_activity
from llm_assets.registry.state import RegistryState
from llm_assets.services import STATE_FOLDER, read_states

# The thresholds of alerts.yml, so that both warn of the same.
LEAST_FREE_BYTES = 10e9
MOST_SILENT_SECONDS = 300.0
MOST_FAILED = 3
"""Runs within a day."""
NEARLY_SPENT = 0.9
"""Of the month's budget."""


@dataclass(frozen=True)
class Alarm:
    alert: str
    """Its name in alerts.yml."""
    text: str
    remedy: str
    """What to do, with commands and settings in backticks."""

    def __str__(self) -> str:
        return f"{self.text} What to do: {self.remedy}"


def find_alarms(
    settings: PipelineSettings, store: Store, activity: Activity, is_up: bool
) -> Iterator[Alarm]:
    """What is wrong by now: the alerts of infrastructure/prometheus/alerts.yml that can be told
    without Prometheus, with the remedies of docs/operations.md.

    Args:
        activity: of this folder's history.
        is_up: whether the services are to run.
    """
    now = datetime.now(UTC)
    if activity.fault:
        yield Alarm("StateUnreadable", activity.fault, "follow it, then `llm-assets doctor`")
    # Where the services are down on purpose, silence is no fault.
    if is_up and activity.heartbeat:
        silent = (now - activity.heartbeat).total_seconds()
        if silent > MOST_SILENT_SECONDS:
            text = f"The daemon has sent no heartbeat for {silent / 60:,.0f} minutes."
            remedy = "read `.llm_assets/services/daemon.log`; `llm-assets down`, then `up`"
            yield Alarm("DaemonSilent", text, remedy)
    if activity.failed > MOST_FAILED:
        text = f"{activity.failed:,} runs failed within a day."
        remedy = "the last run's log gives the reason; fix it and run `llm-assets run`"
        yield Alarm("RunsFail", text, remedy)
    hours = settings.automation.hours
    # A history that cannot be read tells no hours either, and its own alarm comes first.
    if hours is not None and not activity.fault:
        spent = _spent_hours(settings, now)
        if spent > NEARLY_SPENT * hours:
            text = f"Runs have used {spent:,.1f} of the month's {hours:,.1f} hours."
            limits = "`automation.monthly_hours` or `automation.monthly_cost`"
            remedy = f"raise {limits}, or wait for the next month"
            yield Alarm("BudgetNearlySpent", text, remedy)
    if store.is_local and Path(store.root).exists():
        free = shutil.disk_usage(store.root).free
        if free < LEAST_FREE_BYTES:
            text = f"Only {decimal(free)} are free for the store."
            yield Alarm("DiskNearlyFull", text, "`llm-assets clean --yes`; shorten `retention`")


def _spent_hours(settings: PipelineSettings, now: datetime) -> float:
    """Hours of this month's runs; 0 outside a project."""
    home = dagster_home(Path.cwd())
    if home is None:
        return 0.0
    # Dagster's import takes longer than all else of a command, and few have a budget.
    from dagster import DagsterInstance

    from llm_assets.automation.launched import Runs

    with DagsterInstance.from_config(str(home)) as instance:
        return Runs(instance, settings).spent_hours(now)


MACHINES_SECONDS = 60.0
ASSETS = ("raw_corpus", "clean_corpus", "tokenized_shards", "base_model", "checkpoint")


def status_of(session: Session) -> dict[str, Any]:
    """The pipeline's state, as JSON values.

    Keys: `pipeline`, `platform`, `champion` and `wanted` (version numbers, None before there are
    any), `served` (None if nothing answers, or if Vertex AI serves), `last_verdict` (of the
    gate, with a person's last `decision` on that version), `running`, `making` (each with `asset`,
    `fingerprint` and `progress`), `waiting` (why sensors launch nothing), `services` (name to
    state; None where they are down), `machines` (jobs on Google Cloud with what they cost so far),
    `alarms` (each with `alert`, `text`, `remedy`), `artifacts` (asset to fingerprint and date) and
    `nothing_to_serve` (why the wanted version cannot serve yet; empty where it can).
    """
    state = session.registry.state()
    champion, wanted = state.find("champion"), state.find("wanted")
    history = session.record.history().assets
    activity, states = read_activity(Path.cwd(), session.settings), read_states(STATE_FOLDER)
    services = None if states is None else {service.name: service.state for service in states}
    machines, cloud_alarms = _machines(session.settings)
    endpoint = endpoint_status(session.settings)
    alarms = find_alarms(session.settings, session.record.store, activity, services is not None)
    return {
        "pipeline": session.settings.name,
        "platform": session.settings.platform,
        "champion": champion.version if champion else None,
        "wanted": wanted.version if wanted else None,
        "served": endpoint
        and {
            "url": endpoint.url,
            "phase": endpoint.phase,
            "versions": {one.version: one.share for one in endpoint.routes if one.share > 0},
        },
        "last_verdict": _last_verdict(state),
        "running": list(activity.runs),
        "making": list(_making(session.record.store)),
        "waiting": list(activity.ticks),
        "services": services,
        "machines": machines,
        "alarms": [asdict(alarm) for alarm in (*cloud_alarms, *alarms)],
        "artifacts": {
            asset: {
                "fingerprint": history[asset].current.fingerprint,
                "since": history[asset].current.since.isoformat(timespec="seconds"),
            }
            for asset in ASSETS
            if asset in history
        },
        "nothing_to_serve": (wanted and why_unable(session.settings, session.record, wanted)) or "",
    }


def screen(status: dict[str, Any]) -> list[str]:
    """The same in words, a line each."""
    served = status["served"]
    services = [f"{name} {state}" for name, state in (status["services"] or {}).items()]
    lines = [
        f"pipeline      {status['pipeline']}",
        *(
            f"{alias:<14}" + ("none" if status[alias] is None else f"version {status[alias]}")
            for alias in ("champion", "wanted")
        ),
        f"served        {_describe(served, status['platform'])}",
        *_say_verdict(status["last_verdict"]),
        f"running       {', '.join(status['running']) or 'nothing'}",
        *(f"making        {one['asset']} {one['progress']}".rstrip() for one in status["making"]),
        f"services      {', '.join(services) or 'down; `llm-assets up` starts them'}",
        *(f"waiting       {why}" for why in status["waiting"]),
        *(f"machines      {job}" for job in status["machines"]),
        *(f"alarm         {Alarm(**alarm)}" for alarm in status["alarms"]),
    ]
    # What serves on Vertex AI is not asked here.
    is_known = served or status["platform"] == "local"
    serving = served["versions"] if served else {}
    if is_known and status["wanted"] is not None and str(status["wanted"]) not in serving:
        remedy = "The wanted version is not serving. To serve it: "
        lines.append(status["nothing_to_serve"] or remedy + materialize_command("endpoint"))
    artifacts = status["artifacts"]
    lines += [
        f"{asset:<17} {artifact['since']}  {artifact['fingerprint']}"
        for asset, artifact in artifacts.items()
    ]
    return lines


def _making(store: Store) -> Iterator[dict[str, str]]:
    """What is being made, and how far a training is."""
    for identity in store.in_the_making():
        # Imported here, since it takes longer than the rest of the command.
        from recipes.spec import describe_hardware, describe_progress, read_metrics

        run = f"{store.root}/{layout.run(identity.fingerprint)}"
        try:
            lines = read_metrics(run) if identity.kind == "checkpoint" else []
            told = [describe_progress(lines) if lines else "", describe_hardware(lines)]
        except DamagedArtifact as error:
            # All else is known, and is what somebody asks for whose disk is faulty.
            told = [str(error)]
        yield {
            "asset": identity.kind,
            "fingerprint": identity.fingerprint,
            "progress": ", ".join(filter(None, told)),
        }


def _last_verdict(state: RegistryState) -> dict[str, Any] | None:
    if not state.verdicts:
        return None
    verdict = state.verdicts[-1]
    version = state.find_model(verdict.weights)
    decision = next(iter(state.decisions_of(verdict.weights)[-1:]), None)
    return {
        "version": version.version if version else None,
        "promoted": verdict.promoted,
        "summary": verdict.summary,
        "at": verdict.at.isoformat(timespec="seconds"),
        "decision": decision and decision.model_dump(mode="json", exclude={"weights"}),
    }


def _machines(settings: PipelineSettings) -> tuple[list[str], list[Alarm]]:
    """The jobs of a pipeline with work on Google Cloud, and alarms if they cannot be listed."""
    if not settings.uses_cloud:
        return [], []
    try:
        machines, faults = _listed_machines(int(monotonic() / MACHINES_SECONDS))
    except Exception as error:  # Whatever keeps Google from answering: the rest is told.
        machines, faults = [], [reason_of(error) or repr(error)]
    text = "The machines on Google Cloud cannot be listed: "
    return machines, [
        Alarm("StateUnreadable", text + fault, "`llm-assets check`") for fault in faults
    ]


@lru_cache(maxsize=1)
def _listed_machines(_minute: int) -> tuple[list[str], list[str]]:
    # Cached for a minute: the board asks for every reader of its first page, and each call asks all
    # services over the network.
    from llm_assets.cloud.settings import load_cloud_settings
    from llm_assets.cloud.spending import active_jobs

    jobs, faults = active_jobs(load_cloud_settings())
    return [job.line() for job in jobs], faults


def _say_verdict(verdict: dict[str, Any] | None) -> list[str]:
    """The last verdict, and what a person decided about the version that it was on."""
    if verdict is None:
        return ["last verdict  none"]
    version, decision = f"version {verdict['version']}", verdict["decision"]
    outcome = "promoted" if verdict["promoted"] else "rejected"
    lines = [f"last verdict  {version} {outcome}. {verdict['summary']}"]
    if decision:
        outcome = "approved" if decision["approved"] else "rejected"
        who = f"{outcome} by {decision['name']} on {decision['at'][:10]}"
        lines.append(f"decision      {version} {who}: {decision['reason']}")
    return lines


def _describe(served: dict[str, Any] | None, platform: str) -> str:
    if served is None:
        return "not running" if platform == "local" else "by Vertex AI, which is not asked here"
    shares = ", ".join(
        f"version {name} ({share:.0%})" for name, share in served["versions"].items()
    )
    return f"{shares or 'no version yet'} at {served['url']}, {served['phase'].replace('_', ' ')}"
