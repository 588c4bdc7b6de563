"""Commands that people type all day: what they show, and what they do not load."""

import json
import subprocess
import sys

import pytest
from dagster import DagsterInstance, DagsterRunStatus, Definitions, asset, define_asset_job

from tests.conftest import Project
from tests.waiting import wait_until

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
    project.configure(automation={"enabled": True, "check_seconds": 5})

    def status() -> dict[str, list[str]]:
        shown: dict[str, list[str]] = json.loads(
            project.run("llm-assets", "status", "--json").stdout
        )
        return shown

    daemon = project.fork("dagster-daemon", "run", "-m", "llm_assets.definitions")
    try:
        told = "source_text_changed waits ("
        wait_until(lambda: any(told in why for why in status()["waiting"]), poll_seconds=1)
        shown = status()
        (project.folder / "text").rename(project.folder / "gone")
        told = "source_text_changed failed ("
        wait_until(lambda: any(told in why for why in status()["waiting"]), poll_seconds=1)
    finally:
        daemon.terminate()
        daemon.wait()
    assert shown["running"] == [f"run {ids[DagsterRunStatus.STARTED][:8]} (started)"]
    assert shown["services"] is None
    why = dict(line.split(" waits (") for line in shown["waiting"])
    assert "UTC): The text changed " in why["source_text_changed"]
    assert why["endpoint_follows"].endswith("UTC): Nothing was served yet.")
    (failed,) = (line for line in status()["waiting"] if " failed (" in line)
    assert "matches no file" in failed
