"""Whether activations are kept on a GPU follows from a reckoning, which agrees with autograd."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from recipes.data.batch import Batch
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import network
from recipes.model.decoder.attention import SegmentMask, allowed_positions
from recipes.model.decoder.network import Decoder, DecoderShape
from recipes.training.setup import activation_bytes, keeps_activations
from tests.recipes.model.test_compile import SHAPE

LLAMA_1B = replace(
    SHAPE,
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    layers=16,
    heads=32,
    key_value_heads=8,
    head_dim=64,
)
LLAMA_8B = replace(
    LLAMA_1B,
    hidden_size=4096,
    intermediate_size=14_336,
    layers=32,
    head_dim=128,
    tied_embeddings=False,
)
H200, A100 = 141e9, 40e9
TOKENS = 509
"""A number that no size of the model is."""


def on_paper(shape: DecoderShape) -> TrainableModel:
    with torch.device("meta"):
        return TrainableModel(Decoder(shape))


@pytest.mark.parametrize(
    ("shape", "rows", "processes", "memory", "kept"),
    [
        (LLAMA_1B, 8, 1, H200, True),
        (LLAMA_1B, 8, 1, A100, False),
        (LLAMA_1B, 1, 1, A100, True),
        (LLAMA_8B, 1, 1, H200, False),
        (LLAMA_8B, 4, 8, H200, True),
        (LLAMA_8B, 64, 8, H200, False),
        (LLAMA_8B, 64, 1, None, True),
    ],
)
def test_activations_are_kept_where_the_memory_holds_them(
    shape: DecoderShape, rows: int, processes: int, memory: float | None, kept: bool
) -> None:
    """Of rows of 4,096 tokens; a processor keeps them, as nobody asked for less."""
    assert keeps_activations(on_paper(shape), rows * 4096, processes, memory) is kept


def test_what_is_reckoned_is_what_compiled_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the partition that Inductor makes between the passes, on a processor."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        network, "segment_mask", lambda segments, _: SegmentMask(allowed_positions(segments))
    )
    shape = replace(SHAPE, hidden_size=96, head_dim=24, intermediate_size=400, query_key_norm=False)
    decoder = Decoder(shape)
    decoder.initialize()
    model = TrainableModel(decoder)
    for layer in decoder.layers:
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    tokens = torch.zeros((1, TOKENS), dtype=torch.long)
    batch = Batch(tokens, tokens, torch.arange(TOKENS)[None], tokens)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # Activations have places for each token, weights none and masks for each pair.
        if tensor.is_floating_point() and tensor.shape.count(TOKENS) == 1:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        hidden = decoder(batch.tokens, batch.positions, batch.segments)
    assert hidden.requires_grad
    assert activation_bytes(model, TOKENS) == pytest.approx(sum(kept.values()), rel=0.25)
