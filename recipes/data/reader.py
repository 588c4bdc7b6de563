"""Reads a worker's part of every step, for torchdata's `StatefulDataLoader`.

    loader = StatefulDataLoader(TrainingData(...), batch_size=None, collate_fn=as_it_is)

The loader's own `state_dict` and `load_state_dict` resume exactly with as many reader processes as
before. A run resumes under any number of them, and of training workers, from `samples_seen` alone,
since the order of the data is a pure function of it and the seed (`recipes.data.order`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from artifacts.errors import UserError
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import Batch, ExampleBatch
from recipes.data.order import DataOrder
from recipes.data.packed_rows import read_batch, worker_share

ReadBatch = Callable[[ShardSet, np.ndarray, np.ndarray | None], Batch | ExampleBatch]
"""Makes a batch of some rows of the shards, which are these samples of the run."""

ORDERED_SAMPLES = 8_192
"""Samples whose rows are worked out at a time."""


@dataclass(frozen=True)
class StepInput:
    """One training worker's part of a step."""

    rows: np.ndarray
    """Row numbers, in order."""
    batches: Sequence[Batch | ExampleBatch]
    """The rows as micro-batches."""


@dataclass(frozen=True)
class BatchSplit:
    """Which part of each global batch is read here, and in what pieces."""

    global_batch_size: int
    device_batch_size: int
    rank: int = 0
    workers: int = 1


class TrainingData(IterableDataset[StepInput]):
    """A training worker's steps from some sample on, without end."""

    def __init__(
        self,
        shards: ShardSet,
        order: DataOrder,
        split: BatchSplit,
        manifest: str,
        samples_seen: int = 0,
        read: ReadBatch = read_batch,
    ) -> None:
        """Describe the data; nothing is read before it is iterated.

        Args:
            shards: the train split, and after it the replayed one where there is one.
            manifest: fingerprint of the shards, kept with the state.
            samples_seen: samples of the whole run that were trained on before.
            read: makes a batch of rows.
        """
        self.shards, self.order, self.split = shards, order, split
        self.manifest, self.samples_seen, self.read = manifest, samples_seen, read

    def __iter__(self) -> "StepReader":
        process = get_worker_info()
        if process is None:
            return StepReader(self, self.samples_seen, self.split.global_batch_size)
        first = self.samples_seen + process.id * self.split.global_batch_size
        return StepReader(self, first, process.num_workers * self.split.global_batch_size)


class StepReader(Iterator[StepInput]):
    """Reads step after step; its state is `{seed, samples_seen, manifest}`."""

    def __init__(self, data: TrainingData, samples_seen: int, stride: int) -> None:
        self._data = data
        self._samples_seen = samples_seen
        self._stride = stride
        """Samples from one step that is read here to the next."""
        self._ordered: np.ndarray = np.empty(0, np.int64)
        self._first_ordered = 0

    def __next__(self) -> StepInput:
        split = self._data.split
        every = self._samples_seen + np.arange(split.global_batch_size)
        rows, samples = (
            worker_share(part, split.rank, split.workers) for part in (self._global_batch(), every)
        )
        pieces = [
            slice(start, start + split.device_batch_size)
            for start in range(0, len(rows), split.device_batch_size)
        ]
        read, shards = self._data.read, self._data.shards
        batches = [read(shards, rows[piece], samples[piece]) for piece in pieces]
        self._samples_seen += self._stride
        return StepInput(rows, batches)

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands."""
        return {
            "seed": self._data.order.seed,
            "samples_seen": self._samples_seen,
            "manifest": self._data.manifest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; raises UserError where it belongs to another seed or other shards."""
        for name, mine in (("seed", self._data.order.seed), ("manifest", self._data.manifest)):
            if state[name] != mine:
                raise UserError(
                    f"The reader's state is of {name} {state[name]!r}, this run has {mine!r}: the "
                    "order of its data would be another one. Begin a new run."
                )
        self._samples_seen = state["samples_seen"]

    def _global_batch(self) -> np.ndarray:
        size = self._data.split.global_batch_size
        start = self._samples_seen - self._first_ordered
        if not 0 <= start <= len(self._ordered) - size:
            count = max(size, ORDERED_SAMPLES)
            self._ordered = self._data.order.rows(self._samples_seen, count)
            self._first_ordered, start = self._samples_seen, 0
        return self._ordered[start : start + size]


def load(data: TrainingData, processes: int = 0) -> "StatefulDataLoader[StepInput]":
    """A loader over the data; the order is the same with any number of reader processes.

    Args:
        processes: how many read ahead; with 0 the training process reads when it needs a step.
    """
    return StatefulDataLoader(data, batch_size=None, num_workers=processes, collate_fn=_as_it_is)


def _as_it_is(step: StepInput) -> StepInput:
    return step
