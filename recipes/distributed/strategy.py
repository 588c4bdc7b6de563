"""What a training run asks of the way in which its workers hold one model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from recipes.data.batch import Batch, ExampleBatch
from recipes.model.causal_model import TrainableModel


class Update(NamedTuple):
    """What became of one step's gradient."""

    gradient_norm: float
    """Over all workers, before clipping; not finite where the gradient is not."""
    skipped: bool
    """True where the weights were left as they were."""


class Strategy(ABC):
    """A model and its optimizer, spread over the workers; each of them calls every method."""

    name: ClassVar[str]
    marker: ClassVar[str]
    """The file by which its training state on disk is recognized."""
    saves_in_background: ClassVar[bool] = True
    """Whether training may go on while a copy of its tensors is written."""
    model: TrainableModel

    @abstractmethod
    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        """The loss of this worker's batch in nats, summed over targets, in the run's precision."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add a loss's gradient, averaged over workers, to that of the step's batches so far.

        Args:
            is_last: no batch of this step follows.
        """

    @abstractmethod
    def update(
        self,
        learning_rate: float,
        largest_norm: float,
        is_finite: bool,
        before_update: Callable[[], None],
    ) -> Update:
        """Clip the step's gradient, change the weights by it, and forget it.

        Args:
            largest_norm: a gradient above it is not used, and neither is one that is not finite.
            is_finite: whether the step's loss is; otherwise its gradient is not used.
            before_update: called when weights are about to change.
        """

    @abstractmethod
    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Every weight and buffer of the model in float32 on the host: on rank zero, else none."""

    @abstractmethod
    def tensors(self) -> dict[str, Any]:
        """This worker's part of the training state, in tensors that steps change in place."""

    @abstractmethod
    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Write the training state into an empty folder.

        Args:
            tensors: what `tensors` gave, or a copy of it.
            group: for messages of a save in the background.

        Raises:
            OSError: storage failed; on every worker, so that they may try again together.
        """

    @abstractmethod
    def read(self, url: str) -> None:
        """Go on from the training state in a folder, which any number of workers may have written.

        Raises:
            UserError: it cannot be used as these workers are placed.
        """
