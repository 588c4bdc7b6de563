"""Commands that people type all day: what they show, and what they do not load."""

import json
import subprocess
import sys

import pytest
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    Definitions,
    RunsFilter,
    asset,
    define_asset_job,
)

from tests.conftest import Project

SLOW = ("dagster", "numpy", "pandas", "pyarrow", "pyspark", "torch", "transformers", "fastapi")
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


def test_status_names_the_runs_that_wait_or_are_under_way(
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
        assert instance.get_runs_count(RunsFilter()) == 2
    status = json.loads(project.run("llm-assets", "status", "--json").stdout)
    assert status["running"] == [f"run {ids[DagsterRunStatus.STARTED][:8]} (started)"]
    assert status["services"] is None
