"""The engine of models that tell what stands behind a mask."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from serving.engine.choice import choose_engine, load_model
from serving.engine.mask_filler import MaskFiller
from serving.engine.process import SECRET_VARIABLE
from serving.engine.program import build_app
from serving.engine.protocol import GenerateRequest, Refusal
from serving.settings import EndpointSettings
from tests.tiny_tasks import masked_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RoBERTa whose tokenizer has a mask token."""
    made = tmp_path_factory.mktemp("masked")
    masked_encoder(made)
    return made


@pytest.fixture(scope="module")
def filler(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MaskFiller:
    settings = EndpointSettings()
    conversions = tmp_path_factory.mktemp("conversions")
    loaded = load_model(folder, settings, choose_engine(folder, settings, conversions))
    assert isinstance(loaded, MaskFiller)
    return loaded


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"max_tokens": 1, "max_prompt_tokens": 64, "temperature": 0, "top_p": 1} | fields
    )


def test_the_most_likely_tokens_come_with_their_probabilities(
    filler: MaskFiller, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import pipeline

    text = "The valve<mask> every week."
    expected = pipeline("fill-mask", str(folder), dtype=torch.bfloat16)(text)
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    with TestClient(build_app(filler)) as client:
        answer = client.post(
            "/generate",
            json=request(prompt=text).model_dump(),
            headers={"Authorization": "Bearer secret"},
        ).json()
    found = answer["class_scores"]
    assert sum(found.values()) == pytest.approx(sum(one["score"] for one in expected), abs=0.01)
    assert answer["text"] == max(found, key=found.get)
    assert answer["text"].strip() in {one["token_str"].strip() for one in expected}


def test_a_text_without_a_mask_is_told_what_comes_after_it(filler: MaskFiller) -> None:
    assert filler.encode(request(prompt="The")) == filler.encode(request(prompt="The <mask>"))


def test_a_text_with_two_masks_is_refused(filler: MaskFiller) -> None:
    refused = filler.encode(request(prompt="<mask> and <mask>"))
    assert isinstance(refused, Refusal) and "where one is expected" in refused.message


def test_a_chat_is_refused(filler: MaskFiller) -> None:
    refused = filler.encode(request(messages=[{"role": "user", "content": "x"}]))
    assert isinstance(refused, Refusal) and "behind a mask" in refused.message
