"""What a run tells while it goes: log lines, `metrics.jsonl`, TensorBoard events, profiles.

In a mounted bucket a file is there for others, and outlives its machine, once it is closed. So both
files are closed, and go on, every few minutes and before each checkpoint.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from artifacts.errors import DamagedArtifact, UserError
from artifacts.progress import Report
from artifacts.storage import files
from recipes.distributed.workers import Workers
from recipes.spec import (
    METRICS_NAME,
    STEPS_FOR_ESTIMATE,
    TENSORBOARD_NAME,
    describe_progress,
    read_metrics,
)


def training_flops(
    parameters: int, attention_width: int, tokens: int, pairs: int
) -> dict[str, float]:
    """FLOPs of some tokens: `6n`, and `masked`, with the attention that document masks leave.

    Args:
        attention_width: layers times heads times head size.
        pairs: positions that look at one another, each with itself.
    """
    by_parameters = 6.0 * parameters * tokens
    return {"6n": by_parameters, "masked": by_parameters + 12.0 * attention_width * pairs}


SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_PUBLICATIONS = 300.0
LOG_FOLDER_VARIABLE = "LOG_FOLDER"
"""Set by the launcher in a job of Vertex AI, whose TensorBoard names a run by its folder there."""


class Telemetry:
    """Writes the first worker's account of the run."""

    def __init__(
        self,
        run_folder: Path,
        first_step: int,
        steps: int,
        report: Report,
        title: str,
        weights_and_biases: str | None = None,
    ) -> None:
        """Open the run's files.

        Args:
            title: what people call the run.
            weights_and_biases: a project there; absent means that nothing is sent.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._report = report
        self._steps = steps
        self._recent: deque[dict[str, Any]] = deque(maxlen=STEPS_FOR_ESTIMATE)
        self._last_line = 0.0
        self._published = time.monotonic()
        # A run that went on from a checkpoint makes the steps after it once more.
        self._path = path = run_folder / METRICS_NAME
        try:
            kept = [line for line in read_metrics(run_folder) if line["step"] < first_step]
        except DamagedArtifact:
            report(f"{path} cannot be read; the figures of the steps before are lost")
            kept = []
        content = "".join(json.dumps(line) + "\n" for line in kept)
        files.write(path, content.encode())
        self._metrics = path.open("a")
        logs = os.environ.get(LOG_FOLDER_VARIABLE)
        folder = Path(logs) / title if logs else run_folder / TENSORBOARD_NAME
        self._events = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        self._remote = _join_weights_and_biases(weights_and_biases, run_folder, title)

    def step(self, step: int, seconds: float, values: dict[str, Any], is_shown: bool) -> None:
        """Record one step and print a line now and then.

        Args:
            step: 1-based.
            seconds: the step's wall time.
            values: figures under stable names; `loss` and `tokens_per_second` among them.
            is_shown: whether TensorBoard and Weights & Biases get them too.
        """
        line = {"step": step, "steps": self._steps, "seconds": round(seconds, 4)} | values
        self._recent.append(line)
        self._metrics.write(json.dumps(line) + "\n")
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
        self._report(f"step {step} of {self._steps} · validation {value:.4f} {unit}")

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


def _join_weights_and_biases(project: str | None, run_folder: Path, title: str) -> Any:
    """A Weights & Biases run that goes on under the same id, or None where it is switched off."""
    if project is None:
        return None
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError(
            "`checkpoint.logging.weights_and_biases` is set, but the package wandb is not "
            "installed. Install it with: python -m pip install wandb"
        ) from None
    return wandb.init(
        project=project, id=run_folder.name, name=title, dir=run_folder, resume="allow"
    )


class RowAudit:
    """Every row that one worker trained on, in `rows-<worker>.jsonl`.

    Steps done once more after a kill are there again, further down.
    """

    def __init__(self, run_folder: Path, workers: Workers) -> None:
        self._file = (run_folder / f"rows-{workers.dp_rank}.jsonl").open("a")
        self._workers = workers.dp_size

    def write(self, step: int, rows: list[int]) -> None:
        """Note the rows of one step."""
        self._file.write(json.dumps({"step": step, "workers": self._workers, "rows": rows}) + "\n")
        self._file.flush()


@contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Write what the block's operators took, as Chrome's trace viewer reads it."""
    with torch.profiler.profile() as profile:
        yield
    path.parent.mkdir(exist_ok=True)
    profile.export_chrome_trace(str(path))
