"""Which rows are trained on, and when, and a worker's part of every step read from the shards.

A run resumes under any number of workers from `samples_seen` alone, since the order of the data is
a pure function of it and the seed.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import torch

from artifacts.numbers import permute
from artifacts.shards.format import Split
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import Batch, ExampleBatch, read_batch
from recipes.data.records import RowCounts
from recipes.sections import OrderSettings
from recipes.spec import ROW_ORDER, TrainingSpec

# The multipliers of drand48 and of xorshift64*: any two numbers do, as long as they stay.
REPLAY_SEED = 0x5DEECE66D
"""Keeps the order of replayed rows apart from that of the others."""
SEEN_SEED = 0x2545F4914F6CDD1D
"""Keeps the order of rows that are seen again apart from that of the others."""


def global_rows(first_sample: int, count: int, rows: int, seed: int) -> np.ndarray:
    """Row numbers of the samples `first_sample … first_sample + count - 1` of an endless order.

    Every epoch is another permutation of all rows; a batch may span two epochs.
    """
    samples = np.arange(first_sample, first_sample + count)
    epochs, positions = np.divmod(samples, rows)
    numbers = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        # The factor is above any number of epochs, so that seeds close to each other share no key.
        numbers[of_epoch] = permute(positions[of_epoch], rows, key=seed * 1_000_003 + int(epoch))
    return numbers


def order_seed(seed: int, inputs: Mapping[str, str]) -> int:
    """The seed of a run's order, different for other text or another starting model, so that the
    runs of two weeks do not take the same rows by accident."""
    if not inputs:
        return seed
    text = "\0".join(f"{name}={inputs[name]}" for name in sorted(inputs))
    digest = hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def is_fresh_row(rows: RowCounts, row_order: int = ROW_ORDER) -> np.ndarray:
    """Whether the lineage has seen less than half of each row; shape (rows,), bool.

    Rows are cut again when a document before them changes or a source's weight does, and most then
    hold a little of what was seen. By row order 1, it has seen nothing of a fresh row.
    """
    return rows.seen == 0 if row_order == 1 else 2 * rows.seen < rows.tokens


@dataclass(frozen=True)
class RowPlan:
    """How a run that continues from a model takes the train rows."""

    fresh: tuple[np.ndarray, ...]
    """Rows that are new (`is_fresh_row`), those of the first array first, for each pass again."""
    seen: np.ndarray
    """The other rows."""
    seen_share: float
    """Share of the samples that are taken from them."""

    @classmethod
    def of(
        cls,
        rows: RowCounts,
        settings: OrderSettings,
        row_order: int = ROW_ORDER,
        passes: int = 1,
    ) -> "RowPlan":
        """The plan for the train rows, by what the lineage has seen of them: some passes over what
        is new, then all rows. By row order 1, there is one such pass, and rows are seen again also
        where none is new."""
        is_fresh = is_fresh_row(rows, row_order)
        slices = rows.slices if settings.new_first else np.zeros_like(rows.slices)
        newest_first = np.unique(slices[is_fresh])[::-1]
        fresh = tuple(np.flatnonzero(is_fresh & (slices == number)) for number in newest_first)
        seen_rows = np.flatnonzero(~is_fresh)
        if row_order == 1:
            return cls(fresh, seen_rows, settings.seen_share if len(seen_rows) else 0)
        # Where nothing is new, all rows come in each pass, and none is to come beside them.
        share = settings.seen_share if len(seen_rows) and fresh else 0
        return cls(fresh * passes, seen_rows, share)


@dataclass(frozen=True)
class DataOrder:
    """The endless order of a run's samples.

    Replayed ones are spread evenly among the others, and rows that are seen again among those.
    """

    seed: int
    train_rows: int
    replay_rows: int = 0
    replay_share: float = 0.0
    """Share of the samples that are replayed; exact to 1 in 10,000."""
    plan: RowPlan | None = None
    """Where the lineage has seen some of the rows."""

    @classmethod
    def of(cls, spec: TrainingSpec, known: RowCounts | None = None) -> "DataOrder":
        """The order that follows from a run's settings, its shards, and what its starting model has
        seen."""
        training = spec.training
        train, replay = (
            sum(shard.rows for shard in spec.shards.shards if shard.split == split)
            for split in ("train", "replay")
        )
        plan = None
        if spec.seen:
            assert known is not None, "a run that goes on from a lineage looks it up"
            passes = math.ceil(training.budget.epochs or 1)
            plan = RowPlan.of(known, training.order, spec.row_order, passes)
        inputs = spec.inputs if spec.order_inputs is None else spec.order_inputs
        seed = order_seed(training.seed, inputs)
        return cls(seed, train, replay, training.replay_share, plan)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the row numbers go through."""
        return ("train", "replay") if self.replay_share else ("train",)

    def rows(self, first_sample: int, count: int) -> np.ndarray:
        """Row numbers of `count` samples, int64; replayed rows are numbered after all train rows.

        Of any run of samples in a row, as many are replayed as the share says, within one.
        """
        is_replayed, first_replayed = _spread(first_sample, count, self.replay_share)
        replayed = int(is_replayed.sum())
        numbers = np.empty(count, np.int64)
        numbers[~is_replayed] = self._train(first_sample - first_replayed, count - replayed)
        if replayed:
            numbers[is_replayed] = self.train_rows + global_rows(
                first_replayed, replayed, self.replay_rows, self.seed + REPLAY_SEED
            )
        return numbers

    def replayed(self, samples: int) -> int:
        """How many of the run's first samples are replayed."""
        return _spread(samples, 0, self.replay_share)[1]

    def _train(self, first: int, count: int) -> np.ndarray:
        """Train rows of a stretch of the samples that are not replayed."""
        if self.plan is None:
            return global_rows(first, count, self.train_rows, self.seed)
        is_seen, first_seen = _spread(first, count, self.plan.seen_share)
        seen_count = int(is_seen.sum())
        numbers = np.empty(count, np.int64)
        numbers[~is_seen] = self._fresh(
            self.plan, first - first_seen + np.arange(count - seen_count)
        )
        if seen_count:
            places = global_rows(first_seen, seen_count, len(self.plan.seen), self.seed + SEEN_SEED)
            numbers[is_seen] = self.plan.seen[places]
        return numbers

    def _fresh(self, plan: RowPlan, samples: np.ndarray) -> np.ndarray:
        """New rows, each once in a pass; when there are no more, all rows epoch by epoch."""
        numbers = np.empty(len(samples), np.int64)
        first = 0
        for number, rows in enumerate(plan.fresh):
            within = (samples >= first) & (samples < first + len(rows))
            # Downwards, since the order of the seen rows counts its epochs upwards from the same
            # key.
            key = (self.seed + SEEN_SEED) * 1_000_003 - number
            numbers[within] = rows[permute(samples[within] - first, len(rows), key)]
            first += len(rows)
        after = np.flatnonzero(samples >= first)
        if len(after):
            beyond = int(samples[after[0]]) - first
            numbers[after] = global_rows(beyond, len(after), self.train_rows, self.seed)
        return numbers


