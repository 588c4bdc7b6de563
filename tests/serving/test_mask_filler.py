"""The engine of models that tell what stands behind a mask."""

from pathlib import Path

import pytest

from serving.engine.protocol import Refused
from serving.engine.transformers_model import MaskFiller
from tests.serving.conftest import engine_of, generate, generate_request
from tests.tiny_models import masked_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RoBERTa whose tokenizer has a mask token."""
    made = tmp_path_factory.mktemp("masked")
    masked_encoder(made)
    return made


@pytest.fixture(scope="module")
def filler(folder: Path, conversions: Path) -> MaskFiller:
    return engine_of(folder, MaskFiller, conversions)


def test_the_most_likely_tokens_come_with_their_probabilities(
    filler: MaskFiller, folder: Path
) -> None:
    import torch
    from transformers import pipeline

    text = "The valve<mask> every week."
    expected = pipeline("fill-mask", str(folder), dtype=torch.bfloat16)(text)
    answer = generate(filler, generate_request(prompt=text))
    found = answer.class_scores
    assert sum(found.values()) == pytest.approx(sum(one["score"] for one in expected), abs=0.01)
    assert answer.text == max(found, key=found.__getitem__)
    assert answer.text.strip() in {one["token_str"].strip() for one in expected}


def test_a_text_without_a_mask_is_told_what_comes_after_it(filler: MaskFiller) -> None:
    assert filler.encode(generate_request(prompt="The")) == filler.encode(
        generate_request(prompt="The <mask>")
    )


def test_a_text_with_two_masks_is_refused(filler: MaskFiller) -> None:
    with pytest.raises(Refused, match="exactly one is expected"):
        filler.encode(generate_request(prompt="<mask> and <mask>"))


def test_a_chat_is_refused(filler: MaskFiller) -> None:
    with pytest.raises(Refused, match="fills in a mask token"):
        filler.encode(generate_request(messages=[{"role": "user", "content": "x"}]))
