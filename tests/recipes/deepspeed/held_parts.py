"""A worker that takes one step on a spec, and writes down what it holds of the model.

python -m recipes.launcher.local --workers 2 -- tests/recipes/deepspeed/held_parts.py SPEC FOLDER
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from recipes.quiet import silence_libraries
from recipes.spec import TrainingSpec


def main(spec_path: Path, folder: Path) -> None:
    silence_libraries()
    from recipes.deepspeed.strategy import Zero
    from recipes.distributed.strategy import train_step
    from recipes.distributed.workers import join_workers, leave_workers
    from recipes.training.setup import build_strategy

    spec = TrainingSpec.model_validate_json(spec_path.read_text())
    workers, objective = join_workers(), spec.training.objective()
    strategy = build_strategy(spec, objective, workers, "float32")
    assert isinstance(strategy, Zero)
    rows = np.arange(2) + 2 * workers.rank
    batch = objective.read_batch(spec.open_shards("train"), rows, None)
    outcomes = [
        train_step(strategy, [batch], 1e-3, largest_norm, workers, lambda: None)
        for largest_norm in (float("inf"), 0.0)
    ]
    parameters = list(strategy.model.parameters())
    moments = [state["exp_avg"] for state in strategy._optimizer.state.values()]
    held = {
        "world": dist.get_world_size(),
        "parameters": strategy.model.parameter_count,
        "weights": sum(getattr(p, "ds_tensor", p).numel() for p in parameters),
        "moments": sum(moment.numel() for moment in moments),
        "skipped": [outcome.skipped for outcome in outcomes],
        "steps": [float(state["step"]) for state in strategy._optimizer.state.values()],
    }
    (folder / f"held-{os.environ['RANK']}.json").write_text(json.dumps(held))
    leave_workers()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
