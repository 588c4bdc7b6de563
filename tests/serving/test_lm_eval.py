"""lm-eval's `local-completions`, unmodified, scores through the endpoint what the model says."""

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serving.conftest import Client

PAIRS = [("The valve opens", " before start-up."), ("A pump", " fails every week.")]


def expected(folder: Path, context: str, continuation: str) -> float:
    """The log-likelihood of a continuation by the model itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before, after = tokenizer.encode(context), tokenizer.encode(continuation)
    with torch.no_grad():
        logits = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
    places = range(len(before) - 1, len(before) + len(after) - 1)
    return sum(float(logits[at, token]) for at, token in zip(places, after, strict=True))


@pytest.mark.soak
def test_log_likelihoods_are_the_models_own(client: Client, tiny_model_folder: Path) -> None:
    scorer = LocalCompletionsAPI(
        model="default",
        base_url=f"{client.endpoint.url}/v1/completions",
        tokenizer=str(tiny_model_folder),
        tokenizer_backend="huggingface",
        max_length=64,
    )
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    for pair, (found, _) in zip(PAIRS, scorer.loglikelihood(requests), strict=True):
        assert found == pytest.approx(expected(tiny_model_folder, *pair), abs=0.5)
