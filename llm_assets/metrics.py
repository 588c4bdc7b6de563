"""Metrics of the graph: runs, ticks, daemons, versions, artifacts, budget and disk.

All is read when Prometheus asks, from what Dagster, the registry and the store have recorded, so
nothing is lost by a restart. A part that cannot be read is 0 in `llm_assets_readable`, and its
metrics are absent; the others are there.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from dagster import DagsterInstance, RunsFilter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from artifacts.errors import reason_of
from artifacts.progress import Report
from artifacts.store.pipelines import Pipeline
from llm_assets.automation.decision import ENDED
from llm_assets.automation.launched import UNFINISHED, Runs, spent_hours
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.registry.base import Registry
from llm_assets.registry.state import Alias
from serving import endpoint as process

ALIASES: tuple[Alias, ...] = ("wanted", "champion")
Part = Callable[[], Iterator[Metric]]


class GraphCollector(Collector):
    """Reads one pipeline's state at each scrape."""

    def __init__(
        self,
        settings: PipelineSettings,
        record: Pipeline,
        registry: Registry,
        open_history: Callable[[], AbstractContextManager[DagsterInstance]],
        report: Report,
    ) -> None:
        """Nothing is read yet.

        Args:
            open_history: opens Dagster's history; again at each scrape, since it may come back.
            report: gets the reason where a part cannot be read.
        """
        self._settings, self._record, self._models = settings, record, registry
        self._open_history, self._report = open_history, report

    def describe(self) -> Iterable[Metric]:
        """None: what there is depends on what can be read, and need not be to register this."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Every metric, with the state as it is now."""
        readable = GaugeMetricFamily(
            "llm_assets_readable", "1 where this part of the state can be read.", labels=["part"]
        )
        parts: tuple[tuple[str, Part], ...] = (
            ("history", self._history),
            ("registry", self._registry),
            ("store", self._store),
        )
        for name, part in parts:
            try:
                found = list(part())
            except Exception as error:  # A scrape tells of a fault instead of failing by it.
                self._report(f"{name}: {reason_of(error) or repr(error)}")
                found = []
            readable.add_metric([name], float(bool(found)))
            yield from found
        yield readable

    def _history(self) -> Iterator[Metric]:
        with self._open_history() as instance:
            yield from _runs(instance)
            yield from _ticks(instance)
            yield from _daemons(instance)
            yield from _budget(Runs(instance, self._settings))

    def _registry(self) -> Iterator[Metric]:
        state = self._models.state()
        versions = GaugeMetricFamily(
            "llm_assets_version", "Number of the version that an alias points to.", labels=["alias"]
        )
        found = {alias: state.find(alias) for alias in ALIASES}
        for alias, version in found.items():
            if version is not None:
                versions.add_metric([alias], version.version)
        yield versions
        in_place = found["wanted"] == found["champion"]
        text = "1 where the endpoint has confirmed that it serves the wanted version."
        yield GaugeMetricFamily("llm_assets_wanted_serves", text, value=float(in_place))
        verdicts = CounterMetricFamily(
            "llm_assets_verdicts", "Verdicts of the gate.", labels=["promoted"]
        )
        for promoted in (True, False):
            count = sum(verdict.promoted is promoted for verdict in state.verdicts)
            verdicts.add_metric([str(promoted).lower()], count)
        yield verdicts

    def _store(self) -> Iterator[Metric]:
        made = GaugeMetricFamily(
            "llm_assets_artifact_since_timestamp_seconds",
            "Since when an asset's current artifact is current.",
            labels=["asset"],
        )
        for asset, history in self._record.history().assets.items():
            made.add_metric([asset], history.current.since.timestamp())
        yield made
        store = self._record.store
        if not store.is_local:
            return
        text = "Free bytes of the store's disk."
        free = shutil.disk_usage(store.root).free
        yield GaugeMetricFamily("llm_assets_store_free_bytes", text, value=free)
        serves = process.status(endpoint_folder(self._settings))
        text = "1 where the endpoint of this machine runs."
        yield GaugeMetricFamily("llm_assets_endpoint_runs", text, value=float(serves is not None))


def _runs(instance: DagsterInstance) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "llm_assets_runs", "Runs that wait or are under way.", labels=["status"]
    )
    for status in UNFINISHED:
        count = instance.get_runs_count(RunsFilter(statuses=[status]))
        waiting.add_metric([status.value.lower()], count)
    yield waiting
    ended = CounterMetricFamily(
        "llm_assets_runs_ended", "Runs in the history that have ended.", labels=["status"]
    )
    last = GaugeMetricFamily(
        "llm_assets_run_end_timestamp_seconds",
        "When the newest run of this status ended.",
        labels=["status"],
    )
    for status in ENDED:
        chosen = RunsFilter(statuses=[status])
        ended.add_metric([status.value.lower()], instance.get_runs_count(chosen))
        for record in instance.get_run_records(chosen, limit=1):
            if record.end_time:
                last.add_metric([status.value.lower()], record.end_time)
    yield from (ended, last)


def _ticks(instance: DagsterInstance) -> Iterator[Metric]:
    at = GaugeMetricFamily(
        "llm_assets_tick_timestamp_seconds",
        "When a sensor or schedule ticked last.",
        labels=["name"],
    )
    failed = GaugeMetricFamily(
        "llm_assets_tick_failed", "1 where the last tick failed.", labels=["name"]
    )
    for state in instance.all_instigator_state():
        if not state.is_running:
            continue
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1)
        for tick in ticks:
            at.add_metric([state.instigator_name], tick.timestamp)
            failed.add_metric([state.instigator_name], float(tick.status.value == "FAILURE"))
    yield from (at, failed)


def _daemons(instance: DagsterInstance) -> Iterator[Metric]:
    beat = GaugeMetricFamily(
        "llm_assets_daemon_heartbeat_timestamp_seconds",
        "When a part of the daemon last said that it lives.",
        labels=["daemon"],
    )
    for name, heartbeat in instance.get_daemon_heartbeats().items():
        beat.add_metric([name.lower()], heartbeat.timestamp)
    yield beat


def _budget(runs: Runs) -> Iterator[Metric]:
    now, settings = datetime.now(UTC), runs.settings.automation
    hours = spent_hours(settings, runs.by_automation(now), now)
    text = "Hours of runs that automation launched, in this calendar month."
    yield GaugeMetricFamily("llm_assets_month_hours", text, value=hours)
    if settings.hours is not None:
        text = "Hours that such runs may take in a month."
        yield GaugeMetricFamily("llm_assets_month_hours_limit", text, value=settings.hours)
