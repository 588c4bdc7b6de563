"""FLOPs are those that torch counts, and of attention those that document masks leave."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.data.batch import PADDING_SEGMENT, Batch
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.network import Decoder
from recipes.training.trainer import training_flops
from tests.recipes.model.test_compile import SHAPE

LENGTHS = (3, 5)
PADDING = 2


def test_documents_attend_to_themselves_alone_and_parameters_multiply_every_token() -> None:
    parts = [torch.arange(length) for length in (*LENGTHS, PADDING)]
    numbers = (0, 1, PADDING_SEGMENT)
    segments = [torch.full_like(part, n) for n, part in zip(numbers, parts, strict=True)]
    positions = torch.cat(parts)[None]
    batch = Batch(positions, positions, positions, torch.cat(segments)[None])
    assert batch.pair_count == 3 * 4 // 2 + 5 * 6 // 2
    assert batch.token_count == sum(LENGTHS)

    decoder = Decoder(SHAPE)
    decoder.initialize()
    model = TrainableModel(decoder)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in counts.items() if "attention" not in op)
    found = training_flops(
        model.parameter_count, model.attention_width, batch.positions.numel(), batch.pair_count
    )
    assert found["6n"] == pytest.approx(products, rel=0.01)
    assert found["masked"] - found["6n"] == 12 * (3 * 4 * 16) * batch.pair_count
