"""Batches get few shapes, and their loss stays what it is."""

import torch

from recipes.data.batch import IGNORED, ExampleBatch
from recipes.tpu.device import in_few_shapes


def batch(rows: int, inputs: int, targets: int) -> ExampleBatch:
    tokens = torch.arange(rows * inputs).view(rows, inputs)
    told = torch.ones(rows, targets, dtype=torch.long)
    return ExampleBatch(tokens, torch.ones(rows, inputs, dtype=torch.bool), told)


def test_examples_are_padded_to_powers_of_two_and_no_row_shows_nothing() -> None:
    given = batch(rows=5, inputs=9, targets=3)
    made = in_few_shapes(given, rows=4, longest=64)
    assert made.tokens.shape == (8, 16) and made.targets.shape == (8, 4)
    assert made.target_count == given.target_count
    assert torch.equal(made.tokens[:5, :9], given.tokens)
    assert made.is_input.any(dim=1).all() and not made.is_input[:5, 9:].any()
    assert (made.targets[5:] == IGNORED).all()


def test_no_row_is_longer_than_those_of_the_shards() -> None:
    made = in_few_shapes(batch(rows=4, inputs=33, targets=1), rows=4, longest=40)
    assert made.tokens.shape == (4, 40) and made.targets.shape == (4, 1)
