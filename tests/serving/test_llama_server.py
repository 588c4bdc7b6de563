"""llama.cpp's own server as the engine, which gives no log-probabilities of a prompt."""

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from serving import endpoint as process
from serving.engine.protocol import Refused
from serving.rollout import RolloutFailed
from serving.settings import OpenAIEngine
from tests.serving.conftest import Client, asking, chunks_of, generate_request, served
from tests.serving.test_comparison import desired, judge, version_that_serves
from tests.stand_ins import openai_without_echo
from tests.stand_ins.http_server import start_http_server
from tests.tiny import train_tiny_model


def serving(model: str) -> OpenAIEngine:
    program = (sys.executable, "-m", "tests.stand_ins.llama_server")
    return OpenAIEngine(command=(*program, model, "{port}"))


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("through")
    with served(folder, tiny_model_folder, engine=serving("{model}")) as client:
        yield client


@pytest.mark.parametrize("prompt", ["The valve", "The “é” of 漢字 🙂 opens", "V"])
def test_it_is_led_through_a_prompt_and_tells_what_an_engine_of_ones_own_tells(
    through: Client, client: Client, prompt: str
) -> None:
    asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    answers = [one.http.post("/v1/completions", json=asked) for one in (through, client)]
    led, own = (answer.json()["choices"][0]["logprobs"] for answer in answers)
    assert led["tokens"] == own["tokens"] and led["text_offset"] == own["text_offset"]
    assert led["token_logprobs"][0] is own["token_logprobs"][0] is None
    # It keeps keys and values in 16 bits.
    assert led["token_logprobs"][1:] == pytest.approx(own["token_logprobs"][1:], abs=2e-3)


def test_it_answers_as_the_model_does(through: Client, client: Client) -> None:
    asked = {"prompt": "The valve", "max_tokens": 12}
    texts = [
        one.http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        for one in (through, client)
    ]
    assert texts[0] == texts[1]


def test_it_gets_traffic_where_it_serves_what_was_judged(
    tmp_path: Path, tiny_model_folder: Path, conversions: Path
) -> None:
    trained = tmp_path / "trained"
    train_tiny_model(trained, tiny_model_folder, 60)
    judged = judge(trained)
    with served(tmp_path, tiny_model_folder, "1"):
        wrong = serving(str(tiny_model_folder))
        with pytest.raises(RolloutFailed, match=r"(?s)bits per byte served.*Version 1 still"):
            process.start(tmp_path, desired(trained, judged, conversions, engine=wrong))
        right = serving("{model}")
        endpoint = process.start(tmp_path, desired(trained, judged, conversions, engine=right))
        assert version_that_serves(endpoint) == "2"
        found = endpoint.route.comparison
        assert found is not None and found.fits and found.documents == len(judged)


@pytest.mark.parametrize("what", ["ignored", "counted"])
def test_a_bias_that_is_ignored_or_counted_proves_nothing(
    tiny_model_folder: Path, conversions: Path, what: str
) -> None:
    server = start_http_server(partial(openai_without_echo.answer, what))
    engine = OpenAIEngine(address=f"{server.url}/v1", model="default")
    model = asking(tiny_model_folder, engine, conversions)
    scored = generate_request(prompt="The valve", max_tokens=0, echo=True, logprobs=True)
    with pytest.raises(Refused, match="Only no echo is supported"):
        asyncio.run(chunks_of(model, scored))
