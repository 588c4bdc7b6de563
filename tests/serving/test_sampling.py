"""What transformers draws for requests at the same time that are sampled differently."""

from pathlib import Path
from typing import Any

import pytest

from serving.engine.program import Choice, load_model
from serving.engine.served_model import ServedModel
from tests.serving.conftest import SETTINGS, generate, generate_request

HOT = {"temperature": 1.5, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> ServedModel:
    loaded = load_model(tiny_model_folder, SETTINGS, Choice("transformers"))
    assert isinstance(loaded, ServedModel)
    return loaded


def ask(model: ServedModel, *requests: dict[str, Any]) -> list[str]:
    """The answers to requests that wait together."""

    common = {"prompt": "The valve", "ignore_eos": True}
    answers = generate(model, *(generate_request(**common | fields) for fields in requests))
    counts = [answer.completion_tokens for answer in answers]
    assert counts == [fields["max_tokens"] for fields in requests]
    return [answer.text for answer in answers]


def test_the_likeliest_token_is_taken_beside_requests_with_a_temperature(
    model: ServedModel,
) -> None:
    cold = {"temperature": 0.0, "max_tokens": 12}
    (alone,) = ask(model, cold)
    beside = ask(model, HOT, cold, HOT, cold | {"max_tokens": 3}, HOT)
    assert beside[1] == alone and alone.startswith(beside[3])
    assert len(set(beside[::2])) == 3


def test_of_the_likely_tokens_alone_is_drawn(model: ServedModel) -> None:
    narrow, cold = HOT | {"top_p": 1e-6}, {"temperature": 0.0, "max_tokens": 12}
    assert len(set(ask(model, narrow, cold))) == 1


def test_what_is_drawn_without_a_seed_follows_from_no_other_requests_seed(
    model: ServedModel,
) -> None:
    drawn = set()
    for _ in range(3):
        ask(model, HOT | {"seed": 5})
        drawn |= {*ask(model, HOT)}
    assert len(drawn) > 1


def test_a_seed_draws_the_same_whatever_stands_beside_it(model: ServedModel) -> None:
    seeded, other = HOT | {"seed": 5}, HOT | {"seed": 6}
    (alone,) = ask(model, seeded)
    assert ask(model, HOT, seeded, other)[1] == alone
    assert ask(model, other)[0] != alone
