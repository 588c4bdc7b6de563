"""Dagster's history in a real PostgreSQL, which is started again while a run is under way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey, DagsterInstance, DagsterRun, DagsterRunStatus

from llm_assets.automation.launched import QUESTION_TAG, UNFINISHED
from llm_assets.config import load_settings
from llm_assets.endpoint.folder import endpoint_status
from llm_assets.registry.base import LocalRegistry
from llm_assets.services import STATE_FOLDER, find_leftovers
from tests.conftest import ROOT, Project
from tests.postgres import PASSWORD, Postgres, running_postgres
from tests.stand_ins.processes import free_port
from tests.waiting import wait_until

VARIABLE = "DAGSTER_POSTGRES_URL"
SECONDS = 900.0


def _keep_history_in_postgres(project: Project) -> None:
    """The one setting, as the comment in dagster.yaml says it."""
    path = project.folder / "dagster.yaml"
    said = next(line for line in path.read_text().splitlines() if line.startswith("#   storage:"))
    content = yaml.safe_load(path.read_text()) | yaml.safe_load(said.removeprefix("# "))
    content["run_monitoring"]["poll_interval_seconds"] = 5
    path.write_text(yaml.safe_dump(content))


@pytest.fixture
def postgres(monkeypatch: pytest.MonkeyPatch) -> Iterator[Postgres]:
    with running_postgres() as server:
        monkeypatch.setenv(VARIABLE, server.url)
        yield server


@pytest.fixture
def automated(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project that follows its text, its services up."""
    _keep_history_in_postgres(project)
    (project.folder / "workspace.yaml").write_text((ROOT / "workspace.yaml").read_text())
    monkeypatch.chdir(project.folder)
    project.configure(
        automation={
            "enabled": True,
            "check_seconds": 5,
            "quiet_minutes": 0,
            "retry_minutes": 0.05,
            "longer_attempts": 0,
        }
    )
    yield project
    project.run("llm-assets", "down")


def _wait(project: Project, condition: Callable[[], bool], what: str) -> None:
    log = project.folder / STATE_FOLDER / "daemon.log"
    wait_until(condition, SECONDS, 0.5, lambda: f"{what}: not in time\n{log.read_text()[-4000:]}")


def _runs(project: Project) -> list[DagsterRun]:
    with DagsterInstance.from_config(str(project.folder)) as instance:
        return [run for run in instance.get_runs() if QUESTION_TAG in run.tags]


@pytest.mark.soak
def test_nothing_is_lost_or_launched_twice_when_postgres_starts_again_during_a_run(
    postgres: Postgres, automated: Project
) -> None:
    ports = ("--port", str(free_port()), "--board-port", str(free_port()))
    up = automated.run("llm-assets", "up", *ports)
    assert up.returncode == 0, up.stdout + up.stderr
    trainings = automated.folder / "store" / "runs"
    _wait(automated, lambda: any(trainings.glob("*/program.log")), "a training")
    postgres.restart()
    settings = load_settings(automated.config)
    _wait(automated, lambda: endpoint_status(settings) is not None, "an endpoint")
    _wait(
        automated, lambda: not any(run.status in UNFINISHED for run in _runs(automated)), "the end"
    )
    ended = [run for run in _runs(automated) if run.status is DagsterRunStatus.SUCCESS]
    questions = [run.tags[QUESTION_TAG] for run in ended]
    assert questions and len(questions) == len(set(questions))
    versions = LocalRegistry.of(automated.record).state().versions
    assert [version.version for version in versions] == [0, 1]
    with DagsterInstance.from_config(str(automated.folder)) as instance:
        for asset in automated.record.history().assets:
            assert instance.get_latest_materialization_event(AssetKey(asset)), asset
    assert not (automated.folder / ".llm_assets" / "dagster" / "history").exists()
    _assert_password_is_nowhere(automated.folder)


def _assert_password_is_nowhere(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path
    for pid in find_leftovers(folder / STATE_FOLDER):
        assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, f"names the environment variable {VARIABLE}, which is not set here"),
        pytest.param(
            "postgresql+psycopg2://dagster:wrong-horse@127.0.0.1:1/postgres",
            "does not answer",
            marks=pytest.mark.soak,  # Dagster tries again for six seconds.
        ),
        ("postgresql://dagster:wrong-horse@127.0.0.1:1/postgres", "postgresql+psycopg2://"),
    ],
)
def test_a_database_that_cannot_be_reached_is_called_what_it_is(
    project: Project, monkeypatch: pytest.MonkeyPatch, address: str | None, message: str
) -> None:
    _keep_history_in_postgres(project)
    monkeypatch.delenv(VARIABLE, raising=False)
    if address:
        monkeypatch.setenv(VARIABLE, address)
    done = project.run("llm-assets", "status")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and message in done.stdout, said
    assert "champion" in done.stdout, "the rest of it is told"
    assert "Traceback" not in said and "wrong-horse" not in said
