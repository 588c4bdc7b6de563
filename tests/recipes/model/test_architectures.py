"""The loss of every model that is accepted is Hugging Face's own; others are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, Batch
from recipes.model.causal_model import TrainableModel, TransformersNetwork, load_model
from recipes.model.decoder import Decoder
from recipes.model.probe import check_trainable
from tests.recipes.model.architectures import ARCHITECTURES, VOCABULARY, tiny_config, write_tiny

ROW = 64
ACCEPTED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "phi": {"resid_pdrop": 0.1},
    "bert": {},
    "ctrl": {},
    "nanochat": {},
    "opt": {"dropout": 0.1},
    "gpt_bigcode": {"attn_pdrop": 0.1},
    "seed_oss": {"residual_dropout": 0.1},
    "gptj": {},
    "gpt_oss": {},
    "mixtral": {"output_router_logits": True},
    "granitemoe": {"output_router_logits": True, "logits_scaling": 4.0},
    "qwen3": {},
}
"""What a plain product of hidden states and output matrix, or a dropout left on, gets wrong."""
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {},
    "jamba": {},
    "bamba": {},
    "minimax": {},
    "recurrent_gemma": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "phimoe": {"router_jitter_noise": 0.2},
    "roberta": {},
}


def load_checked(config: PretrainedConfig, folder: Path) -> TrainableModel:
    write_tiny(config, folder)
    model = load_model(folder)
    if not isinstance(model.network, Decoder):
        check_trainable(model.network, ROW)
    return model


def packed(documents: list[torch.Tensor]) -> Batch:
    """The documents in one row."""
    targets = [torch.cat((tokens[1:], torch.tensor([IGNORED]))) for tokens in documents]
    positions = [torch.arange(len(tokens)) for tokens in documents]
    segments = [torch.full_like(tokens, n) for n, tokens in enumerate(documents)]
    rows = (documents, targets, positions, segments)
    return Batch(*(torch.cat(row)[None] for row in rows))


def assert_loss_is_hugging_faces(model: TrainableModel, folder: Path) -> None:
    torch.manual_seed(5)
    documents = [torch.randint(8, VOCABULARY, (length,)) for length in (29, 35)]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = 0.0
    for tokens in documents:
        mean = reference(input_ids=tokens[None], labels=tokens[None]).loss
        expected += float(mean) * (len(tokens) - 1)

    model.train()
    losses = {float(model(packed(documents)).detach()) for _ in range(2)}
    assert max(losses) == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 1, "a second pass over the same row has another loss"
    model(packed(documents)).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, "no optimizer state would be saved for them"


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_loss_of_an_accepted_model_is_hugging_faces(name: str, tmp_path: Path) -> None:
    config = tiny_config(CONFIG_MAPPING[name], **ACCEPTED[name])
    assert_loss_is_hugging_faces(load_checked(config, tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_what_is_measured_of_a_mixture_is_the_text_without_its_routers_balance(
    name: str, tmp_path: Path
) -> None:
    model = load_checked(tiny_config(CONFIG_MAPPING[name], **ACCEPTED[name]), tmp_path)
    tokens = torch.randint(8, VOCABULARY, (29,))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, output_router_logits=False).eval()
    with torch.no_grad():
        expected = 28 * float(reference(input_ids=tokens[None], labels=tokens[None]).loss)
        trained, measured = (float(model.train(mode)(packed([tokens]))) for mode in (True, False))
    assert measured == pytest.approx(expected, rel=1e-5)
    assert trained > measured * (1 + 1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_exactly_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = tiny_config(CONFIG_MAPPING[name], **REFUSED[name])
    with pytest.raises(UserError, match=r"the architecture \w+ cannot be trained here"):
        load_checked(config, tmp_path)


def test_damaged_weights_are_not_taken_for_an_odd_architecture(tmp_path: Path) -> None:
    write_tiny(tiny_config(CONFIG_MAPPING["opt"]), tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model.network, TransformersNetwork)
    model.network.inner.get_output_embeddings().weight.data[3, 5] = torch.nan
    with pytest.raises(UserError, match="holds values that are not a number"):
        check_trainable(model.network, ROW)


def test_a_window_shorter_than_the_rows_is_refused(tmp_path: Path) -> None:
    config = tiny_config(CONFIG_MAPPING["gemma2"], sliding_window=8)
    with pytest.raises(UserError, match="Gemma2ForCausalLM"):
        load_checked(config, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_exact_or_refused(name: str, tmp_path: Path) -> None:
    try:
        write_tiny(tiny_config(CONFIG_MAPPING[name]), tmp_path)
    except Exception as error:
        pytest.skip(f"cannot be built tiny: {error}")
    model = load_model(tmp_path)
    try:
        if not isinstance(model.network, Decoder):
            check_trainable(model.network, ROW)
    except UserError:
        return
    assert_loss_is_hugging_faces(model, tmp_path)
