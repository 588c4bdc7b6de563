"""Hidden tokens: which are, what is shown of them, and that texts of a row do not meet."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import flex_attention

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch
from recipes.device import Device
from recipes.encoders.masked import HIDDEN, MaskedNetwork, hide, load_masked
from recipes.model.base_model import BaseModelSettings, prepare
from tests.tiny_models import encoder, masked_encoder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "base"
    masked_encoder(folder)
    return folder


def test_fifteen_in_a_hundred_are_told_in_three_ways(shards: ShardStats) -> None:
    tokens = np.random.default_rng(0).integers(1, 500, 200_000).astype(np.uint16)
    shown, targets = hide(tokens, shards, sample=1)
    told = targets != IGNORED
    np.testing.assert_array_equal(shown[~told], tokens[~told])
    np.testing.assert_array_equal(targets[told], tokens[told])
    ways = (shown[told] == HIDDEN, shown[told] == tokens[told])
    shares = [told.mean(), *(way.mean() for way in ways)]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.01)


def test_a_sample_decides_which_and_the_ends_of_texts_stay(shards: ShardStats) -> None:
    tokens = np.full(400, 7, np.uint16)
    tokens[::4] = shards.end_token_id
    first, again, other = (hide(tokens, shards, sample)[1] for sample in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[::4] == IGNORED).all()
    assert (hide(tokens[1:3], shards, 5)[1] != IGNORED).any()


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    encoder(tmp_path)
    with pytest.raises(UserError, match="has no mask token"):
        load_masked(tmp_path)


@pytest.mark.fault(
    "base_model",
    "encoder without a head that predicts masked tokens",
    sees="the tensor that is absent, and which models have the head",
    then="nothing is trained with a random head",
)
def test_an_encoder_without_the_head_is_refused(base: Path, tmp_path: Path) -> None:
    transformers.AutoModel.from_pretrained(base).save_pretrained(tmp_path / "embeds")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "embeds")
    settings = BaseModelSettings(folder=str(tmp_path / "embeds"))
    told = r"RobertaModel, which has no head .*lm_head.bias is not there"

    with pytest.raises(UserError, match=told):
        prepare(settings, tmp_path / "out", print, "encoder", needs_masked_head=True)
    # A classifier gets a head of its own, and its base model may be there already.
    prepare(settings, tmp_path / "out", print, "encoder")
    with pytest.raises(UserError, match=told):
        load_masked(tmp_path / "out")


MASK = 5


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize(
    ("kind", "own", "shares_rows"),
    [
        ("Roberta", {}, True),
        ("Camembert", {}, True),
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
    kind: str,
    own: dict[str, Any],
    shares_rows: bool,
    by_blocks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By blocks as on a GPU, whose kernels torch replaces here by plain products."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(Device, "attends_by_blocks", by_blocks)
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
    with torch.compiler.set_stance("force_eager"):
        network.try_packed_rows(40)
        losses = network.losses(row)

    assert network.reads_packed_rows == shares_rows
    attention = inner.config._attn_implementation
    assert (attention == "flex_attention") == (shares_rows and by_blocks)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)

    forgotten = replace(
        row,
        targets=torch.full_like(tokens, IGNORED),
        segments=torch.full_like(row.segments, PADDING_SEGMENT),
    )
    with torch.compiler.set_stance("force_eager"):
        network.loss(forgotten).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())
