"""An endpoint that serves an encoder-decoder model."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving import endpoint as process
from serving.engine.protocol import Chunk
from serving.engine.transformers_model import TransformersModel
from tests.serving.conftest import SETTINGS, Client, generate_request, start
from tests.tiny import tiny_sequence_to_sequence_model

PROMPTS = ["The valve", "A pump turns slowly every week.", "No motor fails", "Each gauge " * 6]


@pytest.fixture(scope="module")
def summarizer(
    tmp_path_factory: pytest.TempPathFactory, sequence_to_sequence_folder: Path
) -> Iterator[Client]:
    state = tmp_path_factory.mktemp("summarizer")
    yield start(state, sequence_to_sequence_folder)
    process.stop(state)


def by_transformers(folder: Path, prompt: str, tokens: int) -> str:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    written = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    # The endpoint holds back bytes that are no whole character yet.
    return tokenizer.decode(written[0], skip_special_tokens=True).rstrip("\ufffd")


def test_answers_of_one_batch_are_the_models_own(
    summarizer: Client, sequence_to_sequence_folder: Path
) -> None:
    def ask(number: int) -> str:
        answer = summarizer.complete(PROMPTS[number], max_tokens=6 + number, temperature=0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 6 + number
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, range(len(PROMPTS))))
    expected = [
        by_transformers(sequence_to_sequence_folder, text, 6 + n) for n, text in enumerate(PROMPTS)
    ]
    assert answers == expected
    assert len(set(answers)) > 1


def test_answer_is_streamed_and_sampled_as_asked(summarizer: Client) -> None:
    fields = {"prompt": "The valve", "max_tokens": 12, "stream": True, "temperature": 1.0}
    with summarizer.http.stream("POST", "/v1/completions", json=fields) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 4


def test_vertex_route_and_too_long_prompts(summarizer: Client) -> None:
    instances = [{"prompt": text, "max_tokens": 4} for text in PROMPTS[:2]]
    answer = summarizer.http.post("/predict", json={"instances": instances})
    assert answer.status_code == 200 and len(answer.json()["predictions"]) == 2
    refused = summarizer.complete("valve " * 400, max_tokens=4)
    assert refused.status_code == 400 and "prompt" in refused.text


@pytest.fixture(scope="module")
def beams_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """One whose generation config asks for a search, as a training with beams exports it."""
    folder = tmp_path_factory.mktemp("beams") / "model"
    tiny_sequence_to_sequence_model(folder, tiny_model_folder)
    path = folder / "generation_config.json"
    wanted = {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 2, "min_length": 5}
    path.write_text(json.dumps(json.loads(path.read_text()) | wanted))
    return folder


def test_beams_are_searched_as_the_model_was_judged(beams_folder: Path) -> None:
    model = TransformersModel(beams_folder, SETTINGS)
    expected = [by_transformers(beams_folder, text, 9) for text in PROMPTS]

    async def ask(text: str, **fields: object) -> list[Chunk]:
        request = generate_request(prompt=text, max_tokens=9, **fields)
        return [chunk async for chunk in model.generate(request, model.encode(request))]

    async def ask_together() -> list[list[Chunk]]:
        return await asyncio.gather(*map(ask, PROMPTS))

    # Pieces would be of one beam, and the best is known at the end.
    answers = [answer for (answer,) in asyncio.run(ask_together())]
    assert [answer.text.rstrip("\ufffd") for answer in answers] == expected
    (scored,) = asyncio.run(ask(PROMPTS[1], logprobs=True, top=2))
    assert scored.text == answers[1].text
    assert len(scored.scores) == scored.completion_tokens
    assert all(one.logprob is not None and one.logprob < 0 for one in scored.scores)
    # What is drawn is drawn, piece by piece.
    assert len(asyncio.run(ask(PROMPTS[1], temperature=1.0, ignore_eos=True))) > 1
