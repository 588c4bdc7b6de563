"""The laptop's asset code on Google Cloud: Spark batches, two training replicas, a pre-emption."""

import threading
import time
from pathlib import Path

import pytest
import yaml

from artifacts.pipelines import Pipeline
from artifacts.store import CACHE_VARIABLE, Store
from llm_assets.cloud.config import CLOUD_CONFIG_VARIABLE
from tests.conftest import Project, make_project
from tests.stand_ins.google import LocalGoogle
from tests.stand_ins.project import move_to_cloud


@pytest.fixture
def cloud_project(
    google: LocalGoogle,
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    """The tiny project, its store in the bucket and its platform the cloud."""
    project = make_project(tmp_path / "project", tiny_model_folder)
    cloud_path = move_to_cloud(project.config, google)
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return project


def preempt_once_a_checkpoint_is_there(google: LocalGoogle, done: list[str]) -> None:
    """Take the training's machines away after its first committed checkpoint."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        time.sleep(0.2)
        written = list(google.mount.folder.rglob("step-*/manifest.json"))
        running = [job for job in google.vertex.jobs() if job.state.name == "JOB_STATE_RUNNING"]
        if written and running:
            google.vertex.preempt(running[0].name)
            done.append(running[0].name)
            return


def program_logs(google: LocalGoogle) -> str:
    """What all programs printed, for the failure's sake."""
    batches = [google.dataproc.log(batch.name) for batch in google.dataproc.batches()]
    jobs = [str(google.vertex.logs(job.name)) for job in google.vertex.jobs()]
    return "\n".join(batches + jobs)


@pytest.mark.soak
def test_whole_graph_with_two_replicas_and_a_preemption(
    google: LocalGoogle, cloud_project: Project
) -> None:
    cloud_project.configure(checkpoint={"steps": 60, "checkpoint_every_steps": 10})
    preempted: list[str] = []
    watcher = threading.Thread(
        target=preempt_once_a_checkpoint_is_there, args=(google, preempted), daemon=True
    )
    watcher.start()
    made = cloud_project.materialize("*model_version")
    assert made.returncode == 0, made.stdout + made.stderr + program_logs(google)
    (name,) = preempted
    assert google.vertex.starts(name) == 2
    settings = yaml.safe_load(cloud_project.config.read_text())
    record = Pipeline(Store(settings["store"]), "manual")
    checkpoint = record.current("checkpoint", needed_by="test")
    assert checkpoint.stats["steps"] == 60 and checkpoint.stats["workers"] == 2
    assert (checkpoint.path / "model" / "config.json").exists()
    assert len(google.dataproc.batches()) == 2
    assert len(google.vertex.jobs()) == 2
    again = cloud_project.materialize("*model_version")
    assert again.returncode == 0
    assert len(google.dataproc.batches()) == 2 and len(google.vertex.jobs()) == 2
