"""The laptop's asset code on Google Cloud, killed in each stage; text that is copied by a batch.

`tests/stand_ins/test_demo.py` runs the same graph unbroken, up to an endpoint.
"""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey, DagsterInstance

from artifacts.checkpoints import newest_step
from artifacts.storage import files
from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store.layout import RUNS_FOLDER
from artifacts.store.store import Store
from llm_assets.cloud.settings import CLOUD_CONFIG_VARIABLE
from recipes.tpu.device import TPU_VARIABLE
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import write_snapshot
from tests.conftest import Project, make_project
from tests.recipes.conftest import settings_of
from tests.stand_ins.bigquery import fill_table, running_bigquery
from tests.stand_ins.google import BUCKET, PROJECT, REGION, LocalGoogle
from tests.stand_ins.processes import LocalImage
from tests.stand_ins.project import TEXTS_TABLE, move_to_cloud
from tests.tiny import tiny_texts
from tests.waiting import wait_until

TPU_IMAGE = "somewhere/tpu:1"
STEPS = 60
"""Of a training that is not done when its first checkpoint is."""


@pytest.fixture
def cloud_project(
    google: LocalGoogle,
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Project]:
    """The tiny project with its text in BigQuery, its store in a bucket and a cloud platform."""
    project = make_project(tmp_path / "project", tiny_model_folder)
    cloud_path = move_to_cloud(project.config, google)
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with running_bigquery(PROJECT, google.mount) as client:
        texts = {f"section-{number:04d}": text for number, text in enumerate(tiny_texts(240))}
        fill_table(client, TEXTS_TABLE, texts)
        yield project


def jobs(google: LocalGoogle) -> list[tuple[str, str]]:
    """Every batch and custom job that was ever submitted: name and state."""
    batches = [(batch.name, batch.state.name) for batch in google.dataproc.jobs()]
    custom_jobs = [(job.name, job.state.name) for job in google.vertex.jobs()]
    return batches + custom_jobs


def wait_for_jobs(google: LocalGoogle, count: int) -> None:
    wait_until(lambda: len(jobs(google)) == count)


def program_logs(google: LocalGoogle) -> str:
    """What all programs printed, for the failure's sake."""
    batches = [google.dataproc.log(batch.name) for batch in google.dataproc.jobs()]
    custom_jobs = [str(google.vertex.logs(job.name)) for job in google.vertex.jobs()]
    return "\n".join(batches + custom_jobs)


