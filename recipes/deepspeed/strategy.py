"""DeepSpeed's ZeRO behind the interface of every strategy: its engine, and its state on disk."""

import argparse
import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from artifacts.errors import UserError
from artifacts.storage import files
from recipes.data.batch import Batch, ExampleBatch
from recipes.deepspeed.settings import DeepSpeedSettings, configuration, contradictions
from recipes.device import device_of
from recipes.distributed.strategy import Strategy, Update
from recipes.distributed.workers import Workers
from recipes.launcher.local import LOOPBACK_INTERFACE
from recipes.model.causal_model import TrainableModel
from recipes.optimization import adamw, set_learning_rate
from recipes.quiet import silence_libraries
from recipes.settings import OptimizerSettings, Precision
from recipes.spec import TrainingSpec


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves the weights as they are where the step's gradient is not usable.

    DeepSpeed measures the gradient and steps the optimizer in one call, part by part of the
    weights, so this is where a step can still be left out.
    """

    is_usable: Callable[[], bool] = staticmethod(lambda: True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the part of the weights that DeepSpeed has put into the groups."""
        return super().step(closure) if self.is_usable() else None


def check_configuration(configuration: dict[str, Any]) -> None:
    """Refuse, before a model is read, what DeepSpeed would refuse once it is.

    Raises:
        UserError: naming the key, or what this machine lacks.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = configuration["zero_optimization"]
    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise UserError(
            "`checkpoint.placement.deepspeed.configuration`: DeepSpeed refuses "
            f"zero_optimization.{key}: {fault['msg']}."
        ) from None
    devices = [section.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")]
    if "nvme" in devices and not AsyncIOBuilder().is_compatible():
        raise UserError(
            "`checkpoint.placement.deepspeed` offloads to nvme, for which this machine lacks "
            "libaio and its headers (Debian: libaio-dev) or a C++ compiler. Install them, or "
            "offload to cpu."
        )


def start_engine(
    model: TrainableModel,
    optimizer: OptimizerSettings,
    configuration: dict[str, Any],
    workers: Workers,
) -> tuple[Any, GuardedAdamW]:
    """Divide the model, which is changed in place, and what trains it over the workers."""
    if not dist.is_initialized():
        _form_group_of_one(workers.device)
    import deepspeed

    # Its import sets the level of its log again.
    silence_libraries()
    # It would compile an operator for inference at its first start, for minutes.
    deepspeed.ops.__compatible_ops__ = {}
    inner = adamw([p for p in model.parameters() if p.requires_grad], optimizer, GuardedAdamW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=configuration)
    return engine, inner


def _form_group_of_one(device: torch.device) -> None:
    """The process group that DeepSpeed wants of a single worker too; nobody can connect to it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = device_of(device).group_backend
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


MARKER = "zero.json"
FOLDER = "zero"
"""DeepSpeed's name for a checkpoint below the folder that it is told to save to."""


def write_state(engine: Any, url: str, workers: Workers, scratch: Path) -> None:
    """Write each worker's part of weights and optimizer into an empty folder.

    Raises:
        OSError: storage failed; on every worker.
    """
    folder = Path(url) if files.is_local(url) else _empty(scratch / "saving", workers)
    engine.save_checkpoint(
        str(folder), tag=FOLDER, save_latest=False, exclude_frozen_parameters=True
    )
    if workers.is_rank_zero:
        (folder / MARKER).write_text(json.dumps(_layout(engine, workers)))
    workers.barrier()
    if not files.is_local(url):
        _upload(folder, url, workers)
        _empty(folder, workers)


def read_state(engine: Any, url: str, workers: Workers, scratch: Path) -> None:
    """Load what `write_state` wrote, by any number of workers.

    Raises:
        UserError: it was written at another stage.
    """
    folder = Path(url)
    if not files.is_local(url):
        folder = _empty(scratch / "reading", workers)
        if workers.is_local_rank_zero:
            _download(url, folder)
        workers.barrier()
    written, wanted = json.loads((folder / MARKER).read_text()), _layout(engine, workers)
    if written["stage"] != wanted["stage"]:
        raise UserError(
            f"{url} was written at stage {written['stage']}, but "
            f"`checkpoint.placement.deepspeed.stage` is {wanted['stage']}. Go on at stage "
            f"{written['stage']}."
        )
    if written == wanted:
        engine.load_checkpoint(str(folder), tag=FOLDER, load_module_strict=False)
    else:
        _read_universally(engine, folder, workers, scratch)
    workers.barrier()
    _empty(scratch, workers)


def _layout(engine: Any, workers: Workers) -> dict[str, Any]:
    """What has to be the same for the state to be read part by part."""
    zero = engine._config.zero_config
    return {
        "workers": workers.count,
        "stage": int(engine.zero_optimization_stage()),
        "sub_group_size": zero.sub_group_size,
        "offload_optimizer": zero.offload_optimizer.device if zero.offload_optimizer else "none",
    }


