"""Batches of few shapes, since XLA compiles a program for each shape that it meets."""

import torch
import torch.nn.functional as F

from recipes.data.batch import IGNORED, Batch, ExampleBatch


def in_few_shapes(batch: Batch | ExampleBatch, rows: int, longest: int) -> Batch | ExampleBatch:
    """The batch with padding, which changes no loss, up to a power of two in each direction.

    Rows of packed text are all of one shape already.

    Args:
        rows: of which the number of rows has to be a multiple.
        longest: most tokens of a row.
    """
    if isinstance(batch, Batch):
        return batch
    count = -(-len(batch.tokens) // rows)
    more_rows = rows * _power_of_two(count) - len(batch.tokens)
    more_inputs, more_targets = _more(batch.tokens, longest), _more(batch.targets, longest)
    is_input = F.pad(batch.is_input, (0, more_inputs, 0, more_rows))
    # A row that shows nothing at all would be answered with no number.
    is_input[len(batch.tokens) :, 0] = True
    return type(batch)(
        F.pad(batch.tokens, (0, more_inputs, 0, more_rows)),
        is_input,
        F.pad(batch.targets, (0, more_targets, 0, more_rows), value=IGNORED),
    )


def _more(tokens: torch.Tensor, longest: int) -> int:
    width = tokens.shape[1]
    return max(0, min(_power_of_two(width), longest) - width) if width > 1 else 0


def _power_of_two(count: int) -> int:
    """The smallest one that is no less."""
    return 1 << (count - 1).bit_length()
