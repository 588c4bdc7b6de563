"""The engine of models that tell classes apart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from artifacts.model_folder import check_model_folder
from serving.engine.choice import choose_engine, load_model
from serving.engine.classifier import Classifier
from serving.engine.process import SECRET_VARIABLE
from serving.engine.program import build_app
from serving.engine.protocol import GenerateRequest, Refusal
from serving.settings import EndpointSettings
from tests.tiny_tasks import encoder

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
def classifier(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    check_model_folder(folder)
    settings = EndpointSettings()
    conversions = tmp_path_factory.mktemp("conversions")
    loaded = load_model(folder, settings, choose_engine(folder, settings, conversions))
    assert isinstance(loaded, Classifier)
    return loaded


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"max_tokens": 1, "max_prompt_tokens": 64, "temperature": 0, "top_p": 1} | fields
    )


def test_the_most_likely_class_comes_with_the_probability_of_each(
    classifier: Classifier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import pipeline

    by_transformers = pipeline("text-classification", str(folder), top_k=None, dtype=torch.bfloat16)
    (expected,) = by_transformers(["A pump fails."])
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    with TestClient(build_app(classifier)) as client:
        answer = client.post(
            "/generate",
            json=request(prompt="A pump fails.").model_dump(),
            headers={"Authorization": "Bearer secret"},
        ).json()
    assert answer["text"] == expected[0]["label"]
    for one in expected:
        assert answer["class_scores"][one["label"]] == pytest.approx(one["score"], abs=0.01)


def test_long_texts_and_chats_are_refused(classifier: Classifier) -> None:
    too_long = classifier.encode(request(prompt="valve " * 400))
    assert isinstance(too_long, Refusal) and "at most 64 fit" in too_long.message
    chat = classifier.encode(request(messages=[{"role": "user", "content": "x"}]))
    assert isinstance(chat, Refusal) and "classes" in chat.message


def test_requests_at_the_same_time_are_all_answered(classifier: Classifier) -> None:
    async def ask(text: str) -> str:
        tokens = classifier.encode(request(prompt=text))
        assert isinstance(tokens, list)
        async for chunk in classifier.generate(request(prompt=text), tokens):
            return chunk.text
        raise AssertionError("there is an answer")

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*(ask(f"valve {n}") for n in range(8))))

    assert set(asyncio.run(ask_all())) <= set(LABELS)
