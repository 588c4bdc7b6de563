"""How long training stands still while a checkpoint of SmolLM2-135M's size is saved.

Both save and then take the next training step (4 rows of 256 random tokens). Ours copies the state
into buffers that it keeps while that step's gradients are computed, and saves from there; the peer
is the same save done at once, as the Hugging Face Trainer and torchtune's recipes do theirs. The
stall is the time in which training stands still; how much longer the step takes that goes on
meanwhile is reported beside it.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Check, alternate, at_most, keep
from benchmarks.sizes import SIZES
from recipes.batch import Batch
from recipes.checkpoint import Checkpointer
from recipes.decoder import Decoder
from recipes.model import TrainableModel
from recipes.optimizer import Optimizers, build_optimizers
from recipes.parallel import join_workers
from recipes.settings import TrainingSettings
from recipes.step import train_step

SHAPE = SIZES["135m"].shape
ROWS, LENGTH = 4, 256
ROUNDS = 4


class Saving:
    """One way of saving, timed."""

    def __init__(
        self, folder: Path, in_background: bool, model: TrainableModel, optimizers: Optimizers
    ) -> None:
        self._workers = join_workers()
        self._checkpointer = Checkpointer(
            str(folder), {}, 1, in_background, self._workers, lambda line: None
        )
        self._model, self._optimizers = model, optimizers
        self._batch = random_batch()
        self._step = 0
        self.step_seconds: list[float] = []

    def stall(self) -> float:
        """Seconds that training stands still for a save; the rest is waited for afterwards."""
        self._step += 1
        self._checkpointer.take_stall()
        self._checkpointer.save(self._step, self._model, self._optimizers, {})
        self.step()
        stalled = self._checkpointer.take_stall()
        self._checkpointer.wait()
        return stalled

    def step(self) -> float:
        """Seconds of one training step."""
        began = time.perf_counter()
        train_step(
            self._model,
            self._optimizers,
            [self._batch],
            learning_rate=1e-4,
            gradient_clip=1.0,
            largest_norm=float("inf"),
            precision="bfloat16",
            workers=self._workers,
            before_update=self._checkpointer.wait_until_copied,
        )
        self.step_seconds.append(time.perf_counter() - began)
        return self.step_seconds[-1]


def random_batch() -> Batch:
    """One step's rows, one document each."""
    tokens = torch.randint(0, SHAPE.vocab_size, (ROWS, LENGTH))
    positions = torch.arange(LENGTH).expand_as(tokens)
    return Batch(tokens, tokens.roll(-1, dims=1), positions, torch.zeros_like(tokens))


def main() -> None:
    """Measure, print and keep the result."""
    decoder = Decoder(SHAPE)
    decoder.initialise()
    model = TrainableModel(decoder)
    optimizers = build_optimizers(model, TrainingSettings())
    with tempfile.TemporaryDirectory() as root:
        background = Saving(Path(root) / "background", True, model, optimizers)
        at_once = Saving(Path(root) / "at_once", False, model, optimizers)
        at_once.step()
        first = background.stall()
        at_once.stall()
        undisturbed = median(at_once.step() for _ in range(ROUNDS))
        background.step_seconds.clear()
        ours, peer = alternate(background.stall, at_once.stall, ROUNDS)
    shares = [a / b for a, b in zip(ours, peer, strict=True)]
    slowed = median(background.step_seconds) - undisturbed
    keep(
        "checkpoint_stall",
        ours=ours,
        peer=peer,
        unit="s",
        peer_name="the same save at once",
        better="lower",
        packages=["torch"],
        checks={
            "share of the time of saving at once": at_most(median(shares), 0.05),
            "the first, which makes the buffers": at_most(first, 2.0, "s"),
            "the step meanwhile takes longer by": Check(slowed, "reported", True),
        },
    )


if __name__ == "__main__":
    main()
