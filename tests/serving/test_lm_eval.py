"""lm-eval's `local-completions`, unmodified, scores through the endpoint what the model says."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.evaluation.bits import document_bits
from recipes.evaluation.documents import Document
from tests.serving.conftest import Client
from tests.tiny import tiny_texts

CONTEXT = 64
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


@pytest.fixture(scope="module")
def scorer(client: Client, tiny_model_folder: Path) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        model="default",
        base_url=f"{client.url}/v1/completions",
        tokenizer=str(tiny_model_folder),
        tokenizer_backend="huggingface",
        max_length=CONTEXT,
    )


@pytest.mark.soak
def test_log_likelihoods_are_the_models_own(
    scorer: LocalCompletionsAPI, tiny_model_folder: Path
) -> None:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    for pair, (found, _) in zip(PAIRS, scorer.loglikelihood(requests), strict=True):
        assert found == pytest.approx(expected(tiny_model_folder, *pair), abs=1e-3)


@pytest.mark.soak
def test_bits_of_a_document_are_those_that_the_gate_judges_by(
    scorer: LocalCompletionsAPI, tiny_model_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    start = tokenizer.bos_token_id
    texts = [text for text in tiny_texts() if len(tokenizer.encode(text)) < CONTEXT]
    documents = [
        Document(text, text, len(text.encode()), np.array([start, *tokenizer.encode(text)]))
        for text in texts
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    judged = document_bits(model, documents, CONTEXT, 256, lambda _: None)
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    found = -np.array(scorer.loglikelihood_rolling(asked)) / math.log(2)
    assert len(texts) > 10
    np.testing.assert_allclose(found, judged, rtol=1e-4)
