"""What is wrong is told without Prometheus, by the same names and with the runbook's remedies."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRunStatus

from llm_assets.cli import status as status_module
from llm_assets.cli.session import Session
from llm_assets.cli.status import screen, status_of
from llm_assets.cloud.settings import CLOUD_CONFIG_VARIABLE
from llm_assets.config import TrainingRunnerSettings, load_settings
from llm_assets.history import RUNS_DATABASE, Activity, read_activity, sqlite_folder
from tests.conftest import ROOT, Project
from tests.llm_assets.in_process import ANY_JOB

TICKED = re.compile("`[^`]+`")


def alarms_of(project: Project, activity: Activity) -> dict[str, status_module.Alarm]:
    settings = load_settings(project.config)
    found = status_module.find_alarms(settings, project.record.store, activity, True)
    return {one.alert: one for one in found}


def test_every_alarm_has_its_row_of_the_runbook_and_tells_the_commands_of_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    (project.folder / "store").mkdir()
    session = Session(load_settings(project.config), project.config)
    assert status_of(session)["alarms"] == []
    with DagsterInstance.from_config(str(project.folder)) as instance:
        for _ in range(status_module.MOST_FAILED + 1):
            instance.create_run_for_job(ANY_JOB, status=DagsterRunStatus.FAILURE)
    project.configure(automation={"monthly_hours": 40})
    monkeypatch.setattr(status_module, "LEAST_FREE_BYTES", float("inf"))
    monkeypatch.setattr(status_module, "NEARLY_SPENT", -1.0)
    silent = datetime.now(UTC) - timedelta(minutes=15)
    activity = read_activity(project.folder, load_settings(project.config))
    found = alarms_of(project, replace(activity, heartbeat=silent))
    assert found["RunsFail"].text == "4 runs failed within a day."
    assert found["DaemonSilent"].text == "The daemon has sent no heartbeat for 15 minutes."
    assert found["BudgetNearlySpent"].text == "Runs have used 0.0 of the month's 40.0 hours."
    database = project.folder / (sqlite_folder(project.folder) or "") / RUNS_DATABASE
    database.write_bytes(b"damaged" * 1_000)
    found |= alarms_of(project, read_activity(project.folder, load_settings(project.config)))
    assert "history is damaged" in found["StateUnreadable"].text
    runbook = (ROOT / "docs" / "operations.md").read_text()
    for alert, alarm in found.items():
        (row,) = re.findall(rf"^\| `{alert}` \|.*$", runbook, re.MULTILINE)
        assert set(TICKED.findall(alarm.remedy)) <= {*TICKED.findall(row), "`llm-assets run`"}
    assert found.keys() == {
        *("RunsFail", "DaemonSilent", "BudgetNearlySpent", "DiskNearlyFull", "StateUnreadable")
    }
    told = screen(status_of(session))
    assert [line for line in told if "alarm" in line and "history is damaged" in line]


def test_an_alarm_has_the_threshold_of_its_alert() -> None:
    rules = (ROOT / "infrastructure" / "prometheus" / "alerts.yml").read_text()
    for alert, threshold in (
        ("DaemonSilent", f"> {status_module.MOST_SILENT_SECONDS:g}"),
        ("RunsFail", f"> {status_module.MOST_FAILED}"),
        ("BudgetNearlySpent", f"> {status_module.NEARLY_SPENT:g}"),
        ("DiskNearlyFull", f"< {status_module.LEAST_FREE_BYTES / 1e9:g}e9"),
    ):
        (asked,) = re.findall(rf"alert: {alert}\n +expr: .* ([<>] \S+)\n", rules)
        assert asked == threshold


def test_machines_that_cannot_be_listed_are_an_alarm_and_hide_nothing_else(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(tmp_path / "nowhere.yaml"))
    batch = TrainingRunnerSettings(runner="google_batch")
    settings = load_settings(project.config).model_copy(update={"training": batch})
    status = status_of(Session(settings, project.config))
    assert status["machines"] == [] and status["running"] == []
    assert "cannot be listed" in status["alarms"][0]["text"]
