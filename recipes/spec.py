"""The training program's whole input, as one JSON file, and its result; this loads no torch."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from artifacts.errors import DamagedArtifact, UserError
from artifacts.progress import format_duration
from artifacts.settings import first_fault
from artifacts.shards.format import ShardStats, Split
from artifacts.shards.shard_set import MaskedShardSet, ShardSet
from artifacts.storage import files
from artifacts.store.identity import hash_json
from recipes.settings import RecipeSettings, TrainingSettings

SECONDS_TO_SAVE = 300
"""How long a worker that was asked to end may take over its checkpoint."""

CHECKPOINT_CODE_VERSION = "9"
ROW_ORDER = 2
"""By which new runs order their rows (`TrainingSpec.row_order`)."""
SPEC_NAME = "spec.json"
MODEL_FOLDER = "model"
"""Where a checkpoint artifact keeps the exported Hugging Face model."""
BEST_NAME = "best"
"""Folder of a run for exports named by their step: that of the best validation so far."""
PROFILE_NAME = "profile"
RESULT_NAME = "result.json"
METRICS_NAME = "metrics.jsonl"
STEPS_FOR_ESTIMATE = 8
"""The time to go is estimated from the pace of this many last steps, so a slow start does not
count."""
TENSORBOARD_NAME = "tensorboard"


class TrainingSpec(BaseModel):
    """What to train, on what, and where to write it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Derived from the checkpoint's fingerprint, so that asking again continues the same run."""
    title: str = ""
    """What Vertex AI TensorBoard and Weights & Biases call the run; empty means its id."""
    shards_folder: str
    shards: ShardStats
    base_model_folder: str
    run_folder: str
    """`runs/<run_id>`: checkpoints, `metrics.jsonl`, TensorBoard events, `result.json`."""
    checkpoints_url: str | None = None
    """Where checkpoints go: a folder or a URL such as `gs://…`; absent: into the run folder."""
    export_folder: str
    """The trained model as a Hugging Face folder; written when the run is complete."""
    training: RecipeSettings
    seen: str | None = None
    """What the model that training starts from was trained on (`recipes.data.records`), where it is
    known."""
    masked: tuple[str, ...] = ()
    """Texts, by their `text_hash`, that are masked in place: forgotten ones."""
    order_inputs: dict[str, str] | None = None
    """Inputs that decide the order of the rows where they are not the run's own: those of the run
    that is trained once more without the masked texts."""
    row_order: int = 1
    """The rule of `recipes.data.reader` for rows that the lineage has seen in part. Of runs of
    earlier releases it is 1; made once more, such a run has to take the rows that it took."""
    libraries: dict[str, str] = {}
    """Versions of those that decide the result, without which the program does not run."""
    inputs: dict[str, str] = {}
    """Input name to fingerprint, to refuse a run folder that was made from others."""

    def write(self, path: Path) -> None:
        """Write the spec as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2))

    def content(self) -> dict[str, Any]:
        """What must not differ between two starts of one run."""
        masked = {"masked": hash_json({"texts": sorted(self.masked)})} if self.masked else {}
        return {"settings": self.training.content(), "inputs": self.inputs | masked}

    @property
    def hidden(self) -> list[str]:
        """Texts, by their `text_hash`, that nothing is learnt from: masked or erased."""
        return sorted({*self.masked, *self.shards.erased})

    def open_shards(self, *splits: Split) -> ShardSet:
        """Splits of the shards, without the hidden texts."""
        if self.hidden:
            return MaskedShardSet(self.shards_folder, self.shards, self.hidden, *splits)
        return ShardSet(self.shards_folder, self.shards, *splits)


UNIT_NOTES = {
    "bits per target": " (fewer are better; a target is a token of an answer, a hidden token, a "
    "class, or which of two answers was chosen)"
}
"""What to say of a unit where it is shown first."""


class TrainingResult(BaseModel):
    """`result.json`: what the checkpoint's manifest says of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int
    tokens_seen: int
    """Target tokens that entered the loss, over all steps."""
    samples_seen: int
    """Rows read, over all steps."""
    samples_replayed: int = 0
    """How many of them were general text, replayed against forgetting."""
    coverage: float
    """Share of the train split's tokens that the lineage has now seen, each text counted once."""
    tokens_seen_before: int
    """Of the tokens that taught the exported weights, those that the lineage had seen."""
    validation: dict[str, float]
    """The loss on validation text: `start`, `end` and `best` (of the steps after the first)."""
    validation_unit: str
    """`bits per byte` of text, or `bits per target` of examples."""
    best_step: int
    """The step of the best validation; with `export.weights: best` its weights are in
    `best/step-<n>`, unless it is the last."""
    tokens_per_second: float
    """Median over the last steps, padding excluded."""
    final_loss: float | None
    """Of the last step that was not skipped; None where all were."""
    skipped_steps: int
    diverged: str | None = None
    """Why training ended before its last step, which the gate's verdict repeats."""
    precision: str
    workers: int
    parameters: int
    metrics_path: str
    """`metrics.jsonl`: one JSON object per step."""

    def write(self, run_folder: Path) -> None:
        """Write `result.json`, which says that the run is finished."""
        content = self.model_dump_json(indent=2).encode()
        files.write(run_folder / RESULT_NAME, content)


