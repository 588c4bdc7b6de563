"""The training program's whole input, as one JSON file; importing this loads no torch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from artifacts.errors import UserError
from artifacts.shards import ShardStats
from recipes.settings import TrainingSettings

INTERRUPTED_EXIT_CODE = 75
"""A checkpoint was saved; start the same command again (EX_TEMPFAIL)."""

SECONDS_TO_SAVE = 300
"""How long a worker that was asked to end may take over its checkpoint."""

BEST_NAME = "best"
PROFILE_NAME = "profile"
RESULT_NAME = "result.json"
METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


class TrainingSpec(BaseModel):
    """What to train, on what, and where to write it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Derived from the checkpoint's fingerprint, so that asking again continues the same run."""
    shards_folder: str
    shards: ShardStats
    base_model_folder: str
    run_folder: str
    """`runs/<run_id>`: checkpoints, `metrics.jsonl`, TensorBoard events, `result.json`."""
    checkpoints_url: str | None = None
    """Where checkpoints go: a folder or a URL such as `gs://…`; absent: into the run folder."""
    export_folder: str
    """The trained model as a Hugging Face folder; written when the run is complete."""
    training: TrainingSettings
    inputs: dict[str, str] = {}
    """Input name to fingerprint, to refuse a run folder that was made from others."""

    def write(self, path: Path) -> None:
        """Write the spec as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2))

    def content(self) -> dict[str, Any]:
        """What must not differ between two starts of one run."""
        return {"settings": self.training.content(), "inputs": self.inputs}


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
    validation_bits_per_byte: dict[str, float]
    """`start`, `end` and `best` (of the steps validated after the first)."""
    best_step: int
    """The step of the best validation; its weights are in `best/` unless it is the last one."""
    tokens_per_second: float
    """Median over the steps of the last start, padding excluded."""
    final_loss: float
    skipped_steps: int
    precision: str
    workers: int
    parameters: int
    metrics_path: str
    """`metrics.jsonl`: one JSON object a step."""


def read_spec(path: Path) -> TrainingSpec:
    """Read a spec; raises UserError naming the file and the first fault."""
    try:
        return TrainingSpec.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise UserError(f"There is no training spec at {path}.") from None
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path}: `{key}`: {fault['msg']}.") from None


def read_result(run_folder: Path) -> TrainingResult | None:
    """The finished run's result, or None while it is not finished."""
    path = run_folder / RESULT_NAME
    return TrainingResult.model_validate_json(path.read_text()) if path.exists() else None


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The per-step metrics of a run so far, oldest first; half a last line is left out."""
    path = run_folder / METRICS_NAME
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def command(spec_path: Path, workers: int) -> list[str]:
    """The command line that trains; it ends with the process that starts it."""
    return [
        sys.executable,
        "-m",
        "recipes.launch",
        "--standalone",
        f"--shutdown-timeout={SECONDS_TO_SAVE}",
        f"--nproc-per-node={workers}",
        "-m",
        "recipes.continued_pretraining",
        "--spec",
        os.fspath(spec_path),
    ]
