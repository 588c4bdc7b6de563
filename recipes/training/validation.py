"""Bits per byte on the validation split, the same rows every time."""

import math

import numpy as np
import torch
from torch import nn

from artifacts.permutation import permute
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, Batch
from recipes.data.packed_rows import bytes_per_token, read_batch
from recipes.distributed.workers import Workers
from recipes.model.precision import mixed_precision
from recipes.sections import Precision

SELECTION_KEY = 20_261_121
PADDING_ROW = -1


class Validation:
    """Measures a model on a fixed sample of the validation rows."""

    def __init__(self, shards: ShardSet, rows: int, batch_size: int, workers: Workers) -> None:
        self._shards = shards
        self._workers = workers
        self._bytes_per_token = bytes_per_token(shards)
        count = min(rows, len(shards))
        chosen = np.sort(permute(np.arange(count), len(shards), SELECTION_KEY))
        # Every worker must run equally many forward passes, so the last ones may be padding.
        batches = math.ceil(count / (batch_size * workers.dp_size))
        padded = np.full(batches * batch_size * workers.dp_size, PADDING_ROW)
        padded[:count] = chosen
        self._batches = padded.reshape(workers.dp_size, batches, batch_size)[workers.dp_rank]

    @torch.no_grad()
    def bits_per_byte(self, model: nn.Module, precision: Precision) -> float:
        """Mean loss a token in bits, over the bytes a token stands for."""
        model.eval()
        loss_sum, targets = 0.0, 0
        for rows in self._batches:
            batch = self._read(rows)
            with mixed_precision(precision, self._workers.device):
                loss_sum += float(model(batch.to(self._workers.device)))
            targets += batch.target_count
        model.train()
        loss_sum, total = self._workers.sum(loss_sum, targets)
        return loss_sum / max(total, 1.0) / math.log(2) / self._bytes_per_token

    def _read(self, rows: np.ndarray) -> Batch:
        batch = read_batch(self._shards, np.maximum(rows, 0))
        batch.targets[torch.from_numpy(rows == PADDING_ROW)] = IGNORED
        return batch
