"""Runs queue where they need the same thing, and what has died is no longer in the way."""

import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster
import pytest
from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    build_sensor_context,
)

from llm_assets.automation.dead_runs import STARTED
from llm_assets.automation.launched import LAUNCHED_BY_TAG, SCHEDULE
from llm_assets.automation.notifications import ENDED, REASON_TAG, WILL_RETRY_TAG
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from llm_assets.history import ENDPOINT_SENSOR, PIPELINE_TAG, TEXT_SENSOR
from tests.conftest import ROOT, Project, make_project
from tests.dagster_services import daemon
from tests.forked import run_command
from tests.waiting import wait_until


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of one document; the history's folder is relative to where one is."""
    project = make_project(tmp_path / "project", base_model=tmp_path, documents=1)
    monkeypatch.chdir(project.folder)
    return project


def started(process: int) -> str:
    """What Dagster says of a run that its launcher begins, as its code has it."""
    code = Path(dagster.__file__).parent / "_grpc" / "impl.py"
    (told,) = re.findall(r'f"(Started process for run [^"]*)"', code.read_text())
    return told.format(pid=process)


def create_run(
    instance: DagsterInstance, project: Project, job_name: str, status: DagsterRunStatus
) -> DagsterRun:
    defs = build_definitions(load_settings(project.config), str(project.config))
    job = defs.resolve_job_def(job_name)
    return instance.create_run_for_job(job, status=status)


def launch(project: Project, job: str) -> None:
    """Put a run into the queue by Dagster's command."""
    variables = project.environment()
    del variables["DAGSTER_MODULE_NAME"]
    command = ("dagster", "job", "launch", "-w", str(ROOT / "workspace.yaml"), "-j", job)
    launched = run_command(command, project.folder, variables, timeout=300)
    assert launched.returncode == 0, launched.stderr


def test_trainings_need_a_pool_that_lets_one_run_go_at_a_time(small: Project) -> None:
    with DagsterInstance.from_config(str(small.folder)) as instance:
        pools = instance.get_concurrency_config().pool_config
        assert pools.default_pool_limit == 1
        run = create_run(instance, small, "retraining", DagsterRunStatus.NOT_STARTED)
        needed = run.run_op_concurrency
        assert needed and "training" in (needed.all_pools or ())


@pytest.mark.soak
def test_a_second_training_waits_in_the_queue_for_the_first(small: Project) -> None:
    with DagsterInstance.from_config(str(small.folder)) as instance:
        launch(small, "evaluation")
        with daemon(small) as log:
            # Dagster knows a history's pools from its first run on.
            ended = (DagsterRunStatus.FAILURE,)
            wait_until(lambda: instance.get_runs()[0].status in ended, told=log.read_text)
            create_run(instance, small, "evaluation", DagsterRunStatus.STARTED)
            launch(small, "evaluation")
            waits = "is blocked by global concurrency limits"
            wait_until(lambda: waits in log.read_text(), told=log.read_text)


def test_a_run_is_failed_once_its_process_has_died(small: Project) -> None:
    defs = build_definitions(load_settings(small.config), str(small.config))
    commands = (["true"], [sys.executable, "-c", "input()", "dagster"])
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
    processes[0].wait()
    with DagsterInstance.from_config(str(small.folder)) as instance:
        runs = []
        for process in processes:
            run = create_run(instance, small, "retraining", DagsterRunStatus.STARTED)
            instance.add_run_tags(run.run_id, {PIPELINE_TAG: "manual"})
            instance.report_engine_event(started(process.pid), run)
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


@pytest.mark.parametrize("is_told_by_dagster", [False, True])
@pytest.mark.parametrize("limit", ["blackouts", "soon", "over", "monthly_hours", None])
def test_a_run_that_died_is_launched_again_only_when_automation_may(
    small: Project, limit: str | None, is_told_by_dagster: bool
) -> None:
    """The sensor finds it, or the code server tells of it first, as when the kernel killed it."""
    now, whole_day = datetime.now(UTC), dict[str, object](blackouts=["00:00-24:00"])
    begins, ends = (f"{now + timedelta(minutes=minutes):%H:%M}" for minutes in (1, 3))
    values: dict[str | None, dict[str, object]] = {
        "blackouts": whole_day,
        "soon": {"blackouts": [f"{begins}-{ends}"]},
        "over": whole_day,
        "monthly_hours": {"monthly_hours": 1e-9},
        None: {},
    }
    process = subprocess.Popen([sys.executable, "-c", "input()", "dagster"], stdin=subprocess.PIPE)
    with DagsterInstance.from_config(str(small.folder)) as instance:

        def look(automation: dict[str, object]) -> None:
            small.configure(automation={"time_zone": "UTC", "blackouts": []} | automation)
            defs = build_definitions(load_settings(small.config), str(small.config))
            defs.resolve_sensor_def("run_processes").evaluate_tick(build_sensor_context(instance))

        expected = {}
        for launched_by in (TEXT_SENSOR, SCHEDULE, ENDPOINT_SENSOR, None):
            run = create_run(instance, small, "retraining", DagsterRunStatus.NOT_STARTED)
            start = DagsterEvent(DagsterEventType.RUN_START.value, run.job_name)
            instance.report_dagster_event(start, run.run_id)
            tags = {LAUNCHED_BY_TAG: launched_by} if launched_by else {}
            instance.add_run_tags(run.run_id, {PIPELINE_TAG: "manual"} | tags)
            instance.report_engine_event(started(process.pid), run)
            may = limit in ("over", None) or launched_by not in (TEXT_SENSOR, SCHEDULE)
            expected[run.run_id] = str(may).lower()
        look(values[limit])
        if limit == "over":
            look({})
        process.communicate(b"\n")
        if is_told_by_dagster:
            for run in instance.get_runs():
                instance.report_run_failed(run)
        else:
            look({} if limit == "over" else values[limit])
        runs = {run.run_id: run for run in instance.get_runs()}
        assert {name: run.tags[WILL_RETRY_TAG] for name, run in runs.items()} == expected


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_whose_process_was_killed_is_launched_again_by_dagster(
    project: Project, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """By the kernel, or as `llm-assets down` ends it, of which nobody is told."""
    monkeypatch.chdir(project.folder)
    launch(project, "retraining")
    with (
        daemon(project) as log,
        DagsterInstance.from_config(str(project.folder)) as instance,
    ):

        def process() -> int | None:
            (run,) = instance.get_runs()
            events = instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT)
            pids = [int(found[1]) for one in events if (found := STARTED.search(one.message))]
            is_under_way = run.status is DagsterRunStatus.STARTED
            return pids[0] if pids and is_under_way else None

        wait_until(process, told=log.read_text)
        os.kill(process() or 0, number)
        wait_until(lambda: len(instance.get_runs()) == 2, told=log.read_text)
        again, killed = instance.get_runs()
        assert killed.status is DagsterRunStatus.FAILURE and again.parent_run_id == killed.run_id
        assert killed.tags[WILL_RETRY_TAG] == "true"
        assert (killed.tags.get(REASON_TAG) == ENDED) is (number == signal.SIGTERM)
        instance.report_run_canceled(again)
