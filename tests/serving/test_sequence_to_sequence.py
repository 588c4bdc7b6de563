"""An endpoint that serves an encoder-decoder model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving import endpoint as process
from tests.serving.conftest import Client, start

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
