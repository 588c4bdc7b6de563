"""The loss of models that learn from examples is Hugging Face's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch, ExampleBatch
from recipes.data.masked_rows import HIDDEN
from recipes.model.example_networks import (
    MaskedNetwork,
    load_classifier,
    load_sequence_to_sequence,
)
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


MASK = 5


@pytest.mark.parametrize(
    ("kind", "own", "shares_rows"),
    [
        ("Roberta", {}, True),
        ("Bert", {}, True),
        # Distances, and masks, of their own making.
        ("DebertaV2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, False),
        # A window, which a mask that is given would replace.
        ("ModernBert", {"global_attn_every_n_layers": 2, "local_attention": 24}, False),
        # No module of its own for the output matrix.
        ("MobileBert", {"embedding_size": 16, "intra_bottleneck_size": 32}, False),
    ],
)
def test_a_hidden_tokens_loss_is_that_of_its_text_by_itself(
    kind: str, own: dict[str, Any], shares_rows: bool
) -> None:
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        **ends,
        **own,
    )
    inner = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    tokens = torch.randint(6, 100, (1, 40))
    lengths, padding = (25, 12), 3
    told = torch.zeros_like(tokens, dtype=torch.bool)
    told[0, [2, 15, 24, 27, 36]] = True
    row = Batch(
        tokens.masked_fill(told, HIDDEN),
        tokens.masked_fill(~told, IGNORED),
        torch.tensor([[*range(lengths[0]), *range(lengths[1]), *[0] * padding]]),
        torch.tensor([[0] * lengths[0] + [1] * lengths[1] + [-1] * padding]),
    )
    alone = []
    for text in row.tokens[:, :-padding].split(lengths, dim=1):
        shown = text.masked_fill(text == HIDDEN, MASK)
        logits = inner(input_ids=shown, attention_mask=torch.ones_like(shown)).logits
        alone.append(logits[text == HIDDEN])
    expected = F.cross_entropy(torch.cat(alone), tokens[told], reduction="none")

    network = MaskedNetwork(inner, MASK)
    network.try_packed_rows(40)

    assert network.reads_packed_rows == shares_rows
    torch.testing.assert_close(network.losses(row), expected, atol=1e-5, rtol=0)

    forgotten = replace(
        row,
        targets=torch.full_like(tokens, IGNORED),
        segments=torch.full_like(row.segments, PADDING_SEGMENT),
    )
    network.loss(forgotten).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())
