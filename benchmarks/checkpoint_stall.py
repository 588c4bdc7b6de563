"""What a checkpoint of SmolLM2-135M's size costs training: standing still, and slower steps.

Both save and then take training steps (4 rows of 256 random tokens) until the checkpoint is
written. Ours copies the state into buffers that it keeps while the next step's gradients are
computed, and saves from there; the peer is the same save done at once, as the Hugging Face Trainer
and torchtune's recipes do theirs. The cost is all the time beyond that of undisturbed steps, so
work that the save takes from the steps beside it counts like a stall.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import alternate, at_most, record
from benchmarks.sizes import SIZES
from recipes.checkpointing.checkpoint import Checkpointer
from recipes.data.batch import Batch
from recipes.distributed.strategy import FullySharded, Strategy, train_step
from recipes.distributed.workers import join_workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.network import Decoder
from recipes.optimization import build_optimizers
from recipes.settings import OptimizerSettings

SHAPE = SIZES["135m"].shape
ROWS, LENGTH = 4, 256
ROUNDS = 4
STEPS = 2
"""Steps after a save, in which one in the background is written."""


class Saving:
    """One way of saving, timed."""

    def __init__(self, folder: Path, in_background: bool, strategy: Strategy) -> None:
        self._workers = join_workers()
        self._checkpointer = Checkpointer(
            strategy, str(folder), {}, 1, in_background, self._workers, lambda line: None
        )
        self._strategy = strategy
        self._batch = random_batch()
        self._step = 0
        self.stalls: list[float] = []

    def save(self) -> float:
        """Seconds of a save and the steps after it, until the checkpoint is written."""
        self._step += 1
        self._checkpointer.take_stall()
        began = time.perf_counter()
        self._checkpointer.save(self._step, {})
        for _ in range(STEPS):
            self.step()
        self.stalls.append(self._checkpointer.take_stall())
        self._checkpointer.wait()
        return time.perf_counter() - began

    def step(self) -> float:
        """Seconds of one training step."""
        began = time.perf_counter()
        train_step(
            self._strategy,
            [self._batch],
            learning_rate=1e-4,
            largest_norm=float("inf"),
            workers=self._workers,
            before_update=self._checkpointer.wait_until_copied,
        )
        return time.perf_counter() - began


def random_batch() -> Batch:
    """One step's rows, one document each."""
    tokens = torch.randint(0, SHAPE.vocab_size, (ROWS, LENGTH))
    positions = torch.arange(LENGTH).expand_as(tokens)
    return Batch(tokens, tokens.roll(-1, dims=1), positions, torch.zeros_like(tokens))


def main() -> None:
    """Measure, print and record the result."""
    decoder = Decoder(SHAPE)
    decoder.initialize()
    model = TrainableModel(decoder)
    optimizers = build_optimizers(model, OptimizerSettings())
    strategy = FullySharded(model, optimizers, 1.0, "bfloat16", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as root:
        background = Saving(Path(root) / "background", True, strategy)
        at_once = Saving(Path(root) / "at_once", False, strategy)
        at_once.step()
        background.save()
        first = background.stalls.pop()
        at_once.save()
        undisturbed = STEPS * median(at_once.step() for _ in range(ROUNDS))
        ours, peer = alternate(
            lambda: background.save() - undisturbed, lambda: at_once.save() - undisturbed, ROUNDS
        )
    record(
        "checkpoint_stall",
        ours=ours,
        peer=peer,
        unit="s",
        peer_name="the same save at once",
        better="lower",
        packages=["torch"],
        checks={
            "of which training stands still for": at_most(median(background.stalls), 0.2, "s"),
            "the first time, which makes the buffers": at_most(first, 2.0, "s"),
        },
    )


if __name__ == "__main__":
    main()
