"""The loss of models that learn from examples is Hugging Face's own."""

from pathlib import Path

import pytest
import torch

from recipes.data.batch import IGNORED, ExampleBatch
from recipes.model.example_networks import load_classifier, load_sequence_to_sequence
from tests.tiny_models import encoder, encoder_decoder

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