def read_result(run_folder: Path) -> TrainingResult | None:
    """The finished run's result, or None while it is not finished; raises DamagedArtifact."""
    path = run_folder / RESULT_NAME
    try:
        return TrainingResult.model_validate_json(path.read_bytes()) if path.exists() else None
    except ValidationError as error:
        raise _damaged(path, first_fault(error)) from None


def read_metrics(run_folder: str | Path) -> list[dict[str, Any]]:
    """The per-step metrics of a run so far, oldest first, from its folder or URL; half a last line
    is left out. Raises DamagedArtifact where a line is no object with a step."""
    path = f"{run_folder}/{METRICS_NAME}"
    lines = (files.find(path) or b"").splitlines(keepends=True)
    try:
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        if not all(isinstance(line, dict) and isinstance(line["step"], int) for line in entries):
            raise ValueError("a line is no step")
    except (ValueError, KeyError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    return entries


def describe_hardware(lines: Sequence[Mapping[str, Any]]) -> str:
    """What a run's newest lines say of the first worker's GPU, in words; empty where nothing."""
    newest: Mapping[str, Any] = next(
        (line for line in reversed(lines) if "peak_memory_gb" in line), {}
    )
    units = {
        "gpu_utilisation_percent": "GPU {:.0f}% busy",
        "gpu_temperature_celsius": "{:.0f} °C",
        "gpu_power_watts": "{:.0f} W",
        "gpu_memory_used_gb": "{:.1f} GB in use",
    }
    return ", ".join(form.format(newest[name]) for name, form in units.items() if name in newest)


def describe_progress(lines: Sequence[Mapping[str, Any]]) -> str:
    """How far a run is, in words, by the lines of its newest steps, oldest first."""
    newest = lines[-1]
    step, steps, loss = newest["step"], newest["steps"], newest["loss"]
    pace = median(line["seconds"] for line in list(lines)[-STEPS_FOR_ESTIMATE:])
    ending = (
        f"about {format_duration((steps - step) * pace)} to go" if step < steps else "last step"
    )
    loss_text = "not finite" if loss is None else f"{loss:.3f}"
    speed = newest["tokens_per_second"]
    return f"step {step} of {steps} · loss {loss_text} · {speed:,.0f} tokens/s · {ending}"


def _damaged(path: str | Path, fault: str) -> DamagedArtifact:
    return DamagedArtifact(
        f"{path} cannot be read ({fault}). Set it aside with: llm-assets doctor --repair"
    )


def command(spec_path: Path, workers: int, python: str = sys.executable) -> list[str]:
    """The command line that trains with some workers on this machine; one needs no launcher."""
    program = ["-m", "recipes.continued_pretraining", "--spec", os.fspath(spec_path)]
    if workers == 1:
        return [python, *program]
    return [sys.executable, "-m", "recipes.launcher.local", f"--workers={workers}", "--", *program]


def total_steps(
    training: TrainingSettings, shards: ShardStats, unseen_rows: int | None = None
) -> int:
    """Steps of the whole run, from its budget in steps, tokens or passes over the train split.

    Replayed rows count as tokens, not as a pass. A run that continues from a model passes over the
    rows that are new to that, where they are known, and over the whole split where none is left;
    the rows that it sees again come on top. Raises UserError where the budget is less than one
    step, or the warm-up is longer than the run.
    """
    steps = _steps(training, shards, unseen_rows)
    warmup = training.schedule.warmup(steps)
    if warmup > steps:
        raise UserError(
            f"`checkpoint.schedule.warmup_steps` is {warmup}, but the run has {steps} steps. "
            "Shorten it, or lengthen `checkpoint.budget`."
        )
    return steps


def _steps(training: TrainingSettings, shards: ShardStats, unseen_rows: int | None) -> int:
    budget = training.budget
    if budget.steps is not None:
        return budget.steps
    (rows, row_tokens), share = _size_of(shards, "train"), training.replay_share
    if budget.epochs is not None:
        new_rows: float = rows
        if unseen_rows and unseen_rows < rows:
            # A pass is over new rows alone; rows that are seen again come on top, and so do
            # replayed ones below.
            new_rows = unseen_rows / (1 - training.order.seen_share)
        return math.ceil(budget.epochs * new_rows / (budget.global_batch_size * (1 - share)))
    assert budget.tokens is not None, "the settings hold exactly one budget"
    _, replayed_tokens = _size_of(shards, "replay")
    tokens_per_row = (1 - share) * row_tokens + share * replayed_tokens
    tokens_per_step = budget.global_batch_size * tokens_per_row
    if budget.tokens < tokens_per_step:
        raise UserError(
            f"`checkpoint.budget.tokens` is {budget.tokens:,}, less than the "
            f"{tokens_per_step:,.0f} of a single step. Raise it, or lower "
            "`checkpoint.budget.global_batch_size`."
        )
    return math.ceil(budget.tokens / tokens_per_step)


def _size_of(shards: ShardStats, split: Split) -> tuple[int, float]:
    """The split's rows, and tokens per row."""
    entries = [shard for shard in shards.shards if shard.split == split]
    rows = sum(entry.rows for entry in entries)
    return rows, sum(entry.tokens for entry in entries) / max(rows, 1)
