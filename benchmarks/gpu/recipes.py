"""Every recipe on a tiny model: the course that its loss takes on the device and on the processor.

    python -m benchmarks.gpu.recipes FOLDER     makes the models and their data, for the kit

Of torchtune and DeepSpeed, which the kit does not hold, there is none.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from artifacts.shards.format import ShardStats
from benchmarks.gpu.turns import BEGAN, Keep, check_names
from benchmarks.harness import ROOT
from benchmarks.training_runs import (
    REPOSITORY,
    environment,
    largest_difference,
    make_spec,
    refuse_skipped,
)
from recipes.settings import training_settings
from recipes.spec import command, read_metrics

KIT = ROOT / "gpu-kit" / "projects.tar.xz"
STEPS, ROWS, LEARNING_RATE = 10, 8, 3e-3
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of a loss to that on the processor in float32. Sums of another order
move a course by less; a mask, a target or a gradient that is wrong, by more."""
RECIPES = (
    # Its eight graphs take longest to compile.
    "sequence_to_sequence",
    "llama_continued",
    "gpt2_from_scratch",
    "fine_tuning",
    "instructions",
    "lora",
    "dora",
    "masked_language_modeling",
    "classification",
)
"""Names of `tests.tiny_tasks`: of each recipe, network and kind of adapter one."""
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)


def write_projects(folder: Path) -> None:
    """A folder for each of `RECIPES`: a tiny model, its shards and its section `checkpoint`."""
    # Not in the kit: pyspark, which they import.
    from tests.example_shards import example_shards
    from tests.tiny_tasks import TASKS

    for name in RECIPES:
        project = folder / name
        project.mkdir(parents=True)
        checkpoint = TASKS[name].prepare(project)
        shards = example_shards(project / "shards", project / "base", TASKS[name])
        told = {"checkpoint": checkpoint, "shards": shards.model_dump(mode="json")}
        (project / "project.json").write_text(json.dumps(told))


def measure(seconds: float, keep: Keep, only: Collection[str] = ()) -> dict[str, Any]:
    """For each recipe: the losses of its steps, and how far they are from the processor's.

    One that fails, or is beyond its tolerance, says so in place of its figures.
    """
    check_names(only, RECIPES)
    found: dict[str, Any] = {}
    with _projects() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {
            name: pool.submit(_compare, folder / name, seconds)
            for name in RECIPES
            if not only or name in only
        }
        for name, run in runs.items():
            try:
                found[name] = run.result()
            except RuntimeError as error:
                found[name] = {"failed": str(error)[-3000:]}
            told = {
                key: value for key, value in found[name].items() if isinstance(value, float | str)
            }
            print(f"{name}: {told}", flush=True)
            keep(found)
    return found


@contextmanager
def _projects() -> Iterator[Path]:
    """The kit's, or where none is, some that are made now."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if KIT.exists():
            with tarfile.open(KIT) as archive:
                archive.extractall(folder, filter="data")
        else:
            write_projects(folder)
        yield folder


def _compare(project: Path, seconds: float) -> dict[str, Any]:
    """The processor's course, then those of this machine's device in both precisions."""
    processor = _losses(project, "processor", "float32", seconds, CUDA_VISIBLE_DEVICES="")
    found: dict[str, Any] = {"processor": processor}
    for precision, tolerance in TOLERANCES.items():
        losses = _losses(project, precision, precision, seconds)
        apart = largest_difference(losses, processor)
        found |= {precision: losses, f"{precision}, largest relative difference": apart}
        if not apart <= tolerance:
            raise RuntimeError(f"in {precision} losses are {apart:.1e} apart: {found}")
    return found


def _losses(
    project: Path, name: str, precision: str, seconds: float, **variables: str
) -> list[float]:
    told = json.loads((project / "project.json").read_text())
    checkpoint: dict[str, Any] = told["checkpoint"]
    placement = checkpoint.get("placement", {})
    settings = training_settings(
        checkpoint
        | {
            "precision": precision,
            "budget": {"steps": STEPS, "global_batch_size": ROWS},
            "optimizer": checkpoint.get("optimizer", {}) | {"learning_rate": LEARNING_RATE},
            "schedule": {"warmup_steps": 0},
            "validation": {"every_steps": STEPS},
            "placement": {key: placement[key] for key in placement if key != "compile"},
            "checkpointing": {"every_steps": STEPS},
        }
    )
    spec = make_spec(
        name, project, ShardStats.model_validate(told["shards"]), project / "base", settings
    )
    path = project / f"{name}.json"
    spec.write(path)
    try:
        ended = subprocess.run(
            command(path, 1),
            cwd=REPOSITORY,
            env=environment(**variables),
            capture_output=True,
            text=True,
            # Before the part itself is ended, so that this is told of.
            timeout=max(1.0, BEGAN + 0.9 * seconds - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} had not ended after {0.9 * seconds:.0f} s") from None
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stdout[-500:]}{ended.stderr[-2000:]}")
    history = read_metrics(Path(spec.run_folder))
    refuse_skipped(history)
    return [line["loss"] for line in history]


if __name__ == "__main__":
    write_projects(Path(sys.argv[1]))
