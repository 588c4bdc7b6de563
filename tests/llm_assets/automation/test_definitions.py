"""Schedules, jobs, and what of them is on."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    Definitions,
    RunRequest,
    SkipReason,
    build_schedule_context,
    define_asset_job,
)

from artifacts.errors import PREFIX_VARIABLE, UserError
from llm_assets.automation.launched import ASSET_JOB, is_within
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from tests.conftest import Project, make_project
from tests.llm_assets.in_process import ask


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "project", base_model=tmp_path, documents=1)


def define(project: Project, **automation: Any) -> Definitions:
    project.configure(automation=automation)
    return build_definitions(load_settings(project.config), str(project.config))


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> Definitions:
    """What a file that says nothing of automation defines; tests read it only."""
    folder = tmp_path_factory.mktemp("defined")
    return define(make_project(folder / "project", base_model=folder, documents=1))


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[DagsterInstance]:
    # Not entered, which would set a storage for all definitions that are loaded later.
    made = DagsterInstance.local_temp(str(tmp_path))
    yield made
    made.dispose()


def evaluate(
    defs: Definitions, instance: DagsterInstance, due: datetime
) -> RunRequest | SkipReason:
    schedule = defs.resolve_schedule_def("weekly_retraining")
    context = build_schedule_context(instance, scheduled_execution_time=due)
    data = schedule.evaluate_tick(context)
    return data.run_requests[0] if data.run_requests else SkipReason(data.skip_message)


def test_the_schedule_goes_on_from_the_champion_in_its_own_time_zone(
    project: Project, instance: DagsterInstance
) -> None:
    defs = define(project, time_zone="Europe/Berlin")
    schedule = defs.resolve_schedule_def("weekly_retraining")
    assert schedule.cron_schedule == "0 3 * * 1"
    assert schedule.execution_timezone == "Europe/Berlin"
    request = evaluate(defs, instance, datetime.now(UTC))
    assert isinstance(request, RunRequest)
    assert request.run_config["ops"]["checkpoint"]["config"]["continue_from_champion"]


def test_the_schedule_keeps_out_of_blackouts_also_when_it_is_late(
    project: Project, instance: DagsterInstance
) -> None:
    now = datetime.now(UTC)
    due = now - timedelta(days=1)
    # It is looked at after `now`, be it on the next day.
    days = f"{now:%a}-{now + timedelta(days=1):%a}".lower()
    skipped = evaluate(define(project, blackouts=[f"{days} 00:00-24:00"]), instance, due)
    assert isinstance(skipped, SkipReason) and "00:00-24:00" in str(skipped.skip_message)
    defs = define(project, blackouts=[f"{due:%a} 00:00-24:00".lower()])
    assert isinstance(evaluate(defs, instance, due), RunRequest)


@pytest.mark.parametrize(
    ("window", "time", "inside"),
    [
        ("08:00-18:00", "2026-11-22 08:00", True),
        ("08:00-18:00", "2026-11-22 18:00", False),
        ("mon-fri 08:00-18:00", "2026-11-22 12:00", False),
        ("fri-mon 08:00-18:00", "2026-11-22 12:00", True),
        ("sat 22:00-06:00", "2026-11-22 05:59", True),
        ("sat 22:00-06:00", "2026-11-22 22:30", False),
        ("sun 22:00-06:00", "2026-11-22 05:59", False),
    ],
)
def test_windows_cover_their_days_and_pass_midnight(window: str, time: str, inside: bool) -> None:
    assert is_within(window, datetime.fromisoformat(time)) is inside


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"time_zone": "Europe/Berln"}, "is not a time zone"),
        ({"blackouts": ["8-18"]}, "'8-18' is not a time window"),
        ({"blackouts": ["mon-fry 08:00-18:00"]}, "is not a time window"),
        ({"blackouts": ["sun 22:00-22:00"]}, "a whole day is `00:00-24:00`"),
        ({"monthly_cost": 100}, "monthly_cost needs cost_per_hour"),
        ({"fresh_days": 1e9}, "automation.fresh_days: must be less than"),
        # Dagster takes no window of less than a minute.
        ({"fresh_days": 1e-4}, "automation.fresh_days: must be greater than"),
        ({"retry_minutes": 1e9}, "automation.retry_minutes: must be less than"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    project: Project, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match="automation") as refused:
        define(project, **settings)
    assert told in str(refused.value)


def test_sensors_are_on_where_the_pipeline_file_says_so(project: Project) -> None:
    statuses = {
        enabled: {one.name: one.default_status for one in define(project, enabled=enabled).sensors}
        for enabled in (False, True)
    }
    # Not automation: what it fails has ended.
    assert statuses[False].pop("run_processes") is DefaultSensorStatus.RUNNING
    assert set(statuses[False].values()) == {DefaultSensorStatus.STOPPED}
    assert set(statuses[True].values()) == {DefaultSensorStatus.RUNNING}


def test_sources_are_observed_by_a_schedule_that_is_on_where_looking_is_free(
    project: Project,
) -> None:
    defs = define(project, time_zone="Europe/Berlin", observe_cron="30 * * * *")
    schedule = defs.resolve_schedule_def("source_observation")
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("30 * * * *", "Europe/Berlin")
    assert schedule.default_status is DefaultScheduleStatus.RUNNING
    observed = defs.resolve_job_def("observation")
    with DagsterInstance.ephemeral() as instance:
        assert observed.execute_in_process(instance=instance).success
        key = AssetKey(["sources", "manual"])
        assert len(instance.fetch_observations(key, 9).records) == 1
        assert {run.job_name for run in instance.get_runs()} == {"observation"}
    assert observed.asset_layer.selected_asset_keys == {key}

    table = {"type": "bigquery", "name": "tickets", "table": "a.b.c", "project": "a"}
    table |= {"export": "gs://bucket/export", "id_column": "id", "text_column": "text"}
    table |= {"watermark_column": "changed", "maximum_gigabytes_billed": 1}
    project.configure(raw_corpus={"sources": [table]})
    statuses = [
        define(project, enabled=on).resolve_schedule_def("source_observation").default_status
        for on in (False, True)
    ]
    assert statuses == [DefaultScheduleStatus.STOPPED, DefaultScheduleStatus.RUNNING]


def test_each_source_has_a_freshness_policy_by_default(defined: Definitions) -> None:
    specs = defined.resolve_all_asset_specs()
    followed = {one.key.to_user_string() for one in specs if one.freshness_policy}
    assert followed == {"sources/manual", "raw_corpus", "endpoint"}


def test_jobs_of_the_launchpad_are_filled_in(defined: Definitions) -> None:
    jobs = {"retraining", "evaluation", "redeployment", "rollback", "cleaning"}
    assert jobs <= {job.name for job in defined.resolve_all_job_defs()}
    unset = {name for name in jobs if defined.resolve_job_def(name).run_config == {}}
    assert unset == {"evaluation", "redeployment", "cleaning"}
    shown = {"budget": {"steps": 12}, "optimizer": {"learning_rate": 0.01}, "seed": 0}
    retraining = defined.resolve_job_def("retraining")
    assert retraining.run_config == {"ops": {"checkpoint": {"config": shown}}}


@pytest.mark.parametrize("job", ["rollback", "redeployment"])
def test_a_rollback_and_a_dead_endpoint_wait_for_no_pool(defined: Definitions, job: str) -> None:
    """A run that trains holds those of all its steps until it ends."""
    assert all(step.definition.pools == set() for step in defined.resolve_job_def(job).nodes)
    training = defined.resolve_job_def("retraining")
    assert any("registry" in node.definition.pools for node in training.nodes)


def test_no_asset_has_a_retry_policy_beside_the_sensors(defined: Definitions) -> None:
    job = defined.resolve_implicit_global_asset_job_def()
    assert job.name == ASSET_JOB, "as Dagster calls a run of chosen assets"
    ops: list[Any] = [node.definition for node in job.nodes]
    assert ops and not any(op.retry_policy for op in ops)


def test_checks_of_what_was_not_built_end_with_their_reason_alone(project: Project) -> None:
    selected = AssetSelection.checks_for_assets(AssetKey("raw_corpus"))
    job = Definitions(jobs=[define_asset_job("checks", selected)])
    checks = Definitions.merge(define(project), job).resolve_job_def("checks")
    with DagsterInstance.ephemeral() as instance:
        done = checks.execute_in_process(instance=instance, raise_on_error=False)
    failed = done.filter_events(lambda event: event.is_step_failure)
    told = [one.step_failure_data.user_failure_data for one in failed]
    assert told and all(one and "`raw_corpus` has not been" in str(one.description) for one in told)


def test_a_second_pipeline_lives_under_its_prefix(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX_VARIABLE, "")
    settings = yaml.safe_load(project.config.read_text()) | {"key_prefix": "manual"}
    project.config.write_text(yaml.safe_dump(settings))
    defs = define(project)
    keys = {key.to_user_string() for key in defs.resolve_all_asset_keys()}
    assert "manual/checkpoint" in keys and "checkpoint" not in keys
    message = ask(project, "manual/checkpoint")
    assert message.endswith('with: dagster asset materialize --select "*manual/checkpoint"')
    retraining = defs.resolve_job_def("manual__retraining")
    assert "manual__checkpoint" in retraining.run_config["ops"]


def test_a_training_that_diverged_goes_on_to_the_gate(defined: Definitions) -> None:
    graph = defined.resolve_asset_graph()
    (check,) = [key for key in graph.asset_check_keys if key.name == "loss_is_finite_and_falls"]
    assert not graph.get_check_spec(check).blocking


def test_every_asset_has_a_check_and_a_group_of_its_pipeline(defined: Definitions) -> None:
    graph = defined.resolve_asset_graph()
    checked = {key.asset_key for key in graph.asset_check_keys}
    # A trial of `experiments` has its verdict.
    assert checked == graph.materializable_asset_keys & graph.unpartitioned_asset_keys
    specs = {spec.key.to_user_string(): spec for spec in defined.resolve_all_asset_specs()}
    assert {spec.group_name for spec in specs.values()} == {"manual"}
    columns = specs["clean_corpus"].metadata["dagster/column_schema"].columns
    assert [column.name for column in columns][:2] == ["id", "text"]


@pytest.mark.soak
def test_a_pipeline_with_a_prefix_runs_to_its_last_screen(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    project = make_project(tmp_path / "prefixed", tiny_model_folder)
    project.config.write_text(project.config.read_text() + "\nkey_prefix: manual\n")
    ended = project.run("llm-assets", "run")
    project.run("llm-assets", "stop")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = " ".join(ended.stdout.split())
    assert "✓ raw_corpus" in text and "✓ endpoint" in text and "serves version 1" in text