def _read_universally(engine: Any, folder: Path, workers: Workers, scratch: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main as convert

    universal = _empty(scratch / "universal", workers)
    if workers.is_local_rank_zero:
        arguments = argparse.Namespace(
            input_folder=str(folder / FOLDER),
            output_folder=str(universal / FOLDER),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            convert(arguments)
    workers.barrier()
    groups = [_hyperparameters(group) for group in engine.optimizer.param_groups]
    engine._config.load_universal_checkpoint = True
    engine.load_checkpoint(str(universal), tag=FOLDER, load_module_strict=False)
    engine._config.load_universal_checkpoint = False
    # It gives every group the first one's settings, and all parts one counter of steps.
    for group, before in zip(engine.optimizer.param_groups, groups, strict=True):
        group |= before
    for part in engine.optimizer.optimizer.state.values():
        part["step"] = torch.as_tensor(part["step"]).clone()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _upload(folder: Path, url: str, workers: Workers) -> None:
    failed: OSError | None = None
    if workers.is_local_rank_zero:
        try:
            for path in filter(Path.is_file, sorted(folder.rglob("*"))):
                files.upload(path, f"{url}/{path.relative_to(folder).as_posix()}")
        except OSError as error:
            failed = error
    (failures,) = workers.sum(failed is not None)
    if failures:
        raise failed or OSError("another worker could not write its part")


def _download(url: str, folder: Path) -> None:
    for name in files.list_sizes(url):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.download(f"{url}/{name}", path)


def _empty(folder: Path, workers: Workers) -> Path:
    """An empty folder of this machine, the same for all its workers."""
    workers.barrier()
    if workers.is_local_rank_zero:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    workers.barrier()
    return folder


class Zero(Strategy):
    """A model whose training state, gradients or weights DeepSpeed divides over the workers."""

    name = "DeepSpeed"
    marker = MARKER
    saves_in_background = False

    def __init__(
        self,
        model: TrainableModel,
        optimizer: OptimizerSettings,
        configuration: dict[str, Any],
        workers: Workers,
        scratch: Path,
    ) -> None:
        """Divide a model, which is changed in place.

        Args:
            configuration: of `recipes.settings.deepspeed_configuration`.
            scratch: a folder of this machine for checkpoints on their way.
        """
        self.model, self._workers, self._scratch = model, workers, scratch
        self._engine, self._optimizer = start_engine(model, optimizer, configuration, workers)

    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        loss: torch.Tensor = self._engine(batch.to(self._workers.device))
        return loss

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(
        self,
        learning_rate: float,
        largest_norm: float,
        is_finite: Callable[[], bool],
        before_update: Callable[[], None],
    ) -> Update:
        has_loss = is_finite()

        def is_usable() -> bool:
            norm = self._norm()
            return has_loss and math.isfinite(norm) and norm <= largest_norm

        before_update()
        set_learning_rate([self._engine.optimizer], learning_rate)
        self._optimizer.is_usable = is_usable
        self._engine.step()
        return Update(self._norm(), not is_usable())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, held in self.model.state_dict().items():
            parameter = parameters.get(name)
            if parameter is None:
                found = held
            elif parameter.requires_grad:
                found = safe_get_full_fp32_param(parameter)
            else:
                with GatheredParameters([parameter]):
                    found = parameter.detach().clone()
            yield name, found.detach().float().cpu()

    def tensors(self) -> dict[str, Any]:
        # DeepSpeed writes its own state.
        return {}

    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        write_state(self._engine, url, self._workers, self._scratch)

    def read(self, url: str) -> None:
        read_state(self._engine, url, self._workers, self._scratch)

    def _norm(self) -> float:
        # The engine's own accessor knows it only after the step.
        return float(self._engine.optimizer._global_grad_norm)


def build(
    spec: TrainingSpec,
    workers: Workers,
    precision: Precision,
    build_model: Callable[[], TrainableModel],
) -> Zero:
    """Raises UserError where a user's configuration cannot be used, before the model is read."""
    training, settings = spec.training, spec.training.placement.strategy
    assert isinstance(settings, DeepSpeedSettings)
    if faults := contradictions(settings, precision, training):
        raise UserError("; ".join(f"`checkpoint.{fault}`" for fault in faults))
    told = configuration(
        precision == "bfloat16",
        training.budget.global_batch_size,
        workers.count,
        training.placement.device_batch_size,
        training.optimizer.gradient_clip,
        settings,
    )
    check_configuration(told)
    scratch = Path(spec.run_folder) / f".zero-{workers.rank - workers.local_rank}"
    return Zero(build_model(), training.optimizer, told, workers, scratch)
