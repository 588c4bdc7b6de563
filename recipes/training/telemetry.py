"""What a run tells while it goes: log lines, `metrics.jsonl`, TensorBoard events, FLOPs, and the
loss on a fixed sample of rows that it does not train on.

In a mounted bucket a file is there for others, and outlives its machine, once it is closed. So both
files are closed, and go on, every few minutes and before each checkpoint.
"""

import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.errors import DamagedArtifact, UserError, first_line, make_command, pip_command
from artifacts.numbers import permute
from artifacts.progress import Report
from artifacts.storage import files
from recipes.data.batch import IGNORED, Batch, ExampleBatch, bytes_per_token
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers
from recipes.objective import Objective
from recipes.spec import (
    METRICS_NAME,
    STEPS_FOR_ESTIMATE,
    TENSORBOARD_NAME,
    UNIT_NOTES,
    TrainingSpec,
    describe_progress,
    read_metrics,
)

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_PUBLICATIONS = 300.0
LOG_FOLDER_VARIABLE = "LOG_FOLDER"
"""Set by the launcher in a job of Vertex AI, whose TensorBoard names a run by its folder there."""


class Telemetry:
    """Writes the first worker's account of the run."""

    def __init__(self, spec: TrainingSpec, first_step: int, steps: int, report: Report) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_folder = Path(spec.run_folder)
        title, project = spec.title or run_folder.name, spec.training.logging.weights_and_biases
        self._report = report
        self._steps = steps
        self._recent: deque[dict[str, Any]] = deque(maxlen=STEPS_FOR_ESTIMATE)
        self._last_line = 0.0
        self._published = time.monotonic()
        # A run that resumed from a checkpoint takes the steps after it once more, so their lines
        # go.
        self._path = path = run_folder / METRICS_NAME
        try:
            lines = [line for line in read_metrics(run_folder) if line["step"] < first_step]
        except DamagedArtifact:
            report(f"{path} cannot be read; the figures of the steps before are lost")
            lines = []
        content = "".join(json.dumps(line) + "\n" for line in lines)
        files.write(path, content.encode())
        self._metrics = path.open("a")
        logs = os.environ.get(LOG_FOLDER_VARIABLE)
        folder = Path(logs) / title if logs else run_folder / TENSORBOARD_NAME
        # TensorBoard leaves out the events of the steps that are taken once more.
        self._events = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        self._remote: Any = None
        if project:
            try:
                import wandb
            except ModuleNotFoundError:
                raise UserError(
                    "`checkpoint.logging.weights_and_biases` is set, but the package wandb is not "
                    f"installed. Install it with: {pip_command()} install wandb"
                ) from None
            try:
                # A run goes on under the same id.
                self._remote = wandb.init(
                    project=project, id=run_folder.name, name=title, dir=run_folder, resume="allow"
                )
            except wandb.Error as error:
                raise UserError(
                    f"`checkpoint.logging.weights_and_biases`: {first_line(error)} Give its key in "
                    "WANDB_API_KEY, keep the figures here with WANDB_MODE=offline, or leave the "
                    "setting out."
                ) from error

    def step(self, step: int, seconds: float, values: dict[str, Any], is_shown: bool) -> None:
        """Record one step, and print a line now and then.

        Its seconds count from the end of the step before. `loss` and `tokens_per_second` are among
        the values, which TensorBoard and Weights & Biases get only where they are shown.
        """
        line = {"step": step, "steps": self._steps, "seconds": round(seconds, 4)} | values
        self._recent.append(line)
        self._metrics.write(json.dumps(line) + "\n")
        # The board reads the file while the run goes on.
        self._metrics.flush()
        for name, value in values.items() if is_shown else ():
            if isinstance(value, int | float):
                self._events.add_scalar(f"train/{name}", value, step)
        if self._remote and is_shown:
            self._remote.log(values, step=step)
        now = time.monotonic()
        if step == self._steps or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._report(describe_progress(self._recent))
        if now - self._published >= SECONDS_BETWEEN_PUBLICATIONS:
            self.publish()

    def validation(self, step: int, value: float, unit: str) -> None:
        """Record a validation result."""
        name = unit.replace(" ", "_")
        self._events.add_scalar(f"validation/{name}", value, step)
        if self._remote:
            self._remote.log({f"validation_{name}": value}, step=step)
        note = UNIT_NOTES.get(unit, "") if step == 0 else ""
        self._report(f"step {step} of {self._steps} · validation {value:.4f} {unit}{note}")

    def publish(self) -> None:
        """Bring all that was told so far to where others read it."""
        self._metrics.close()
        self._metrics = self._path.open("a")
        # The next figure opens another file beside it.
        self._events.close()
        self._published = time.monotonic()

    def close(self) -> None:
        """Flush everything."""
        self._metrics.close()
        self._events.close()
        if self._remote:
            self._remote.finish()


def training_flops(
    parameters: int, trained: int, attention_width: int, tokens: int, pairs: int
) -> dict[str, float]:
    """FLOPs of some tokens: `6n`, six per parameter and token, or four of a frozen one, whose
    gradient is not computed; and `masked`, with the attention that document masks leave: pairs of
    positions, each with itself."""
    by_parameters = (4.0 * parameters + 2.0 * trained) * tokens
    return {"6n": by_parameters, "masked": by_parameters + 12.0 * attention_width * pairs}


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
        # In evaluation mode the loss is without the load-balancing loss of a mixture of experts.
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
