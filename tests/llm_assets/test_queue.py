"""Runs queue where they need the same thing, and what has died is no longer in the way."""

import subprocess
import sys
from pathlib import Path

import pytest
from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    build_sensor_context,
)

from llm_assets.automation.launched import PIPELINE_TAG
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from tests.conftest import Project, make_project
from tests.waiting import wait_until


def test_a_second_training_waits_in_the_queue_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "project", base_model=tmp_path, documents=1)
    # The history's folder is relative to where one is.
    monkeypatch.chdir(project.folder)

    def launch(instance: DagsterInstance) -> str:
        before = {run.run_id for run in instance.get_runs()}
        launched = project.run("dagster", "job", "launch", "-j", "retraining")
        assert launched.returncode == 0, launched.stdout + launched.stderr
        (run,) = {run.run_id for run in instance.get_runs()} - before
        return run

    def status(instance: DagsterInstance, run_id: str) -> DagsterRunStatus:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    with DagsterInstance.from_config(str(project.folder)) as instance:
        first = launch(instance)
        begun = DagsterEvent(DagsterEventType.RUN_START.value, "retraining")
        instance.report_dagster_event(begun, first)
        second = launch(instance)
        daemon = project.fork("dagster-daemon", "run", "-m", "llm_assets.definitions")
        try:
            blocked = f"Run {second} is blocked by global concurrency limits"
            wait_until(lambda: blocked in daemon.output.read_text(), told=daemon.output.read_text)
            assert status(instance, second) is DagsterRunStatus.QUEUED
            ended = DagsterEvent(DagsterEventType.RUN_FAILURE.value, "retraining")
            instance.report_dagster_event(ended, first)
            # It reads its one document, and ends where there is no base model.
            wait_until(
                lambda: status(instance, second) is DagsterRunStatus.FAILURE,
                told=daemon.output.read_text,
            )
        finally:
            daemon.terminate()
            daemon.wait()


def create_started_run(instance: DagsterInstance, project: Project) -> DagsterRun:
    defs = build_definitions(load_settings(project.config), str(project.config))
    job = defs.resolve_job_def("retraining")
    return instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)


def test_a_run_is_failed_once_its_process_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "project", base_model=tmp_path, documents=1)
    monkeypatch.chdir(project.folder)
    defs = build_definitions(load_settings(project.config), str(project.config))
    commands = (["true"], [sys.executable, "-c", "input()", "dagster"])
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
    processes[0].wait()
    with DagsterInstance.from_config(str(project.folder)) as instance:
        runs = []
        for process in processes:
            run = create_started_run(instance, project)
            instance.add_run_tags(run.run_id, {PIPELINE_TAG: "manual"})
            instance.report_engine_event(f"Started process for run (pid: {process.pid}).", run)
            runs.append(run.run_id)

        def look() -> str | None:
            context = build_sensor_context(instance)
            return defs.resolve_sensor_def("run_processes").evaluate_tick(context).skip_message

        assert look() == f"Failed: {runs[0]}"
        died, alive = (instance.get_run_by_id(run) for run in runs)
        assert died is not None and died.status is DagsterRunStatus.FAILURE
        assert alive is not None and alive.status is DagsterRunStatus.STARTED
        assert look() is None
        processes[1].communicate(b"\n")
        assert look() == f"Failed: {runs[1]}"
