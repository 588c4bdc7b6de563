"""Commands that people type all day: what they show, and what they do not load."""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from dagster import DagsterInstance, DagsterRunStatus
from rich.console import Console

from artifacts.settings import read_yaml
from artifacts.store.identity import Identity
from artifacts.store.store import Draft, layout
from llm_assets.cli.main import commands
from llm_assets.cli.pipeline.run import Progress
from llm_assets.cli.session import use_this_folders_history
from llm_assets.cli.status import MOST_SILENT_SECONDS, screen
from llm_assets.config import CONFIG_VARIABLE, load_settings
from llm_assets.history import (
    NOTIFYING,
    PIPELINE_TAG,
    PROCESS_TAG,
    TEXT_SENSOR,
    is_switched_on,
    last_ticks,
    read_activity,
)
from llm_assets.registry.base import LocalRegistry
from recipes.spec import METRICS_NAME
from tests.conftest import Project
from tests.dagster_services import daemon
from tests.llm_assets.in_process import ANY_JOB, type_in
from tests.llm_assets.registry.conftest import base_entry, judge
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


def have_dagster_read_the_history(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name its folder by a variable, which Dagster alone looks up."""
    settings = read_yaml(project.folder / "dagster.yaml")
    history = settings["storage"]["sqlite"]
    monkeypatch.setenv("HISTORY", history["base_dir"])
    history["base_dir"] = {"env": "HISTORY"}
    (project.folder / "dagster.yaml").write_text(yaml.safe_dump(settings))


def test_status_names_what_runs_and_why_the_sensors_wait(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    project.configure(
        automation={"enabled": True, "check_seconds": 1}, notifications={"webhook_variable": "HOOK"}
    )
    with DagsterInstance.from_config(str(project.folder)) as instance:
        ids = {
            status: instance.create_run_for_job(ANY_JOB, status=status).run_id
            for status in (DagsterRunStatus.STARTED, DagsterRunStatus.SUCCESS)
        }
    ticks = ("source_text_changed waits", "endpoint_follows waits")

    def status() -> dict[str, Any]:
        told: dict[str, Any] = json.loads(project.run("llm-assets", "status", "--json").stdout)
        return told

    def told_of(*beginnings: str) -> list[str]:
        waiting = status()["waiting"]
        return [one for name in beginnings for one in waiting if one.startswith(f"{name} (")]

    with daemon(project) as log:
        wait_until(lambda: len(told_of(*ticks)) == 2, poll_seconds=1, told=log.read_text)
        waits, _ = told_of(*ticks)
        assert "UTC): The text changed " in waits and waits.endswith(
            "until it is unchanged for 300 s."
        )
        with DagsterInstance.from_config(str(project.folder)) as instance:
            states = instance.all_instigator_state  # A sensor's is there from its first tick on.
            wait_until(lambda: set(NOTIFYING) <= last_ticks(instance, states()).keys())
        assert not [one for one in status()["waiting"] if one.startswith(NOTIFYING)]
        (project.folder / "text").rename(project.folder / "gone")
        failed = "source_text_changed failed"
        wait_until(lambda: told_of(failed), poll_seconds=1, told=log.read_text)
        assert re.search(r"UTC\): Source 'manual': .* matches no file", told_of(failed)[0])
        said = read_activity(project.folder, load_settings(project.config)).heartbeat
        assert said and (datetime.now(UTC) - said).total_seconds() < MOST_SILENT_SECONDS
    with DagsterInstance.from_config(str(project.folder)) as instance:
        states = instance.all_instigator_state()
        last = last_ticks(instance, states)[TEXT_SENSOR]
        # As where the daemon looks again, which may take minutes: what was said holds until then.
        started = last.tick_data._replace(status=type(last.status).STARTED, error=None)
        instance.create_tick(started)
        assert last_ticks(instance, states)[TEXT_SENSOR].status.value == "FAILURE"
    assert "matches no file" in told_of(failed)[0]
    project.configure(automation={"enabled": False})
    assert not told_of(failed), "nothing ticks any more"
    project.configure(automation={"enabled": True, "check_seconds": 1})
    have_dagster_read_the_history(project, monkeypatch)
    as_dagster_reads_it = told_of(failed)[0]
    assert re.search(r"UTC\): Source 'manual': .* matches no file", as_dagster_reads_it)
    project.configure(automation={"enabled": False})
    assert not told_of(failed), "nothing ticks any more"
    assert status()["running"] == [f"run {ids[DagsterRunStatus.STARTED][:8]} (started)"]
    assert status()["services"] is None


@pytest.mark.parametrize(
    ("name", "status", "is_on"),
    [
        ("run_processes", "DECLARED_IN_CODE", True),
        ("run_processes", None, True),
        ("run_processes", "STOPPED", False),
        ("source_text_changed", "DECLARED_IN_CODE", False),
        ("source_text_changed", "RUNNING", True),
        ("letters__run_processes", "RUNNING", False),
    ],
)
def test_what_ticks_is_of_this_pipeline_and_on(
    project: Project, name: str, status: str | None, is_on: bool
) -> None:
    """In the file automation is off, which what was switched on in the UI does not mind."""
    settings = load_settings(project.config)
    assert is_switched_on(settings, name, status) is is_on
    letters = settings.model_copy(update={"key_prefix": "letters"})
    assert is_switched_on(letters, f"letters__{name}", status) is (is_on and "__" not in name)


@pytest.mark.parametrize("by_dagster", [False, True], ids=["read", "by Dagster"])
def test_status_tells_of_runs_of_this_pipeline_that_are_alive(
    project: Project, monkeypatch: pytest.MonkeyPatch, by_dagster: bool
) -> None:
    """Another pipeline shares the history, and a run was killed."""
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    describe = "from artifacts.leases import describe_holder; print(describe_holder())"
    dead = subprocess.run(
        [sys.executable, "-c", describe], capture_output=True, text=True, check=True
    ).stdout.strip()
    started, failed = DagsterRunStatus.STARTED, DagsterRunStatus.FAILURE
    with DagsterInstance.from_config(str(project.folder)) as instance:
        create = partial(instance.create_run_for_job, ANY_JOB)
        ours = create(status=started, tags={PIPELINE_TAG: "manual"}).run_id
        create(status=started, tags={PIPELINE_TAG: "manual", PROCESS_TAG: dead})
        for status in (started, failed):
            create(status=status, tags={PIPELINE_TAG: "letters"})
    if by_dagster:
        have_dagster_read_the_history(project, monkeypatch)

    activity = read_activity(project.folder, load_settings(project.config))

    assert activity.runs == [f"run {ours[:8]} (started)"] and activity.failed == 0


def test_the_folders_history_counts_where_a_variable_names_another(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    content = read_yaml(project.folder / "dagster.yaml")
    content["storage"]["sqlite"]["base_dir"] = str(elsewhere / "dagster")
    (elsewhere / "dagster.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv(CONFIG_VARIABLE, str(project.config))
    monkeypatch.setenv("DAGSTER_HOME", str(elsewhere))
    advised = f"export DAGSTER_HOME={project.folder}\n"

    told = CliRunner().invoke(commands, ["status", "--json"])
    assert told.stderr.endswith(advised) and json.loads(told.stdout)["running"] == []

    monkeypatch.setattr(sys, "stderr", said := StringIO())
    use_this_folders_history()

    assert said.getvalue().count(advised) == 1
    assert os.environ["DAGSTER_HOME"] == str(project.folder)
    with DagsterInstance.get() as instance:
        instance.create_run_for_job(ANY_JOB, status=DagsterRunStatus.STARTED)
    assert [path.name for path in elsewhere.iterdir()] == ["dagster.yaml"]
    monkeypatch.setenv("DAGSTER_HOME", str(elsewhere))
    told = CliRunner().invoke(commands, ["status", "--json"])
    assert len(json.loads(told.stdout)["running"]) == 1

    # As in a code location of one's own.
    (project.folder / "dagster.yaml").unlink()
    told = CliRunner().invoke(commands, ["status", "--json"])
    assert json.loads(told.stdout)["running"] == [] and told.stderr == ""


def test_status_shows_who_decided_after_the_gates_verdict(project: Project) -> None:
    registry = LocalRegistry.of(project.record)
    registry.register_base(base_entry())
    judge(registry, "candidate", promoted=False)
    assert "\ndecision " not in type_in(project, "status").output

    registry.approve(1, "Ada", "reads better")
    told = type_in(project, "status").output
    assert "last verdict  version 1 rejected. Measured against base.\n" in told
    assert "\ndecision      version 1 approved by Ada on " in told and "reads better\n" in told
    decision = json.loads(type_in(project, "status", "--json").output)["last_verdict"]["decision"]
    assert decision["approved"] and (decision["name"], decision["reason"]) == (
        "Ada",
        "reads better",
    )

    registry.reject(1, "Bob", "wrong dosages")
    assert "\ndecision      version 1 rejected by Bob on " in type_in(project, "status").output


def test_status_does_not_say_that_an_endpoint_of_vertex_ai_is_down(project: Project) -> None:
    here = json.loads(type_in(project, "status", "--json").output)
    assert "served        not running" in screen(here)
    (line,) = [one for one in screen(here | {"platform": "google_cloud"}) if one[:8] == "served  "]
    assert "Vertex AI" in line
    wanted = here | {"wanted": 1}
    # A person who sees that nothing answers is told how to change that.
    told = [
        any("To serve it: " in line for line in screen(wanted | {"platform": name}))
        for name in ("local", "google_cloud")
    ]
    assert told == [True, False]


def test_what_others_print_stays_off_the_terminal_while_a_line_is_alive_there(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal, settings = StringIO(), load_settings(project.config)
    with Progress(Console(file=terminal, force_terminal=True), ["checkpoint"], settings):
        print("a log of Dagster's")
        print("a progress bar", file=sys.stderr)
    out, errors = capfd.readouterr()
    assert out == "a log of Dagster's\n" and errors == "a progress bar\n"
    assert "starting" in terminal.getvalue()
    assert "Dagster" not in terminal.getvalue() and "bar" not in terminal.getvalue()


def test_where_all_is_printed_on_the_terminal_the_living_line_is_taken_away_before_another(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(project.config)
    monkeypatch.setattr(sys, "stdout", terminal := StringIO())
    with Progress(Console(file=sys.stdout, force_terminal=True), ["checkpoint"], settings):
        print("a log of Dagster's")
        print("another")
    assert "\x1b[2Kanother\n" in terminal.getvalue()


def test_status_says_how_far_a_training_is(project: Project) -> None:
    store = project.record.store
    training = Identity(kind="checkpoint", code_version="1")
    step = {"step": 3, "steps": 9, "loss": 2.5, "seconds": 10.0, "tokens_per_second": 410.0}
    told: list[str] = []

    def train(draft: Draft) -> None:
        run = Path(store.root) / layout.run(training.fingerprint)
        run.mkdir(parents=True)
        for line in (json.dumps(step), "[]"):
            (run / METRICS_NAME).write_text(f"{line}\n")
            told.append(type_in(project, "status").output)

    store.make(training, train)
    progress = "step 3 of 9 · loss 2.500 · 410 tokens/s · about 1 min 0 s to go"
    assert f"making        checkpoint {progress}\n" in told[0]
    assert "a line is no step" in told[1] and "services" in told[1]
    assert "making" not in type_in(project, "status").output