def _spread(first: int, count: int, share: float) -> tuple[np.ndarray, int]:
    """Which of `count` samples from `first` on belong to a share that is spread evenly over all
    samples, and how many before `first` do."""
    # In whole numbers, so that every stretch agrees with the others wherever a run enters the
    # order.
    exact = Fraction(share).limit_denominator(10_000)
    before = np.arange(first, first + count + 1) * exact.numerator // exact.denominator
    return np.diff(before) > 0, int(before[0])


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

    def pin_memory(self) -> "StepInput":
        """The same in memory from which a GPU copies by itself."""
        return StepInput(self.rows, [batch.pin_memory() for batch in self.batches])


@dataclass(frozen=True)
class BatchSplit:
    """Which part of each global batch is read here, and in what pieces."""

    global_batch_size: int
    device_batch_size: int
    rank: int = 0
    workers: int = 1


def read_steps(
    shards: ShardSet,
    order: DataOrder,
    split: BatchSplit,
    samples_seen: int = 0,
    read: ReadBatch = read_batch,
) -> Iterator[StepInput]:
    """A training worker's steps after so many samples of the whole run, without end."""
    size, width = split.global_batch_size, split.device_batch_size
    # Each worker has a contiguous part of the global batch, all of equal size.
    part = size // split.workers
    own = slice(split.rank * part, (split.rank + 1) * part)
    while True:
        # Working out where a row lies in the order costs little for many steps together.
        ordered = order.rows(samples_seen, max(1, ORDERED_SAMPLES // size) * size)
        for step_rows in ordered.reshape(-1, size):
            rows, samples = step_rows[own], (samples_seen + np.arange(size))[own]
            batches = [
                read(shards, rows[start : start + width], samples[start : start + width])
                for start in range(0, len(rows), width)
            ]
            samples_seen += size
            yield StepInput(rows, batches)


def read_ahead(
    steps: Iterator[StepInput], device: torch.device | None = None
) -> Iterator[StepInput]:
    """The same steps, each read by a thread while the one before it is trained on; a GPU copies
    them by itself, while it computes."""

    def read() -> StepInput:
        step = next(steps)
        return step.pin_memory() if device else step

    # A new thread uses the first GPU, whichever its process uses.
    begin = partial(torch.cuda.set_device, device) if device else None
    with ThreadPoolExecutor(1, "reader", begin) as thread:
        coming = thread.submit(read)
        while True:
            step, coming = coming.result(), thread.submit(read)
            yield step
