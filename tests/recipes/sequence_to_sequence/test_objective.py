"""The loss of a target is Hugging Face's own."""

from pathlib import Path

import pytest
import torch

from recipes.data.batch import IGNORED, ExampleBatch
from recipes.sequence_to_sequence.objective import load_sequence_to_sequence
from tests.tiny_models import encoder_decoder

TOKENS = torch.tensor([[11, 12, 13, 14], [21, 22, 300, 300]])
IS_INPUT = torch.tensor([[True] * 4, [True, True, False, False]])


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_a_targets_loss(kind: str, tmp_path: Path) -> None:
    encoder_decoder(tmp_path, kind)
    model = load_sequence_to_sequence(tmp_path)
    targets = torch.tensor([[31, 32, 33], [41, IGNORED, IGNORED]])

    loss = model(ExampleBatch(TOKENS, IS_INPUT, targets))

    inner = model.network.inner
    own = inner(input_ids=TOKENS, attention_mask=IS_INPUT.long(), labels=targets).loss
    assert loss.item() == pytest.approx(4 * own.item(), rel=1e-5)
    # Every block can be sharded and recomputed by itself.
    assert len(model.network.layers) == 4
