"""The validation of a run: the loss on a fixed sample of rows that it does not train on."""

import math

import numpy as np
import torch

from artifacts.errors import UserError, make_command
from artifacts.numbers import permute
from recipes.data.batch import IGNORED, Batch, ExampleBatch, bytes_per_token
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers
from recipes.objective import Objective
from recipes.spec import TrainingSpec

# Any number will do, the same one in every run: so validations of different runs compare.
SELECTION_KEY = 20_261_121
PADDING_ROW = -1


class Validation:
    """Measures a model on a fixed sample of the validation rows."""

    def __init__(self, spec: TrainingSpec, objective: Objective, workers: Workers) -> None:
        """Choose the rows."""
        self.shards = shards = spec.open_shards("validation")
        # A run that is made once more for text that was forgotten may have none left: its loss is 0
        # then, and decides nothing.
        self._may_be_empty = bool(spec.masked)
        batch_size = workers.rows_per_pass(spec.training.placement.device_batch_size)
        self._workers, self._read_batch = workers, objective.read_batch
        tells_every_token = shards.stats.form == "pretraining" and not objective.scorer
        self._units_per_target = bytes_per_token(shards) if tells_every_token else 1.0
        self.unit = "bits per byte" if tells_every_token else "bits per target"
        """A target is a token of an answer, a hidden token, or a class."""
        count = min(spec.training.validation.rows, len(shards))
        sample = np.sort(permute(np.arange(count), len(shards), SELECTION_KEY))
        # Every worker must run equally many forward passes, so the last ones may be padding.
        batches = math.ceil(count / (batch_size * workers.dp_size))
        padded = np.full(batches * batch_size * workers.dp_size, PADDING_ROW)
        padded[:count] = sample
        self._batches = padded.reshape(workers.dp_size, batches, batch_size)[workers.dp_rank]

    @torch.no_grad()
    def measure(self, strategy: Strategy) -> float:
        """Mean loss of a target in bits; of text, over the bytes that a token stands for. Raises
        UserError where there is no target, as all validation text was forgotten."""
        strategy.model.eval()
        loss_sum, targets = 0.0, 0
        for rows in self._batches:
            batch = self._read(rows)
            loss_sum += float(strategy.loss(batch))
            targets += batch.target_count
        strategy.model.train()
        loss_sum, total = self._workers.sum(loss_sum, targets)
        if not total and not self._may_be_empty:
            raise UserError(
                "The validation rows of the shards hold nothing to predict, as their text was "
                "forgotten. Give the corpus more text, and make the shards again with: "
                f"{make_command('tokenized_shards')}"
            )
        return loss_sum / max(total, 1) / math.log(2) / self._units_per_target

    def _read(self, rows: np.ndarray) -> Batch | ExampleBatch:
        real = rows[rows != PADDING_ROW]
        batch = self._read_batch(self.shards, real if len(real) else np.zeros_like(rows), None)
        # Only padding here: row 0 stands in, as every worker has to compute, and counts nothing.
        if not len(real):
            batch.targets.fill_(IGNORED)
        return batch
