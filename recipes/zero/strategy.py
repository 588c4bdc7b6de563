"""DeepSpeed's ZeRO behind the interface of every strategy."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipes.data.batch import Batch, ExampleBatch
from recipes.distributed.strategy import Strategy, Update
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.optimization.optimizer import set_learning_rate
from recipes.settings.sections import OptimizerSettings
from recipes.zero.engine import start_engine
from recipes.zero.state import MARKER, read_state, write_state


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
        is_finite: bool,
        before_update: Callable[[], None],
    ) -> Update:
        def is_usable() -> bool:
            norm = self._norm()
            return is_finite and math.isfinite(norm) and norm <= largest_norm

        before_update()
        set_learning_rate([self._engine.optimizer], learning_rate)
        self._optimizer.is_usable = is_usable
        self._engine.step()
        return Update(self._norm(), not is_usable())

    def whole_weights(self) -> dict[str, torch.Tensor]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        whole: dict[str, torch.Tensor] = {}
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
            if self._workers.is_rank_zero:
                whole[name] = found.detach().float().cpu()
        return whole

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
