"""Metrics of the graph: runs, ticks, daemons, versions, artifacts, budget and disk.

Everything is read when Prometheus scrapes, from what Dagster, the registry and the store have
recorded, so a restart loses nothing. If a part cannot be read, it is 0 in `llm_assets_readable` and
its metrics are absent; the others are there.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime

import dagster as dg
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from artifacts.progress import Report
from artifacts.reasons import reason_of
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.automation.decision import ENDED
from llm_assets.automation.launched import UNFINISHED, Runs
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_status, why_unable
from llm_assets.history import last_ticks, switched_on
from llm_assets.registry.base import Registry
from llm_assets.registry.state import Alias
from recipes.spec import read_metrics

ALIASES: tuple[Alias, ...] = ("wanted", "champion")
FIGURES = (
    *("step", "loss", "tokens_per_second", "peak_memory_gb", "gpu_memory_used_gb"),
    *("gpu_utilisation_percent", "gpu_power_watts", "gpu_temperature_celsius"),
)
"""Metrics of a training under way that are exported."""


class GraphCollector(Collector):
    """Reads one pipeline's state at each scrape."""

    def __init__(
        self,
        settings: PipelineSettings,
        record: Pipeline,
        registry: Registry,
        open_history: Callable[[], AbstractContextManager[dg.DagsterInstance]],
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
        """None: which metrics there are depends on what can be read at the scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Every metric, with the state as it is now."""
        readable: dict[str, float] = {}
        parts: dict[str, Callable[[], Iterator[Metric]]] = {
            "history": self._history,
            "registry": self._registry,
            "store": self._store,
        }
        for name, part in parts.items():
            try:
                metrics = list(part())
            except Exception as error:  # A scrape tells of a fault instead of failing by it.
                self._report(f"{name}: {reason_of(error) or repr(error)}")
                metrics = []
            # A part that can be read has at least one metric, whatever it holds.
            readable[name] = bool(metrics)
            yield from metrics
        yield _family(
            "readable", "1 if this part of the state can be read, else 0.", "part", readable
        )

    def _history(self) -> Iterator[Metric]:
        with self._open_history() as instance:
            yield from _runs(instance)
            yield from _ticks(instance, self._settings)
            yield from _daemons(instance)
            yield from _budget(Runs(instance, self._settings))

    def _registry(self) -> Iterator[Metric]:
        state = self._models.state()
        versions = {alias: state.find(alias) for alias in ALIASES}
        numbers = {str(alias): version.version for alias, version in versions.items() if version}
        yield _family("version", "Number of the version that an alias points to.", "alias", numbers)
        wanted, champion = versions["wanted"], versions["champion"]
        is_early = wanted and not champion and why_unable(self._settings, self._record, wanted)
        in_place = wanted == champion if wanted and not is_early else None
        text = "1 if the endpoint has confirmed that it serves the wanted version, else 0."
        # None makes no sample: before anything that can serve is wanted, nothing fails to.
        yield _one("wanted_serves", text, in_place)
        promoted = [verdict.promoted for verdict in state.verdicts]
        counts = {"true": promoted.count(True), "false": promoted.count(False)}
        yield _family("verdicts", "Verdicts of the gate.", "promoted", counts, CounterMetricFamily)

    def _store(self) -> Iterator[Metric]:
        assets = self._record.history().assets
        since = {asset: entries.current.since.timestamp() for asset, entries in assets.items()}
        text = "When an asset's current artifact became current."
        yield _family("artifact_since_timestamp_seconds", text, "asset", since)
        store = self._record.store
        text = "What the first worker of a training in progress reported last."
        yield _family("training", text, "figure", _training(store))
        if not store.is_local:
            return
        free = shutil.disk_usage(store.root).free
        yield _one("store_free_bytes", "Free bytes on the store's disk.", free)
        serves = endpoint_status(self._settings)
        text = "1 if the endpoint of this machine is running, else 0."
        yield _one("endpoint_runs", text, serves is not None)


def _one(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"llm_assets_{name}", text, None if value is None else float(value))


def _family(
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """A metric with a number for each value of its one label."""
    family = kind(f"llm_assets_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], float(number))
    return family


def _training(store: Store) -> dict[str, float]:
    """The figures of a run's newest step that has any of the hardware's."""
    for identity in store.in_the_making():
        if identity.kind == "checkpoint":
            lines = read_metrics(f"{store.root}/{layout.run(identity.fingerprint)}")
            newest = [line for line in lines if "peak_memory_gb" in line][-1:]
            # After a training diverged, its loss is None.
            return {n: line[n] for line in newest for n in FIGURES if line.get(n) is not None}
    return {}


def _runs(instance: dg.DagsterInstance) -> Iterator[Metric]:
    def count(status: dg.DagsterRunStatus) -> int:
        return instance.get_runs_count(dg.RunsFilter(statuses=[status]))

    waiting = {status.value.lower(): count(status) for status in UNFINISHED}
    yield _family("runs", "Runs that are waiting or running.", "status", waiting)
    ended = {status.value.lower(): count(status) for status in ENDED}
    text = "Runs in the history that have ended."
    yield _family("runs_ended", text, "status", ended, CounterMetricFamily)
    end_times = {
        status.value.lower(): record.end_time
        for status in ENDED
        for record in instance.get_run_records(dg.RunsFilter(statuses=[status]), limit=1)
        if record.end_time
    }
    text = "When the newest run of this status ended."
    yield _family("run_end_timestamp_seconds", text, "status", end_times)


def _ticks(instance: dg.DagsterInstance, settings: PipelineSettings) -> Iterator[Metric]:
    states = switched_on(instance, settings)
    ticks = last_ticks(instance, states)
    times = {name: tick.timestamp for name, tick in ticks.items()}
    yield _family("tick_timestamp_seconds", "When a sensor or schedule last ticked.", "name", times)
    between = {
        state.instigator_name: data.min_interval or 0
        for state in states
        if (data := state.sensor_instigator_data)
    }
    text = "Least seconds between two ticks of a sensor."
    yield _family("tick_interval_seconds", text, "name", between)
    failed = {name: tick.status.value == "FAILURE" for name, tick in ticks.items()}
    yield _family("tick_failed", "1 if the last tick failed, else 0.", "name", failed)


def _daemons(instance: dg.DagsterInstance) -> Iterator[Metric]:
    beats = instance.get_daemon_heartbeats()
    times = {name.lower(): heartbeat.timestamp for name, heartbeat in beats.items()}
    text = "When a part of the daemon last sent a heartbeat."
    yield _family("daemon_heartbeat_timestamp_seconds", text, "daemon", times)


def _budget(runs: Runs) -> Iterator[Metric]:
    text = "Hours that runs launched by automation took in this calendar month."
    yield _one("month_hours", text, runs.spent_hours(datetime.now(UTC)))
    if (limit := runs.settings.automation.hours) is not None:
        text = "Hours that such runs may take in a month."
        yield _one("month_hours_limit", text, limit)
