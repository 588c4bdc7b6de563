"""Commands that people type all day: what they show, and what they do not load."""

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    Definitions,
    asset,
    define_asset_job,
)
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster_shared.error import SerializableErrorInfo

from tests.conftest import Project

SLOW = ("dagster", "numpy", "pandas", "pyarrow", "pyspark", "torch", "transformers", "starlette")
SAY_WHAT_IS_LOADED = f"""
import sys
from llm_assets.cli.main import commands
try:
    commands(sys.argv[1:])
finally:
    print(*[name for name in {SLOW} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [("status",), ("versions",), ("--version",), ("--help",)])
def test_a_quick_command_loads_nothing_slow(project: Project, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY_WHAT_IS_LOADED, *arguments],
        cwd=project.folder,
        env=project.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout
    assert done.stderr.strip() == ""


def test_status_names_what_runs_and_why_the_sensors_wait(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asset
    def anything() -> None: ...

    monkeypatch.chdir(project.folder)
    job = Definitions([anything], jobs=[define_asset_job("any")]).resolve_job_def("any")
    with DagsterInstance.from_config(str(project.folder)) as instance:
        ids = {
            status: instance.create_run_for_job(job, status=status).run_id
            for status in (DagsterRunStatus.STARTED, DagsterRunStatus.SUCCESS)
        }
        for reason in ("The text is older.", "The text changed 3 s ago."):
            instance.create_tick(_tick("source_text_changed", skip_reason=reason))
        error = SerializableErrorInfo("The port is taken.\n", [], "Failure")
        instance.create_tick(_tick("endpoint_follows", error=error))
    status = json.loads(project.run("llm-assets", "status", "--json").stdout)
    assert status["running"] == [f"run {ids[DagsterRunStatus.STARTED][:8]} (started)"]
    waits, fails = status["waiting"]
    assert waits.startswith("source_text_changed waits (")
    assert waits.endswith("UTC): The text changed 3 s ago.")
    assert fails.startswith("endpoint_follows failed (") and fails.endswith("The port is taken.")
    assert status["services"] is None


def _tick(sensor: str, **outcome: Any) -> TickData:
    return TickData(
        instigator_origin_id="origin",
        instigator_name=sensor,
        instigator_type=InstigatorType.SENSOR,
        status=TickStatus.FAILURE if "error" in outcome else TickStatus.SKIPPED,
        timestamp=time.time(),
        selector_id=sensor,
        **outcome,
    )
