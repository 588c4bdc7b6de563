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
from artifacts.settings import first_fault
from artifacts.storage import files
from recipes.data.batch import Batch, ExampleBatch
from recipes.deepspeed.settings import configuration
from recipes.distributed.strategy import Strategy, Update, UpdateRule
from recipes.distributed.workers import Workers, form_group_of_one
from recipes.model.causal_model import TrainableModel
from recipes.optimization import adamw, set_learning_rate
from recipes.quiet import silence_libraries
from recipes.sections import OptimizerSettings
from recipes.settings import Precision
from recipes.spec import TrainingSpec


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves the weights as they are where the step's gradient is not usable.

    DeepSpeed measures the gradient and steps the optimizer in one call, one part of the weights
    after another, so only the optimizer itself can still leave out a step.
    """

    is_usable: Callable[[], bool] = staticmethod(lambda: True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the part of the weights that DeepSpeed has put into the groups."""
        return super().step(closure) if self.is_usable() else None


MARKER = "zero.json"
FOLDER = "zero"
"""DeepSpeed's name for a checkpoint below the folder that it is told to save to."""


def check_configuration(configuration: dict[str, Any]) -> None:
    """Refuse, before a model is read, what DeepSpeed would refuse once it is; the UserError names
    the key, or what this machine lacks."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = configuration["zero_optimization"]
    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        raise UserError(
            "`checkpoint.placement.deepspeed.configuration`: DeepSpeed refuses "
            f"zero_optimization.{first_fault(error)}."
        ) from None
    offloads = (section.get(key) or {} for key in ("offload_optimizer", "offload_param"))
    devices = [offload.get("device") for offload in offloads]
    if "nvme" in devices and not AsyncIOBuilder().is_compatible():
        raise UserError(
            "`checkpoint.placement.deepspeed` offloads to nvme, for which this machine lacks "
            "libaio and its headers (Debian: libaio-dev) or a C++ compiler. Install them, or "
            "offload to cpu."
        )


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
        """Divide a model, which is changed in place; checkpoints on their way are in a scratch
        folder of this machine."""
        # DeepSpeed reads it, and one worker alone has no launcher that sets it.
        os.environ.setdefault("LOCAL_RANK", "0")
        form_group_of_one(workers.device)
        import deepspeed

        # Its import sets the level of its log again.
        silence_libraries()
        # It would compile an operator for inference at its first start, for minutes.
        deepspeed.ops.__compatible_ops__ = {}
        self.model, self._workers, self._scratch = model, workers, scratch
        self._optimizer = adamw(model, optimizer, GuardedAdamW)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self._optimizer, config=configuration
        )

    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        # DeepSpeed casts by itself, as `torch_autocast` of its configuration says.
        return self._engine(batch.to(self._workers.device))

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        # `train_step` has scaled the loss already, by the targets of all passes.
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self, rule: UpdateRule) -> Update:
        has_loss = rule.is_finite()

        def is_usable() -> bool:
            norm = self._norm()
            return has_loss and math.isfinite(norm) and norm <= rule.largest_norm

        # Also before a step that is then left out: only within `step` is the norm known.
        rule.before_update()
        set_learning_rate([self._engine.optimizer], rule.learning_rate)
        self._optimizer.is_usable = is_usable
        self._engine.step()
        return Update(self._norm(), not is_usable())

    def _norm(self) -> float:
        # The engine's own accessor knows it only after the step.
        return float(self._engine.optimizer._global_grad_norm)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        # A tied weight is there under each of its names, as in `state_dict`.
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.model.state_dict().items():
            parameter = parameters.get(name)
            if parameter is None:
                # A buffer, which every worker has whole.
                tensor = value
            elif parameter.requires_grad:
                tensor = safe_get_full_fp32_param(parameter)
            else:
                with GatheredParameters([parameter]):
                    tensor = parameter.detach().clone()
            yield name, tensor.detach().float().cpu()

    def tensors(self) -> dict[str, Any]:
        # DeepSpeed writes its own state.
        return {}

    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        is_local = files.is_local(url)
        folder = Path(url) if is_local else self._empty("saving")
        # Frozen weights are the base model's; which checkpoint is the newest, manifests say.
        self._engine.save_checkpoint(
            str(folder), tag=FOLDER, save_latest=False, exclude_frozen_parameters=True
        )
        if self._workers.is_rank_zero:
            (folder / MARKER).write_text(json.dumps(self._layout()))
        # No worker goes on before all parts are written: the upload, or on a local disk the commit,
        # reads those of other workers, too.
        self._workers.barrier()
        if not is_local:
            self._upload(folder, url)
            self._empty("saving")

    def read(self, url: str) -> None:
        folder = Path(url)
        if not files.is_local(url):
            folder = self._empty("reading")
            if self._workers.is_local_rank_zero:
                for name in files.list_sizes(url):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    files.download(f"{url}/{name}", folder / name)
            self._workers.barrier()
        # States from before the alignment was recorded were written without it, as is the default.
        saved_layout = {"parameter_alignment": False} | json.loads((folder / MARKER).read_text())
        own_layout = self._layout()
        if saved_layout["stage"] != own_layout["stage"]:
            raise UserError(
                f"{url} was written at stage {saved_layout['stage']}, but "
                f"`checkpoint.placement.deepspeed.stage` is {own_layout['stage']}. Go on at stage "
                f"{saved_layout['stage']}."
            )
        if saved_layout == own_layout:
            # Not strictly, since frozen weights are not in it.
            self._engine.load_checkpoint(str(folder), tag=FOLDER, load_module_strict=False)
        else:
            self._read_universally(folder)
        self._workers.barrier()
        # The whole scratch folder, with what was downloaded or converted.
        self._empty("")

    def _layout(self) -> dict[str, Any]:
        """What has to be the same for the state to be read part by part."""
        zero = self._engine._config.zero_config
        offload = zero.offload_optimizer
        return {
            "workers": self._workers.count,
            "stage": int(self._engine.zero_optimization_stage()),
            "sub_group_size": zero.sub_group_size,
            "offload_optimizer": offload.device if offload else "none",
            "parameter_alignment": zero.parameter_alignment,
        }

    def _read_universally(self, folder: Path) -> None:
        from deepspeed.checkpoint.ds_to_universal import main as convert

        universal, engine = self._empty("universal"), self._engine
        if self._workers.is_local_rank_zero:
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
        self._workers.barrier()
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in engine.optimizer.param_groups
        ]
        engine._config.load_universal_checkpoint = True
        engine.load_checkpoint(str(universal), tag=FOLDER, load_module_strict=False)
        engine._config.load_universal_checkpoint = False
        # The conversion gives every group the settings of the first, and all parts one counter of
        # steps, which each of them would advance.
        for group, before in zip(engine.optimizer.param_groups, groups, strict=True):
            group |= before
        for part in engine.optimizer.optimizer.state.values():
            part["step"] = torch.as_tensor(part["step"]).clone()

    def _upload(self, folder: Path, url: str) -> None:
        """Raises OSError where storage failed; on every worker."""
        failed: OSError | None = None
        if self._workers.is_local_rank_zero:
            try:
                for path in filter(Path.is_file, sorted(folder.rglob("*"))):
                    files.upload(path, f"{url}/{path.relative_to(folder).as_posix()}")
            except OSError as error:
                failed = error
        # All raise where one failed, since they try again together.
        (failures,) = self._workers.sum(failed is not None)
        if failures:
            raise failed or OSError("another worker could not write its part")

    def _empty(self, name: str) -> Path:
        """An empty scratch folder of this machine, the same for all its workers."""
        folder = self._scratch / name
        # No worker may still be using the folder.
        self._workers.barrier()
        if self._workers.is_local_rank_zero:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._workers.barrier()
        return folder


def build(
    spec: TrainingSpec,
    workers: Workers,
    precision: Precision,
    build_model: Callable[[], TrainableModel],
) -> Zero:
    """Build the strategy; raises UserError, before the model is read, where this machine cannot
    offload as asked."""
    config = configuration(spec.training, precision, workers.count)
    check_configuration(config)
    # Named by the rank of the machine's first worker, since machines may share the run folder.
    scratch = Path(spec.run_folder) / f".zero-{workers.rank - workers.local_rank}"
    # Without `zero.Init`, which would divide weights as they are made: each worker reads the whole
    # model.
    return Zero(build_model(), spec.training.optimizer, config, workers, scratch)
