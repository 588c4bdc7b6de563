"""Which rows are trained on, and when: a pure function of (seed, sample index)."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from artifacts.permutation import permute
from artifacts.shards import ShardStats, Split
from recipes.settings import TrainingSettings

REPLAY_SEED = 0x5DEECE66D
"""Parts the order of replayed rows from that of the others."""


def global_rows(first_sample: int, count: int, rows: int, seed: int) -> np.ndarray:
    """Row numbers of the samples `first_sample … first_sample + count - 1` of an endless order.

    Every epoch is another permutation of all rows; a batch may span two epochs.
    """
    samples = np.arange(first_sample, first_sample + count)
    epochs, positions = np.divmod(samples, rows)
    chosen = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        chosen[of_epoch] = permute(positions[of_epoch], rows, key=seed * 1_000_003 + int(epoch))
    return chosen


@dataclass(frozen=True)
class DataOrder:
    """The endless order of a run's samples, replayed ones spread evenly among the others."""

    seed: int
    train_rows: int
    replay_rows: int = 0
    replay_share: float = 0.0
    """Share of the samples that are replayed; exact to 1 in 10,000."""

    @classmethod
    def of(cls, training: TrainingSettings, shards: ShardStats) -> "DataOrder":
        """The order that a run's settings and shards mean."""
        train, replay = (
            sum(shard.rows for shard in shards.shards if shard.split == split)
            for split in ("train", "replay")
        )
        return cls(training.seed, train, replay, training.replay_share)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the row numbers go through."""
        return ("train", "replay") if self.replay_share else ("train",)

    def rows(self, first_sample: int, count: int) -> np.ndarray:
        """Row numbers of `count` samples, int64; replayed rows are numbered after all train rows.

        Of any run of samples in a row, as many are replayed as the share says, within one.
        """
        if not self.replay_share:
            return global_rows(first_sample, count, self.train_rows, self.seed)
        before = self._replayed(np.arange(first_sample, first_sample + count + 1))
        is_replayed = np.diff(before) > 0
        replayed = int(before[-1] - before[0])
        first_replayed = int(before[0])
        chosen = np.empty(count, np.int64)
        chosen[~is_replayed] = global_rows(
            first_sample - first_replayed, count - replayed, self.train_rows, self.seed
        )
        chosen[is_replayed] = self.train_rows + global_rows(
            first_replayed, replayed, self.replay_rows, self.seed + REPLAY_SEED
        )
        return chosen

    def replayed(self, samples: int) -> int:
        """How many of the run's first samples are replayed."""
        return int(self._replayed(np.array([samples]))[0])

    def _replayed(self, samples: np.ndarray) -> np.ndarray:
        share = Fraction(self.replay_share).limit_denominator(10_000)
        return samples * share.numerator // share.denominator
