"""Training whose folders are in a bucket that is mounted as Cloud Storage FUSE mounts it."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage
from google.cloud.aiplatform_v1 import JobState

from artifacts.storage import files
from artifacts.storage.transfer import download_folder, remote_entries, upload_folder
from recipes.spec import TrainingResult, TrainingSpec, read_metrics
from recipes.training import telemetry
from tests.needs import FUSE, needs
from tests.recipes.conftest import SpecMaker, planned, settings_of, train_here
from tests.recipes.launcher.test_launcher import submit
from tests.stand_ins.google import BUCKET, HIERARCHICAL_BUCKET, LocalGoogle

pytestmark = needs(*FUSE)


@pytest.fixture(params=[BUCKET, HIERARCHICAL_BUCKET])
def folder(request: pytest.FixtureRequest, google: LocalGoogle) -> Path:
    """A fresh folder of each kind of bucket, as a machine sees it."""
    name = uuid.uuid4().hex
    return google.mount.view(name) / request.param / name


def moved_to(folder: Path, spec: TrainingSpec) -> TrainingSpec:
    """The spec with all that it writes in a folder."""
    places = {"run_folder": str(folder / "run"), "export_folder": str(folder / "model")}
    return spec.model_copy(update=places)


def names(folder: Path) -> set[str]:
    """Objects below a folder, placeholders left out."""
    found = storage.Client().list_blobs(folder.parent.name, prefix=f"{folder.name}/")
    names = {blob.name[len(folder.name) + 1 :] for blob in found}
    return {name for name in names if name and not name.endswith("/")}


def test_a_run_leaves_its_model_and_records_in_the_bucket(
    make_spec: SpecMaker, folder: Path, tmp_path: Path
) -> None:
    # A learning rate that first helps and then ruins the model: an earlier step is exported.
    schedule = {"warmup_steps": 16, "decay_fraction": 0.0}
    often = {"validation": {"every_steps": 2}, "checkpointing": {"every_steps": 4}}
    spec = make_spec(steps=16, learning_rate=0.5, weights="best", schedule=schedule, **often)
    result = train_here(moved_to(folder, spec))
    assert 0 < result.best_step < result.steps
    left = names(folder)
    assert {
        "run/result.json",
        "run/metrics.jsonl",
        f"run/step-{result.steps}/manifest.json",
    } <= left
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= left
    assert any(name.startswith("run/tensorboard/events.out.tfevents.") for name in left)

    url = f"gs://{folder.parent.name}/{folder.name}/model"
    entries = remote_entries(url)
    assert [entry.path for entry in entries if not entry.bytes] == []
    download_folder(url, entries, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_text() == (
        folder / "model" / "config.json"
    ).read_text()


def test_figures_are_in_the_bucket_while_training_goes_on(
    make_spec: SpecMaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_FOLDER", str(folder / "logs"))
    monkeypatch.setattr(telemetry, "SECONDS_BETWEEN_PUBLICATIONS", 0.0)
    monkeypatch.setattr(telemetry, "SECONDS_BETWEEN_LINES", 0.0)
    spec = moved_to(folder, make_spec(steps=3)).model_copy(update={"title": "manual-1a2b"})
    seen: dict[str, set[str]] = {}
    train_here(spec, lambda line: seen.update({line.split(" ·")[0]: names(folder)}))
    assert "run/metrics.jsonl" in seen["step 3 of 3"]
    assert any(
        name.startswith("logs/manual-1a2b/events.out.tfevents.") for name in seen["step 3 of 3"]
    )
    assert [line["step"] for line in read_metrics(folder / "run")] == [1, 2, 3]


TORCHTUNE = {
    "recipe": "torchtune",
    "run": "full_finetune_distributed",
    "config": "llama3_2/1B_full",
    "overrides": {
        "compile": False,
        "optimizer_in_bwd": False,
        "dtype": "fp32",
        "max_steps_per_epoch": 6,
    },
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"steps": 6}, id="ours"),
        pytest.param(TORCHTUNE, id="torchtune", marks=pytest.mark.soak),
    ],
)
def test_two_machines_train_one_model_each_through_a_mount_of_its_own(
    make_spec: SpecMaker, google: LocalGoogle, settings: dict[str, Any]
) -> None:
    root = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    every = {"checkpointing": {"every_steps": 3}, "validation": {"every_steps": 3}}
    training = settings_of(**settings, **every)
    spec = planned(make_spec().model_copy(update={"training": training}), 2)
    for name in ("base_model_folder", "shards_folder"):
        upload_folder(Path(getattr(spec, name)), f"{root}/{name}", f"{root}/uploads")
    places = {name: f"{root}/{name}" for name in ("base_model_folder", "shards_folder")}
    places |= {"run_folder": f"{root}/run", "export_folder": f"{root}/model"}
    files.write(f"{root}/spec.json", spec.model_copy(update=places).model_dump_json().encode())
    program = ["--processes", "1", "--spec", f"{root}/spec.json"]
    job = submit(google, [*program, "--", "-m", "recipes.continued_pretraining"], replicas=2)
    assert job.state is JobState.JOB_STATE_SUCCEEDED, google.vertex.logs(job.name)
    result = TrainingResult.model_validate_json(files.read(f"{root}/run/result.json"))
    assert (result.steps, result.workers) == (6, 2)
    assert result.samples_seen == 6 * spec.training.budget.global_batch_size
    assert "config.json" in files.list_sizes(f"{root}/model")
