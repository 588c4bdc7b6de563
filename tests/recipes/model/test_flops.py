"""FLOPs are those that torch counts, and of attention those that document masks leave."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import PADDING_SEGMENT, Batch
from recipes.encoders.masked import read_masked
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder
from recipes.model.lora import add_adapters
from recipes.sections import LoraSettings
from recipes.training.telemetry import training_flops
from tests.recipes.model.test_compile import SHAPE

LENGTHS = (3, 5)
PADDING = 2


def initialized_model() -> TrainableModel:
    decoder = Decoder(SHAPE)
    decoder.initialize()
    return TrainableModel(decoder)


def counted_products(model: TrainableModel, batch: Batch) -> int:
    """FLOPs of both passes that torch counts, attention aside."""
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    counts = counter.get_flop_counts()["Global"].items()
    return sum(flops for op, flops in counts if "attention" not in str(op))


def test_documents_attend_to_themselves_alone_and_parameters_multiply_every_token() -> None:
    parts = [torch.arange(length) for length in (*LENGTHS, PADDING)]
    numbers = (0, 1, PADDING_SEGMENT)
    segments = [torch.full_like(part, n) for n, part in zip(numbers, parts, strict=True)]
    positions = torch.cat(parts)[None]
    batch = Batch(positions, positions, positions, torch.cat(segments)[None])
    assert batch.pair_count == 3 * 4 // 2 + 5 * 6 // 2
    assert batch.token_count == sum(LENGTHS)

    model = initialized_model()
    found = training_flops(
        model.parameter_count,
        model.trained_count,
        model.attention_width,
        batch.positions.numel(),
        batch.pair_count,
    )
    assert found["6n"] == pytest.approx(counted_products(model, batch), rel=0.01)
    assert found["masked"] - found["6n"] == 12 * (3 * 4 * 16) * batch.pair_count


def test_of_frozen_parameters_no_gradient_is_counted() -> None:
    model = initialized_model()
    add_adapters(model, LoraSettings(rank=8), seed=0)
    positions = torch.arange(32)[None]
    batch = Batch(positions, positions, positions, torch.zeros_like(positions))
    counted = model.parameter_count, model.trained_count
    found = training_flops(*counted, attention_width=0, tokens=32, pairs=0)["6n"]
    assert counted[1] < counted[0]
    # No gradient passes through what lies before the first adapter.
    products = counted_products(model, batch)
    assert products < found < 1.1 * products


def test_an_encoder_looks_both_ways(train_split: ShardSet) -> None:
    batch = read_masked(train_split, np.arange(8))
    lengths = torch.unique(
        (batch.segments + 1000 * torch.arange(8)[:, None])[batch.segments >= 0], return_counts=True
    )[1]
    assert batch.pair_count == int(lengths.square().sum())
    assert batch.to(torch.device("cpu")).pair_count == batch.pair_count
