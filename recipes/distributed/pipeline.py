"""A model whose layers are split into stages that work on different rows at the same time.

Each stage computes a forward and a backward pass of another batch in turn ("1F1B", Narayanan et
al., "Efficient Large-Scale Language Model Training", 2021), by torch's schedule. Within a stage,
weights are sharded and split as without stages, and keep their names, so that a training state
goes on with any number of stages.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch, ExampleBatch
from recipes.device import mixed_precision
from recipes.distributed.strategy import FullySharded
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder
from recipes.optimization import Optimizers
from recipes.settings import Precision


class StageModel(TrainableModel):
    """The layers of one stage; the last one's forward is the loss."""

    network: Decoder

    def __init__(
        self, model: TrainableModel, network: Decoder, workers: Workers, precision: Precision
    ) -> None:
        """Keep this worker's stage of a model's network, which is changed in place; raises
        UserError where it has fewer layers than there are stages."""
        super().__init__(network)
        if len(network.layers) < workers.pipeline_parallel:
            raise UserError(
                f"`checkpoint.placement.pipeline_parallel` is {workers.pipeline_parallel}, but the "
                f"model has {len(network.layers)} layers. Set it to {len(network.layers)} or less."
            )
        self.exported_config, self.exported_files = model.exported_config, model.exported_files
        self.recomputes, self.unread = model.recomputes, model.unread
        self._precision = precision
        # Counted before the layers of the other stages are dropped.
        self._whole = model.parameter_count, model.trained_count
        network.keep_stage(workers.stage, workers.pipeline_parallel)

    @property
    def parameter_count(self) -> int:
        return self._whole[0]

    @property
    def trained_count(self) -> int:
        return self._whole[1]

    # The schedule cuts and sends tensors, and knows of no batch.
    def forward(  # type: ignore[override]
        self,
        given: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states for the next stage, or the loss in nats, of shape (1,)."""
        with mixed_precision(self._precision, given.device):
            hidden = self.network(given, positions, segments)
            if not self.network.ends:
                return hidden
            # Not a view, whose hooks FSDP2 could lose.
            return torch.stack([self.loss(hidden, self.network.head_weight, targets)])


class PipelineParallel(FullySharded):
    """A stage that its workers share out by FSDP2, among the other stages."""

    model: StageModel

    def __init__(
        self,
        model: StageModel,
        optimizers: Optimizers,
        gradient_clip: float,
        precision: Precision,
        workers: Workers,
        batch_shape: tuple[int, int],
        passes: int,
    ) -> None:
        """Every worker calls it, with the rows and tokens of each batch, and the batches of a
        step."""
        super().__init__(model, optimizers, gradient_clip, precision, workers.device)
        self._workers, self._rows = workers, batch_shape[0]
        # Column by column: the workers that hold the stages of one part of the global batch.
        per_stage = workers.count // workers.pipeline_parallel
        columns = [list(range(n, workers.count, per_stage)) for n in range(per_stage)]
        self._column = columns[workers.rank % per_stage]
        self._group, _ = dist.new_subgroups_by_enumeration(columns)
        self._host_group, _ = dist.new_subgroups_by_enumeration(columns, backend="gloo")
        # The first and the last worker of each column: tied weights are on both.
        self._ends_group, _ = dist.new_subgroups_by_enumeration([c[:: len(c) - 1] for c in columns])
        shapes = workers.gather({name: w.shape for name, w in model.state_dict().items()})
        self._holders: dict[str, tuple[int, torch.Size]] = {}
        """Of each weight, the first stage that has it, and its shape, in the order of layers."""
        for stage in range(workers.pipeline_parallel):
            for name, shape in shapes[stage * per_stage].items():
                self._holders.setdefault(name, (stage, shape))
        self._tied = shapes[0].keys() & shapes[-1].keys()
        """Weights that the first and the last stage hold alike."""
        # The schedule's own scaling would divide by the passes, while `_scaled` divides by the
        # targets.
        self._schedule = Schedule1F1B(
            self._torch_stage(batch_shape), passes, _scaled, scale_grads=False
        )
        self._forward_only = ScheduleGPipe(self._torch_stage(batch_shape), 1)

    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        output = self._run(self._forward_only, self._joined([batch]))
        return self._shared([] if output is None else [output])

    def accumulate(self, batches: Sequence[Batch | ExampleBatch], scale: float) -> torch.Tensor:
        batch, losses = self._joined(batches), list[torch.Tensor]()
        self._run(
            self._schedule,
            batch,
            target=batch.targets,
            return_outputs=False,
            loss_kwargs={"losses": losses, "scale": scale},
        )
        return self._shared(losses)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        # In the order of the stages and within each, so that nobody keeps more than one.
        own_weights = super().weights()
        for name, (stage, shape) in self._holders.items():
            if stage == self._workers.stage:
                weight = next(tensor for own_name, tensor in own_weights if own_name == name)
            else:
                weight = torch.empty(shape)
            dist.broadcast(weight, self._column[stage], group=self._host_group)
            yield name, weight

    def tensors(self) -> dict[str, Any]:
        tensors = super().tensors()
        # One file of the training state has these, for all stages.
        groups = tensors["optimizer"]["param_groups"]
        every = self._workers.gather([group["params"] for group in groups])
        for group, *names in zip(groups, *every, strict=True):
            group["params"] = list(dict.fromkeys(itertools.chain.from_iterable(names)))
        return tensors

    def _clip(self) -> torch.Tensor:
        gradients = []
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if name in self._tied:
                # The first stage has the gradient of the embedding, the last one that of the output
                # matrix: the weight's own gradient is their sum.
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=self._ends_group)
            # A tied weight enters the norm once, on the first stage that has it.
            if self._holders[name][0] == self._workers.stage:
                gradients.append(gradient)
        total = nn.utils.get_total_norm(gradients)
        squared = (total.full_tensor() if isinstance(total, DTensor) else total).square()
        dist.all_reduce(squared, group=self._group)
        norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self._gradient_clip, norm)
        return norm

    def _torch_stage(self, batch_shape: tuple[int, int]) -> PipelineStage:
        """torch's stage, which is told the shapes of its inputs and outputs and so need not try
        them out."""
        network = self.model.network
        # The residual stream is in float32.
        stream = torch.empty(*batch_shape, network.shape.hidden_size, device="meta")
        stream.requires_grad_()
        tokens = torch.empty(batch_shape, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        return PipelineStage(
            self.model,
            self._workers.stage,
            self._workers.pipeline_parallel,
            self._device,
            input_args=tokens if network.begins else stream,
            output_args=loss if network.ends else stream,
            group=self._group,
        )

    def _joined(self, batches: Sequence[Batch | ExampleBatch]) -> Batch:
        parts = [vars(_padded(batch, self._rows)).values() for batch in batches]
        return Batch(*map(torch.cat, zip(*parts, strict=True))).to(self._device)

    def _run(self, schedule: Schedule1F1B | ScheduleGPipe, batch: Batch, **options: Any) -> Any:
        inputs = [batch.tokens] if self.model.network.begins else []
        return schedule.step(
            *inputs,
            positions=batch.positions,
            segments=batch.segments,
            targets=batch.targets,
            **options,
        )

    def _shared(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The summed loss times the number of stages: only the last one has it, and callers take
        the mean over the stages."""
        count = self._workers.pipeline_parallel
        return count * sum((loss.sum() for loss in losses), torch.zeros((), device=self._device))


def _scaled(
    loss: torch.Tensor, targets: torch.Tensor, losses: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """What the last stage differentiates; the loss as it is goes into `losses`."""
    losses.append(loss.detach())
    return loss.sum() * scale


def _padded(batch: Batch | ExampleBatch, rows: int) -> Batch:
    """The batch with rows that nothing is learnt from, as stages exchange batches of one size."""
    assert isinstance(batch, Batch), "decoders are trained on packed rows"
    padding = (0, 0, 0, rows - len(batch.tokens))
    return Batch(
        F.pad(batch.tokens, padding),
        F.pad(batch.targets, padding, value=IGNORED),
        F.pad(batch.positions, padding),
        F.pad(batch.segments, padding, value=PADDING_SEGMENT),
    )
