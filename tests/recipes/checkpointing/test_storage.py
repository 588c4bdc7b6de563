"""Checkpoints in object storage, storage that fails for a while, and copies kept from steps."""

import errno
import uuid
from typing import Any, cast

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.retry import HttpError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from artifacts import checkpoints
from artifacts.errors import UserError
from artifacts.program.entry import Interrupted
from artifacts.program.lifetime import Interruption
from artifacts.storage import files
from recipes.checkpointing.checkpoint import Checkpointer, StagingBuffers
from recipes.distributed.strategy import FullySharded
from recipes.distributed.workers import join_workers
from recipes.model.causal_model import TrainableModel
from recipes.spec import read_metrics
from recipes.training.trainer import train
from tests.recipes.conftest import SpecMaker, course, fake_group, train_here
from tests.stand_ins.google import BUCKET, LocalGoogle


class FailingFileSystem(MemoryFileSystem):
    """Object storage that answers the next few requests to write, or to remove folders, with an
    error."""

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own form
    pseudo_dirs = [""]  # noqa: RUF012
    failures = 0
    failing_name = ""
    """End of the names that are not written; of all by default."""
    failed_removals = 0
    # As gcsfs raises it, whose errors are of no kind that Python has for files.
    error: Exception = HttpError({"code": 503, "message": "service unavailable"})

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        if self.isdir(path) and FailingFileSystem.failed_removals > 0:
            FailingFileSystem.failed_removals -= 1
            raise FailingFileSystem.error
        super().rm(path, recursive, maxdepth)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        fails = mode == "wb" and path.endswith(FailingFileSystem.failing_name)
        if fails and FailingFileSystem.failures > 0:
            FailingFileSystem.failures -= 1
            raise FailingFileSystem.error
        return super()._open(path, mode, **options)


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def checkpointer(url: str, model: nn.Module, lines: list[str]) -> Checkpointer:
    workers, optimizers = join_workers(), [torch.optim.AdamW(model.parameters())]
    strategy = FullySharded(cast(TrainableModel, model), optimizers, 1.0, "float32", workers.device)
    waits = (0.01, 0.01)
    return Checkpointer(strategy, url, {}, 2, False, workers, lines.append, retry_seconds=waits)


def test_a_run_goes_on_from_checkpoints_in_object_storage(make_spec: SpecMaker) -> None:
    plain = make_spec("plain", steps=8, checkpointing={"every_steps": 4})
    train_here(plain)
    remote = make_spec("remote", steps=8, checkpointing={"every_steps": 4}).model_copy(
        update={"checkpoints_url": "memory://bucket/runs/remote"}
    )
    interruption = Interruption()

    def stop_at_five(line: str) -> None:
        if line.startswith("step 1 of"):
            interruption.signal_name = "SIGTERM"

    with pytest.raises(Interrupted, match="step 1 of 8"):
        train(remote, join_workers(), interruption, stop_at_five)
    lines: list[str] = []
    train_here(remote, lines.append)

    assert any("Going on from the checkpoint of step 1" in line for line in lines)
    assert course(remote) == course(plain)
    assert fsspec.filesystem("memory").exists("/bucket/runs/remote/step-8/manifest.json")


@pytest.mark.fault(
    "Google Cloud",
    "storage fails while a checkpoint is saved (failures in a row: {failures})",
    sees="that it will be retried, and when",
    then="the checkpoint is saved",
)
@pytest.mark.parametrize("name", ["", "manifest.json"])
@pytest.mark.parametrize("failures", [1, 2])
def test_storage_that_comes_back_costs_nothing(
    model: nn.Module, failures: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    url = f"failing://bucket/run-{failures}{name}"
    saving = checkpointer(url, model, lines)
    FailingFileSystem.failures = failures
    monkeypatch.setattr(FailingFileSystem, "failing_name", name)

    saving.save(3, {"samples_seen": 12})

    assert len(lines) == failures
    assert "service unavailable, 503" in lines[0]
    expected = model.weight.clone()
    nn.init.zeros_(model.weight)
    assert checkpointer(url, model, lines).restore() == (3, {"samples_seen": 12})
    assert torch.equal(model.weight, expected)


@pytest.mark.fault(
    "Google Cloud",
    "storage stays unavailable while a checkpoint is saved",
    sees="storage's own error, and how often it was tried",
    then="no partial checkpoint is left",
)
def test_storage_that_stays_away_ends_the_save_and_leaves_no_checkpoint(model: nn.Module) -> None:
    lines: list[str] = []
    url = "failing://bucket/away"
    FailingFileSystem.failures = 100
    with pytest.raises(UserError, match=r"failed 3 times .service unavailable, 503"):
        checkpointer(url, model, lines).save(3, {})
    FailingFileSystem.failures = 0
    assert checkpoints.find_newest(url, {}, lines.append) is None


@pytest.mark.fault(
    "Google Cloud",
    "storage does not remove an older checkpoint (failures in a row: {failures})",
    sees="that the newer ones are whole",
    then="training goes on from the newest checkpoint; the older one is removed after the next",
)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOTEMPTY, "Directory not empty"), FailingFileSystem.error]
)
@pytest.mark.parametrize("failures", [1, 9])
def test_an_older_checkpoint_that_is_not_removed_spoils_no_newer_one(
    model: nn.Module, failures: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    url = f"failing://bucket/stays-{failures}-{type(error).__name__}"
    monkeypatch.setattr(FailingFileSystem, "error", error)
    saving = checkpointer(url, model, lines)
    for step in (1, 2):
        saving.save(step, {})
    FailingFileSystem.failed_removals = failures
    saving.save(3, {})
    FailingFileSystem.failed_removals = 0

    assert [line for line in lines if str(error) in line] == lines != []
    assert checkpointer(url, model, lines).restore() == (3, {})
    saving.save(4, {})
    assert [name for name in files.list_names(url) if name.startswith("step-")] == [
        "step-3",
        "step-4",
    ]


def test_a_folder_of_a_step_that_is_not_removed_at_once_is_tried_again(model: nn.Module) -> None:
    lines: list[str] = []
    url = "failing://bucket/again"
    saving = checkpointer(url, model, lines)
    saving.save(1, {})
    FailingFileSystem.failed_removals = 1
    saving.save(1, {"samples_seen": 4})
    assert len(lines) == 1 and "trying again" in lines[0]
    assert checkpointer(url, model, lines).restore() == (1, {"samples_seen": 4})


def test_figures_of_a_run_in_a_bucket_are_read_without_its_weights(google: LocalGoogle) -> None:
    folder = f"gs://{BUCKET}/runs/{uuid.uuid4().hex}"
    files.write(f"{folder}/metrics.jsonl", b'{"step": 1, "loss": 2.0}\n')
    files.write(f"{folder}/model/model.safetensors", b"weights")
    google.storage.clear()
    assert read_metrics(folder) == [{"step": 1, "loss": 2.0}]
    assert google.storage.requests
    assert not any("safetensors" in request.path for request in google.storage.requests)


def test_a_copy_for_a_checkpoint_stays_on_the_host() -> None:
    """A mesh of another device than the host's memory, as that of a GPU is."""
    with fake_group(2):
        mesh = DeviceMesh("meta", [0, 1], _init_backend=False)
        spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32))
        held = DTensor(torch.arange(4.0).view(2, 2), spec, requires_grad=False)
        copied = StagingBuffers().copy({"weight": held}, None)["weight"]
    assert copied.to_local().device.type == "cpu" and copied.to_local().equal(held.to_local())
    assert (copied.shape, copied.placements) == (held.shape, held.placements)
