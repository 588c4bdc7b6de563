"""What Prometheus reads, and that dashboard, alerts and runbook speak of just that."""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import promql_parser
import pytest
import yaml
from dagster import DagsterInstance, DagsterRunStatus
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.automation.sensors import build_sensors
from llm_assets.config import load_settings
from llm_assets.history import TEXT_SENSOR
from llm_assets.metrics import GraphCollector
from llm_assets.registry.base import LocalRegistry
from recipes.spec import METRICS_NAME
from serving.api.dispatcher import Metrics
from tests.conftest import ROOT, Project
from tests.llm_assets.in_process import ANY_JOB, history_of
from tests.llm_assets.registry.conftest import base_entry

ALERTS = yaml.safe_load((ROOT / "infrastructure/prometheus/alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "infrastructure/grafana/dashboard.json").read_text())
EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]
OF_PROMETHEUS = {"up"}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    """A history on disk, one for all tests: its tables take a while to make."""
    home = str(tmp_path_factory.mktemp("home"))
    with DagsterInstance.local_temp(home, {"telemetry": {"enabled": False}}) as opened:
        yield opened


def _scrape(project: Project, instance: DagsterInstance, said: list[str]) -> str:
    registry = CollectorRegistry()
    record = project.record
    models = LocalRegistry.of(record)
    settings = load_settings(project.config)
    registry.register(
        GraphCollector(settings, record, models, lambda: nullcontext(instance), said.append)
    )
    return generate_latest(registry).decode()


def _values(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_graphs_state_is_in_its_metrics(project: Project, instance: DagsterInstance) -> None:
    for status in (DagsterRunStatus.STARTED, DagsterRunStatus.FAILURE, DagsterRunStatus.FAILURE):
        instance.create_run_for_job(ANY_JOB, status=status)
    record = project.record
    identity = Identity(kind="raw_corpus", code_version="1", inputs={})
    artifact, _ = record.store.make(identity, lambda draft: draft.stats.update(documents=1))
    record.advance(artifact)
    said: list[str] = []
    assert "llm_assets_wanted_serves" not in _values(_scrape(project, instance, said))
    LocalRegistry.of(record).register_base(base_entry())
    project.configure(automation={"monthly_hours": 40})
    found = _values(_scrape(project, instance, said))
    assert not said
    assert found["llm_assets_runs/started"] == 1
    assert found["llm_assets_runs_ended_total/failure"] == 2
    assert found["llm_assets_version/wanted"] == 0
    assert found["llm_assets_wanted_serves"] == 0, "nothing has confirmed that it serves"
    assert found["llm_assets_month_hours_limit"] == 40
    assert found["llm_assets_artifact_since_timestamp_seconds/raw_corpus"] > 1.7e9
    assert found["llm_assets_store_free_bytes"] > 0
    assert {name: value for name, value in found.items() if "readable" in name} == {
        f"llm_assets_readable/{part}": 1 for part in ("history", "registry", "store")
    }


def test_a_training_under_way_is_told_by_its_newest_step(
    project: Project, instance: DagsterInstance
) -> None:
    store = project.record.store
    identity = Identity(kind="checkpoint", code_version="1", inputs={})
    lines: list[dict[str, object]] = [
        {"step": 4, "loss": 2.5, "peak_memory_gb": 9.0, "gpu_temperature_celsius": 64},
        {"step": 5, "loss": None},
    ]
    told: list[dict[str, float]] = []

    def build(draft: Draft) -> None:
        place = f"{layout.run(identity.fingerprint)}/{METRICS_NAME}"
        store.write_bytes(place, "".join(json.dumps(line) + "\n" for line in lines).encode())
        told.append(_values(_scrape(project, instance, [])))

    store.make(identity, build)
    told.append(_values(_scrape(project, instance, [])))
    meanwhile, afterwards = (
        {name.partition("/")[2]: one[name] for name in one if "_training/" in name} for one in told
    )
    assert meanwhile == {
        **{"step": 4, "loss": 2.5, "peak_memory_gb": 9.0},
        "gpu_temperature_celsius": 64,
    }
    assert afterwards == {}


def test_what_cannot_be_read_is_said_and_hides_nothing_else(
    project: Project, instance: DagsterInstance
) -> None:
    state = project.folder / "store" / "registry" / "manual" / "registry.json"
    state.parent.mkdir(parents=True)
    state.write_text("{")
    said: list[str] = []
    found = _values(_scrape(project, instance, said))
    assert found["llm_assets_readable/registry"] == 0
    assert found["llm_assets_readable/history"] == 1, said
    assert len(said) == 1 and said[0].startswith("registry: ")


def test_dashboard_and_alerts_ask_for_metrics_that_exist(
    project: Project, instance: DagsterInstance
) -> None:
    project.configure(automation={"monthly_hours": 40})
    (project.folder / "store").mkdir()
    text = _scrape(project, instance, []) + Metrics().render([])
    exist = set(OF_PROMETHEUS)
    for family in text_string_to_metric_families(text):
        exist |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    asked = {name for text in EXPRESSIONS for name in _metrics_of(text)}
    assert asked <= exist, asked - exist
    assert len(asked) > 15


def test_the_ticks_of_a_pipeline_with_a_prefix_alarm_as_well(project: Project) -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "TicksStopped"]
    ticked, interval = _selectors_of(rule["expr"])
    assert interval.name == "llm_assets_tick_interval_seconds"
    (matcher,) = ticked.matchers.matchers
    for prefix in (None, "", "manuals", "team__manuals"):
        settings = load_settings(project.config).model_copy(update={"key_prefix": prefix})
        names = [one.name for one in build_sensors(settings)]
        # As Prometheus reads it: the whole value has to match.
        found = [name for name in names if re.fullmatch(matcher.value, name)]
        assert found == [settings.dagster_name(TEXT_SENSOR)]
    assert matcher.op == promql_parser.MatchOp.Re and matcher.name == "name"


def test_no_alert_adds_up_pipelines_whose_daemons_and_endpoints_are_their_own() -> None:
    """A daemon that is silent was hidden by that of another pipeline in the same Prometheus."""
    for rule in RULES:
        over_all = re.search(r"\b(?:sum|max|min|avg|count)\b(?! by \(instance\b)", rule["expr"])
        assert over_all is None, rule["alert"]


def test_the_interval_of_a_sensor_is_told_beside_its_ticks(project: Project) -> None:
    project.configure(automation={"check_seconds": 7200})
    project.run_well("dagster", "sensor", "start", TEXT_SENSOR)
    with history_of(project) as history:
        found = _values(_scrape(project, history, []))
    assert found[f"llm_assets_tick_interval_seconds/{TEXT_SENSOR}"] == 7200


def test_every_alert_is_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert re.search(rf"^\| `{rule['alert']}` \|", runbook, re.MULTILINE), rule["alert"]


def _metrics_of(expression: str) -> set[str]:
    """Names of the metrics in PromQL."""
    return {selector.name for selector in _selectors_of(expression)}


def _selectors_of(expression: str) -> list[promql_parser.VectorSelector]:
    """What PromQL asks for, as its parser finds it; raises where it is none."""
    found: list[promql_parser.VectorSelector] = []

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        for name in ("expr", "lhs", "rhs", "vector_selector", "args"):
            inner = getattr(node, name, None)
            for each in inner if isinstance(inner, list) else [inner]:
                if each is not None and not isinstance(each, str):
                    walk(each)

    walk(promql_parser.parse(expression))
    return found
