"""How long training stands still while a checkpoint of SmolLM2-135M's size is saved.

Ours copies the state into buffers that it keeps and saves from there; the peer is the same save
done at once, as the Hugging Face Trainer and torchtune's recipes do theirs.
"""

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import alternate, at_most, keep
from recipes.checkpoint import Checkpointer
from recipes.decoder import Decoder, DecoderShape
from recipes.model import TrainableModel
from recipes.optimizer import Optimizers, build_optimizers
from recipes.parallel import join_workers
from recipes.settings import TrainingSettings

SMOLLM2_135M = DecoderShape(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    heads=9,
    key_value_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    query_key_norm=False,
    tied_embeddings=True,
    initializer_range=0.02,
    rope={"rope_type": "default", "rope_theta": 100_000.0},
)
ROUNDS = 4


class Saving:
    """One way of saving, timed."""

    def __init__(
        self, folder: Path, in_background: bool, model: TrainableModel, optimizers: Optimizers
    ) -> None:
        self._checkpointer = Checkpointer(
            str(folder), {}, 1, in_background, join_workers(), lambda line: None
        )
        self._model, self._optimizers = model, optimizers
        self._step = 0

    def stall(self) -> float:
        """Seconds until training may go on; what is still to be written is waited for after."""
        self._step += 1
        began = time.perf_counter()
        self._checkpointer.save(self._step, self._model, self._optimizers, {})
        stalled = time.perf_counter() - began
        self._checkpointer.wait()
        return stalled


def main() -> None:
    """Measure, print and keep the result."""
    decoder = Decoder(SMOLLM2_135M)
    decoder.initialise()
    model = TrainableModel(decoder)
    optimizers = build_optimizers(model, TrainingSettings())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers[0].step()
    model.zero_grad()
    with tempfile.TemporaryDirectory() as root:
        background = Saving(Path(root) / "background", True, model, optimizers)
        at_once = Saving(Path(root) / "at_once", False, model, optimizers)
        first = background.stall()
        at_once.stall()
        ours, peer = alternate(background.stall, at_once.stall, ROUNDS)
    shares = sorted(a / b for a, b in zip(ours, peer, strict=True))
    keep(
        "checkpoint_stall",
        ours=ours,
        peer=peer,
        unit="s",
        peer_name="the same save at once",
        better="lower",
        packages=["torch"],
        checks={
            "share of the time of saving at once": at_most(shares[len(shares) // 2], 0.05),
            "the first, which makes the buffers": at_most(first, 2.0, "s"),
        },
    )


if __name__ == "__main__":
    main()
