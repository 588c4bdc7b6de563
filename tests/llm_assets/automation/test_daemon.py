"""A folder, a pipeline file and a running daemon: nothing else is done, and the endpoint follows.

The daemon is Dagster's own, the trainings are real, and everything is killed somewhere on the way.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from llm_assets.automation.launched import QUESTION_TAG
from llm_assets.config import load_settings
from llm_assets.endpoint.folder import endpoint_status
from llm_assets.registry.base import LocalRegistry
from tests.conftest import Project, make_project
from tests.listening import descendants
from tests.tiny import tiny_texts
from tests.waiting import wait_until

pytestmark = pytest.mark.soak
SECONDS = 1800.0
"""In which one change reaches the endpoint, or is rejected, beside other work."""


class Watched:
    """The project, its daemon, and what both have come to."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.daemon: subprocess.Popen[bytes] | None = None

    def start_daemon(self) -> None:
        with (self.project.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                ["dagster-daemon", "run", "-m", "llm_assets.definitions"],
                cwd=self.project.folder,
                env=self.project.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_daemon(self) -> None:
        """End the daemon and all that it started at once, as a power failure does."""
        assert self.daemon is not None
        for pid in reversed(descendants(self.daemon.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.daemon.wait()

    def runs(self, *statuses: DagsterRunStatus) -> list[DagsterRun]:
        with DagsterInstance.from_config(str(self.project.folder)) as instance:
            chosen = RunsFilter(statuses=list(statuses)) if statuses else None
            return [run for run in instance.get_runs(chosen) if QUESTION_TAG in run.tags]

    @property
    def served(self) -> str | None:
        found = endpoint_status(load_settings(self.project.config))
        versions = [route.version for route in found.routes if route.share == 1] if found else []
        return versions[0] if versions else None

    @property
    def registry(self) -> LocalRegistry:
        return LocalRegistry(Path(self.project.record.store.root), "manual")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        log = self.project.folder / "daemon.log"
        wait_until(
            condition, SECONDS, 0.5, lambda: f"{what}: not in time\n{log.read_text()[-6000:]}"
        )

    def wait_idle(self) -> None:
        """Until nothing is under way."""
        unfinished = [DagsterRunStatus.QUEUED, DagsterRunStatus.STARTING, DagsterRunStatus.STARTED]
        self.wait(lambda: not self.runs(*unfinished), "the end of all runs")


@pytest.fixture
def watched(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watched]:
    project = make_project(tmp_path / "project", tiny_model_folder)
    # The history's folder is relative to where one is.
    monkeypatch.chdir(project.folder)
    (project.folder / "noise").mkdir()
    (project.folder / "noise" / "first.txt").write_text("The first page of a notebook. " * 3)
    sources = [
        {"type": "files", "name": name, "path": str(project.folder / name)}
        for name in ("text", "noise")
    ]
    split = {"validation": 0.1, "held_out": 0.25, "sources": {"noise": "train"}}
    project.configure(
        raw_corpus={"sources": sources},
        clean_corpus={"split": split},
        # With seen text among it, a model this young still learns from a delivery of noise.
        checkpoint={"order": {"seen_share": 0.0}},
        automation={
            "enabled": True,
            "check_seconds": 5,
            "quiet_minutes": 0.02,
            "retry_minutes": 0.05,
            "longer_attempts": 0,
        },
    )
    one = Watched(project)
    one.start_daemon()
    yield one
    one.kill_daemon()
    project.run("llm-assets", "stop")


def test_endpoint_follows_the_text_with_a_daemon_and_nothing_else(watched: Watched) -> None:
    text = watched.project.folder / "text"
    watched.wait(lambda: watched.served is not None, "the first version")
    watched.wait_idle()
    first = watched.served

    for number, content in enumerate(tiny_texts(160, seed=7)):
        (text / f"new-{number:04d}.txt").write_text(content.replace("valve", "turbine"))
    watched.wait(lambda: len(watched.runs()) == 2, "a run for the new text")
    watched.kill_daemon()
    watched.start_daemon()
    watched.wait(lambda: watched.served not in (None, first), "a version that knows the new text")
    watched.wait_idle()
    second = watched.served
    champion = watched.registry.find("champion")
    assert champion is not None and str(champion.version) == second
    _assert_asked_once_each(watched)

    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(120):
        words = ("".join(generator.choices(letters, k=6)) for _ in range(150))
        noise = watched.project.folder / "noise" / f"{number:04d}.txt"
        noise.write_text(" ".join(words) + ".")
    before = len(watched.registry.state().versions)
    watched.wait(lambda: len(watched.registry.state().versions) > before, "a model of the noise")
    watched.wait_idle()
    time.sleep(5)
    assert watched.served == second
    assert not watched.registry.state().verdicts[-1].promoted
    _assert_asked_once_each(watched)

    for number, content in enumerate(tiny_texts(200, seed=8)):
        (text / f"last-{number:04d}.txt").write_text(content.replace("pump", "compressor"))
    watched.wait(lambda: bool(_training(watched)), "a training")
    os.kill(_run_process(watched), signal.SIGKILL)
    watched.wait(lambda: bool(watched.runs(DagsterRunStatus.FAILURE)), "the run's failure")
    watched.wait(
        lambda: len(watched.registry.state().versions) > before + 1, "a model of the last text"
    )
    watched.wait_idle()
    assert len(watched.runs(DagsterRunStatus.SUCCESS)) >= 4
    trained = (watched.project.folder / "store" / "runs").glob("*/result.json")
    assert not [state for result in trained for state in result.parent.glob("step-*")]


def _assert_asked_once_each(watched: Watched) -> None:
    """No question was put twice to a run that could end."""
    ended = [run.tags[QUESTION_TAG] for run in watched.runs(DagsterRunStatus.SUCCESS)]
    assert len(ended) == len(set(ended))


def _training(watched: Watched) -> list[Path]:
    """Folders of trainings that have begun and not ended."""
    runs = watched.project.folder / "store" / "runs"
    begun = [path for path in runs.glob("*") if (path / "program.log").exists()]
    return [path for path in begun if not (path / "result.json").exists()]


def _run_process(watched: Watched) -> int:
    """The process of the run that is under way."""
    (run,) = watched.runs(DagsterRunStatus.STARTED)
    assert watched.daemon is not None
    for pid in descendants(watched.daemon.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"spawn_main" in command and any(
            b"recipes" in Path(f"/proc/{child}/cmdline").read_bytes() for child in descendants(pid)
        ):
            return pid
    raise AssertionError(f"no process of run {run.run_id}")
