"""The loss of a class is Hugging Face's own."""

from pathlib import Path

import pytest
import torch

from recipes.data.batch import ExampleBatch
from recipes.encoders.classification import load_classifier
from tests.tiny_models import encoder

TOKENS = torch.tensor([[11, 12, 13, 14], [21, 22, 300, 300]])
IS_INPUT = torch.tensor([[True] * 4, [True, True, False, False]])


def test_a_classs_loss_counts_by_its_weight(tmp_path: Path) -> None:
    encoder(tmp_path)
    batch = ExampleBatch(TOKENS, IS_INPUT, torch.tensor([[0], [1]]))
    plain = load_classifier(tmp_path, ["a", "b"], 0, None)
    weighted = load_classifier(tmp_path, ["a", "b"], 0, [3.0, 0.5])
    pad = plain.network.inner.config.pad_token_id
    inputs = TOKENS.masked_fill(~IS_INPUT, pad)
    own = plain.network.inner(
        input_ids=inputs, attention_mask=IS_INPUT.long(), labels=torch.tensor([0, 1])
    )
    assert plain(batch).item() == pytest.approx(2 * own.loss.item(), rel=1e-5)
    single = torch.nn.functional.cross_entropy(own.logits, torch.tensor([0, 1]), reduction="none")
    expected = 3 * single[0].item() + 0.5 * single[1].item()
    assert weighted(batch).item() == pytest.approx(expected, rel=1e-5)
