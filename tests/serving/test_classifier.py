"""The engine of models that tell classes apart."""

import asyncio
from pathlib import Path

import pytest

from serving.engine.protocol import Refused
from serving.engine.transformers_model import Classifier
from tests.serving.conftest import engine_of, generate, generate_request
from tests.tiny_models import encoder

LABELS = ["electrician", "plumber"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RoBERTa with a head for two classes."""
    from transformers import AutoModelForSequenceClassification

    made = tmp_path_factory.mktemp("classifier")
    encoder(made)
    model = AutoModelForSequenceClassification.from_pretrained(made, num_labels=2)
    model.config.id2label = dict(enumerate(LABELS))
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def classifier(folder: Path, conversions: Path) -> Classifier:
    return engine_of(folder, Classifier, conversions)


def test_the_most_likely_class_comes_with_the_probability_of_each(
    classifier: Classifier, folder: Path
) -> None:
    import torch
    from transformers import pipeline

    by_transformers = pipeline("text-classification", str(folder), top_k=None, dtype=torch.bfloat16)
    (expected,) = by_transformers(["A pump fails."])
    answer = generate(classifier, generate_request(prompt="A pump fails."))
    assert answer.text == expected[0]["label"]
    for one in expected:
        assert answer.class_scores[one["label"]] == pytest.approx(one["score"], abs=0.01)


def test_long_texts_and_chats_are_refused(classifier: Classifier) -> None:
    with pytest.raises(Refused, match="at most 64 fit"):
        classifier.encode(generate_request(prompt="valve " * 400))
    with pytest.raises(Refused, match="classifies texts"):
        classifier.encode(generate_request(messages=[{"role": "user", "content": "x"}]))


def test_requests_at_the_same_time_are_all_answered(classifier: Classifier) -> None:
    async def ask(text: str) -> str:
        tokens = classifier.encode(generate_request(prompt=text))
        async for chunk in classifier.generate(generate_request(prompt=text), tokens):
            return chunk.text
        raise AssertionError("there is an answer")

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*(ask(f"valve {n}") for n in range(8))))

    assert set(asyncio.run(ask_all())) <= set(LABELS)
