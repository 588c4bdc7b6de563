"""The engine of encoders, which tell classes apart or what stands behind a mask."""

from pathlib import Path

import pytest

from serving.engine.protocol import Refused
from serving.engine.transformers_model import Classifier, MaskFiller
from tests.serving.conftest import engine_of, generate, generate_request
from tests.tiny import change_config
from tests.tiny_models import encoder, masked_encoder

LABELS = ["electrician", "plumber"]
CHAT = generate_request(messages=[{"role": "user", "content": "x"}])


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
def masked_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RoBERTa whose tokenizer has a mask token."""
    made = tmp_path_factory.mktemp("masked")
    masked_encoder(made)
    return made


@pytest.fixture(scope="module")
def classifier(folder: Path, conversions: Path) -> Classifier:
    return engine_of(folder, Classifier, conversions)


@pytest.fixture(scope="module")
def filler(masked_folder: Path, conversions: Path) -> MaskFiller:
    return engine_of(masked_folder, MaskFiller, conversions)


def test_the_most_likely_class_comes_with_the_probability_of_each(
    classifier: Classifier, folder: Path
) -> None:
    import torch
    from transformers import pipeline

    by_transformers = pipeline("text-classification", str(folder), top_k=None, dtype=torch.bfloat16)
    (expected,) = by_transformers(["A pump fails."])
    (answer,) = generate(classifier, generate_request(prompt="A pump fails."))
    assert answer.text == expected[0]["label"]
    for one in expected:
        assert answer.class_scores[one["label"]] == pytest.approx(one["score"], abs=0.01)


def test_long_texts_and_chats_are_refused(classifier: Classifier) -> None:
    with pytest.raises(Refused, match="at most 64 fit"):
        classifier.encode(generate_request(prompt="valve " * 400))
    with pytest.raises(Refused, match="classifies texts"):
        classifier.encode(CHAT)


def test_a_text_may_have_as_many_tokens_as_there_are_positions(
    folder: Path, tmp_path: Path, conversions: Path
) -> None:
    """CamemBERT counts from the one after the padding token's, as RoBERTa does."""
    camembert = change_config(
        folder,
        tmp_path / "model",
        model_type="camembert",
        architectures=["CamembertForSequenceClassification"],
    )
    classifier = engine_of(camembert, Classifier, conversions)
    longest, longer = (
        generate_request(prompt=" ".join(["valve"] * words), max_prompt_tokens=1024)
        for words in (254, 255)
    )
    (answer,) = generate(classifier, longest)
    assert answer.prompt_tokens == 255 and answer.class_scores
    with pytest.raises(Refused, match="has 256 tokens; at most 255 fit"):
        generate(classifier, longer)


def test_requests_at_the_same_time_are_all_answered(classifier: Classifier) -> None:
    answers = generate(classifier, *(generate_request(prompt=f"valve {n}") for n in range(8)))
    assert {answer.text for answer in answers} <= set(LABELS)


def test_the_most_likely_tokens_come_with_their_probabilities(
    filler: MaskFiller, masked_folder: Path
) -> None:
    import torch
    from transformers import pipeline

    text = "The valve<mask> every week."
    expected = pipeline("fill-mask", str(masked_folder), dtype=torch.bfloat16)(text)
    (answer,) = generate(filler, generate_request(prompt=text))
    found = answer.class_scores
    assert sum(found.values()) == pytest.approx(sum(one["score"] for one in expected), abs=0.01)
    assert answer.text == max(found, key=found.__getitem__)
    assert answer.text.strip() in {one["token_str"].strip() for one in expected}


def test_a_text_without_a_mask_is_told_what_comes_after_it(filler: MaskFiller) -> None:
    assert filler.encode(generate_request(prompt="The")) == filler.encode(
        generate_request(prompt="The <mask>")
    )


def test_texts_with_two_masks_and_chats_are_refused(filler: MaskFiller) -> None:
    with pytest.raises(Refused, match="exactly one is expected"):
        filler.encode(generate_request(prompt="<mask> and <mask>"))
    with pytest.raises(Refused, match="fills in a mask token"):
        filler.encode(CHAT)