@pytest.mark.fault(
    "Google Cloud",
    "Dagster killed in each stage",
    sees="the run's process is gone",
    then="no job is lost or repeated",
)
@pytest.mark.soak
def test_run_killed_in_each_stage_neither_loses_nor_repeats_a_job(
    google: LocalGoogle, cloud_project: Project
) -> None:
    for stage in range(1, 5):
        command = ["dagster", "asset", "materialize", "--select", "*model_version"]
        run = subprocess.Popen(
            command,
            cwd=cloud_project.folder,
            env=cloud_project.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for_jobs(google, stage)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    made = cloud_project.materialize("*model_version")
    assert made.returncode == 0, made.stdout + made.stderr + program_logs(google)
    ended = jobs(google)
    assert len(ended) == 4, ended
    assert all(state.endswith("SUCCEEDED") for _, state in ended)


@pytest.mark.soak
def test_one_command_makes_the_graph_on_machines_of_batch_and_leaves_none(
    google: LocalGoogle, cloud_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud_project.configure(
        training={"runner": "google_batch"}, checkpoint={"budget": {"steps": STEPS}}
    )
    runs = yaml.safe_load(cloud_project.config.read_text())["store"] + f"/{RUNS_FOLDER}"
    saved: list[int] = []

    def newest() -> int:
        """Step of the only training's newest checkpoint."""
        return max(
            (newest_step(f"{runs}/{name}") or 0 for name in files.list_names(runs)), default=0
        )

    def preempt_once_saved() -> None:
        """Take a spot machine away in the midst of the training."""
        wait_until(newest)
        saved.append(newest())
        google.batch.preempt(google.batch.jobs()[0].name)

    threading.Thread(target=preempt_once_saved, daemon=True).start()
    made = cloud_project.materialize("*model_version")

    logs = [google.batch.logs(job.name) for job in google.batch.jobs()]
    assert made.returncode == 0, made.stdout + made.stderr + program_logs(google) + str(logs)
    states = [job.status.state.name for job in google.batch.jobs()]
    assert states == ["FAILED", "SUCCEEDED", "SUCCEEDED"] and google.vertex.jobs() == []
    # Two for each try of the training and one for the evaluation.
    assert len(google.batch.bill) == 5
    wait_until(lambda: not google.batch.billing())
    assert "due to Spot VM preemption" in made.stderr
    assert "starting it again, 1 of at most" in made.stderr
    said = made.stdout + made.stderr
    (step,) = re.findall(r"Going on from the checkpoint of step (\d+)", said)
    assert 0 < saved[0] <= int(step) < STEPS
    # Where dagster.yaml's own paths begin.
    monkeypatch.chdir(cloud_project.folder)
    with DagsterInstance.from_config(str(cloud_project.folder)) as instance:
        event = instance.get_latest_materialization_event(AssetKey("checkpoint"))
    assert event is not None and event.asset_materialization is not None
    shown = {name: value.value for name, value in event.asset_materialization.metadata.items()}
    hours = float(str(shown["billed"]).split()[0])
    assert shown["spot_share"] == 1.0 and 0 <= float(str(shown["hours_lost"])) < hours / 2


@pytest.mark.soak
def test_one_command_makes_the_graph_with_a_tpu_machine_and_leaves_none(
    google: LocalGoogle, cloud_project: Project
) -> None:
    """XLA's CPU backend stands for the chips."""
    python = settings_of(device="tpu").placement.python()
    variables = {TPU_VARIABLE: "CPU", "CPU_NUM_DEVICES": "4"}
    google.images[TPU_IMAGE] = LocalImage(
        entrypoint=[python, "-m", "recipes.launcher"], environment=variables
    )
    path = Path(os.environ[CLOUD_CONFIG_VARIABLE])
    cloud = yaml.safe_load(path.read_text())
    machine = {"machine_type": "ct5lp-hightpu-4t", "zones": [f"{REGION}-a"], "replicas": 1}
    cloud["training"] |= machine
    cloud["images"]["tpu"] = TPU_IMAGE
    path.write_text(yaml.safe_dump(cloud))
    placement = {"device": "tpu", "device_batch_size": 1}
    cloud_project.configure(training={"runner": "tpu_vm"}, checkpoint={"placement": placement})

    made = cloud_project.materialize("*model_version")

    logs = [google.tpu.log(job.name) for job in google.tpu.jobs()]
    assert made.returncode == 0, made.stdout + made.stderr + str(logs)
    assert len(google.tpu.bill) == 1 and google.vertex.jobs() == []
    assert [job.status.state.name for job in google.batch.jobs()] == ["SUCCEEDED"]
    assert "4 chips" in made.stdout + made.stderr + logs[0]
    wait_until(lambda: not google.tpu.billing() and not google.batch.billing())


@pytest.mark.soak
@pytest.mark.parametrize(("runner", "batches"), [("google_cloud", ["SUCCEEDED"]), ("local", [])])
def test_text_in_a_bucket_is_copied_by_tasks_with_the_bytes_of_one_process(
    google: LocalGoogle, cloud_project: Project, tmp_path: Path, runner: str, batches: list[str]
) -> None:
    project, folder = cloud_project, f"gs://{BUCKET}/manuals"
    for number, text in enumerate(tiny_texts(60)):
        row = {"id": f"{number % 50}", "text": text}
        files.write(f"{folder}/{number:02d}.jsonl", json.dumps(row).encode())
    (table,) = yaml.safe_load(project.config.read_text())["raw_corpus"]["sources"]
    sources = [table, {"type": "files", "name": "manual", "path": folder, "id_column": "id"}]
    project.configure(
        raw_corpus={"sources": sources}, spark={"copied_by_process": 0, "runner": runner}
    )

    made = [project.materialize("raw_corpus") for _ in range(2)]

    assert all(run.returncode == 0 for run in made), made[0].stdout + program_logs(google)
    assert [batch.state.name for batch in google.dataproc.jobs()] == batches
    assert "MB of files in buckets" in made[0].stderr and "exists already" in made[1].stderr
    settings = RawCorpusSettings.model_validate({"sources": sources})
    stats = write_snapshot(settings, tmp_path / "expected", lambda line: None)
    store = Store(yaml.safe_load(project.config.read_text())["store"])
    (fingerprint,) = store.list_folder("raw_corpus")
    artifact = store.load("raw_corpus", fingerprint)
    artifact.verify()
    assert artifact.stats == stats and stats["repeated_ids"] == 10
    expected = {file.name: file.read_bytes() for file in (tmp_path / "expected").iterdir()}
    found = {entry.path for entry in artifact.manifest.files}
    assert {name: files.read(f"{artifact.url}/{name}") for name in found} == expected
