"""What a training process keeps of SmolLM2-135M's weights and optimizer under DeepSpeed's ZeRO-3.

Two processes against one, each after a step on random tokens: the bytes of all tensors that are
alive then, the gradients being gone. What the two give each other is gathered layer by layer and
freed again.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import at_most, record
from benchmarks.sizes import SIZES
from benchmarks.training_runs import REPOSITORY
from recipes.data.batch import Batch
from recipes.deepspeed.settings import configuration
from recipes.distributed.strategy import train_step
from recipes.distributed.workers import join_workers, leave_workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder
from recipes.quiet import silence_libraries
from recipes.settings import training_settings

SHAPE = SIZES["135m"].shape
LENGTH = 64
LIMIT = 0.6


def live_bytes() -> int:
    """Bytes of the tensors of this process."""
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for found in gc.get_objects()
        if isinstance(found, torch.Tensor)
        for storage in (found.untyped_storage(),)
    }
    return sum(storages.values())


def train_once(folder: Path) -> None:
    """As one of the workers: take a step, and write down what is held after it."""
    silence_libraries()
    from recipes.deepspeed.strategy import Zero

    workers = join_workers()
    decoder = Decoder(SHAPE)
    decoder.initialize()
    training = training_settings(
        {
            "placement": {"deepspeed": {}, "device_batch_size": 1},
            "budget": {"global_batch_size": workers.count},
        }
    )
    told = configuration(training, "float32", workers.count)
    model = TrainableModel(decoder)
    strategy = Zero(model, training.optimizer, told, workers, folder / "scratch")
    tokens = torch.randint(0, SHAPE.vocab_size, (1, LENGTH))
    positions = torch.arange(LENGTH)[None]
    batch = Batch(tokens, tokens.roll(-1, dims=1), positions, torch.zeros_like(tokens))
    train_step(strategy, [batch], 1e-4, float("inf"), workers, lambda: None)
    (folder / f"{workers.rank}.json").write_text(json.dumps(live_bytes()))
    leave_workers()


def held_by(processes: int) -> list[float]:
    """What each of some processes holds, in GB."""
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "benchmarks.zero", folder]
        launched = ["-m", "recipes.launcher.local", f"--workers={processes}", "--", *program]
        subprocess.run(
            [sys.executable, *(launched if processes > 1 else program)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            check=True,
        )
        return [
            json.loads(Path(folder, f"{rank}.json").read_text()) / 1e9 for rank in range(processes)
        ]


def main() -> None:
    """Measure, print and record the result."""
    two, one = held_by(2), held_by(1)
    record(
        "zero",
        ours=two,
        peer=one,
        unit="GB",
        peer_name="one process",
        better="lower",
        packages=["torch", "deepspeed"],
        checks={
            "memory of each of two processes / of one alone": at_most(max(two) / one[0], LIMIT)
        },
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_once(Path(sys.argv[1]))
    else:
        main()
