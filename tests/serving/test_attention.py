"""Requests of one batch attend each to itself, whatever their lengths."""

from typing import Any

import pytest
import torch

from serving.engine import attention

LENGTHS = (1, 5, 90, 40, 17, 64)
NEW_TOKENS = 40
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}


def model_of(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    if kind == "sliding window":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def alone(model: Any, prompt: list[int]) -> list[int]:
    """transformers' own greedy continuation of one prompt."""
    written = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return written[0, len(prompt) :].tolist()


def together(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The same in one batch with this attention; a long prompt is read in several steps."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=128, max_batch_tokens=48
        ),
    )
    attention.register()
    model.set_attn_implementation(attention.NAME)
    manager.start()
    try:
        names = manager.add_requests(inputs=prompts, max_new_tokens=NEW_TOKENS)
        answers = {}
        while len(answers) < len(names):
            answer = manager.get_result(timeout=30)
            assert answer is not None and answer.error is None
            if answer.is_finished():
                answers[answer.request_id] = list(answer.generated_tokens)
    finally:
        manager.stop(block=True)
    return [answers[name] for name in names]


@pytest.mark.parametrize("kind", ["full", "sliding window"])
def test_batch_writes_what_the_model_writes_alone(kind: str) -> None:
    model = model_of(kind)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 512, (n,), generator=draw).tolist() for n in LENGTHS]
    expected = [alone(model, prompt) for prompt in prompts]
    assert together(model, prompts) == expected
    assert len({tuple(answer) for answer in expected}) == len(prompts)


@pytest.mark.parametrize("asked", attention.UNSUPPORTED)
def test_attention_that_cannot_be_done_is_refused_by_name(asked: str) -> None:
    one = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=asked):
        attention.attend(torch.nn.Identity(), one, one, one, None, **{asked: 30.0})
