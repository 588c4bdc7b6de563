"""Runs queue where they need the same thing, and what has died is no longer in the way."""

import subprocess
import sys
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRunStatus, build_sensor_context
from dagster._core.execution.api import create_execution_plan
from dagster._core.instance.config import PoolGranularity
from dagster._core.op_concurrency_limits_counter import GlobalOpConcurrencyLimitsCounter
from dagster._core.storage.dagster_run import DagsterRun, RunsFilter

from llm_assets.automation.launched import PIPELINE_TAG
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from tests.conftest import Project, make_project


def create_run(
    instance: DagsterInstance, project: Project, job_name: str, status: DagsterRunStatus
) -> DagsterRun:
    defs = build_definitions(load_settings(project.config), str(project.config))
    job = defs.resolve_job_def(job_name)
    plan = create_execution_plan(job)
    return instance.create_run_for_job(job, execution_plan=plan, status=status)


def test_a_second_training_waits_in_the_queue_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "project", base_model=tmp_path, documents=1)
    # The history's folder is relative to where one is.
    monkeypatch.chdir(project.folder)
    with DagsterInstance.from_config(str(project.folder)) as instance:
        pools = instance.get_concurrency_config().pool_config
        assert pools.pool_granularity is PoolGranularity.RUN and pools.default_pool_limit == 1

        sensed = create_run(instance, project, "retraining", DagsterRunStatus.NOT_STARTED)
        assert sensed.run_op_concurrency
        assert "training" in (sensed.run_op_concurrency.all_pools or set())

        def is_blocked(run: DagsterRun) -> bool:
            active = instance.get_run_records(RunsFilter(statuses=[DagsterRunStatus.STARTED]))
            return GlobalOpConcurrencyLimitsCounter(
                instance,
                [run],
                active,
                instance.event_log_storage.get_concurrency_keys(),
                instance.event_log_storage.get_pool_limits(),
                pool_granularity=pools.pool_granularity,
            ).is_blocked(run)

        assert not is_blocked(sensed)
        create_run(instance, project, "retraining", DagsterRunStatus.STARTED)
        assert is_blocked(sensed)


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
            run = create_run(instance, project, "retraining", DagsterRunStatus.STARTED)
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
