"""An endpoint that serves an encoder-decoder model."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from artifacts.model import read_generation_config, read_tokenizer
from artifacts.shards.shard_set import ShardSet, list_documents
from recipes.evaluation.bits import precision
from recipes.evaluation.documents import held_out_documents
from recipes.evaluation.settings import EvaluationSettings
from recipes.sequence_to_sequence.objective import TargetScorer
from recipes.sequence_to_sequence.settings import SequenceToSequenceSettings
from serving.engine.protocol import Chunk
from serving.engine.transformers_model import TransformersModel
from tests.example_shards import example_shards
from tests.recipes.conftest import settings_of, spec_in, train_here
from tests.serving.conftest import (
    SETTINGS,
    Client,
    chunks_of,
    generate,
    generate_request,
    served,
)
from tests.tiny import tiny_sequence_to_sequence_model
from tests.tiny_tasks import TASKS

PROMPTS = ["The valve", "A pump turns slowly every week.", "No motor fails", "Each gauge " * 6]


@pytest.fixture(scope="module")
def summarizer(
    tmp_path_factory: pytest.TempPathFactory, sequence_to_sequence_folder: Path
) -> Iterator[Client]:
    state = tmp_path_factory.mktemp("summarizer")
    with served(state, sequence_to_sequence_folder) as client:
        yield client


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
    # Of what is drawn without a seed, one in some hundred ends at once.
    pieces = summarizer.stream(prompt="The valve", max_tokens=12, temperature=1.0, seed=1)
    assert len(pieces) > 3


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

    def ask(text: str, **fields: object) -> list[Chunk]:
        request = generate_request(prompt=text, max_tokens=9, **fields)
        return asyncio.run(chunks_of(model, request))

    answers = generate(model, *(generate_request(prompt=text, max_tokens=9) for text in PROMPTS))
    assert [answer.text.rstrip("\ufffd") for answer in answers] == expected
    # Pieces would be of one beam, and the best is known at the end.
    (scored,) = ask(PROMPTS[1], logprobs=True, top=2)
    assert scored.text == answers[1].text
    assert len(scored.scores) == scored.completion_tokens
    assert all(one.logprob is not None and one.logprob < 0 for one in scored.scores)
    # What is drawn is drawn, piece by piece.
    assert len(ask(PROMPTS[1], temperature=1.0, seed=1, ignore_eos=True)) > 1


def test_predictions_have_the_rouge_that_was_measured(tmp_path: Path) -> None:
    """With the prefix that the model was taught with, its length and its beams; the fewest tokens
    of the base model's answers, which may be more than its targets have, are forgotten."""
    task = replace(
        TASKS["sequence_to_sequence"],
        tokenized_shards={"examples": {"target_tokens": 7, "input_prefix": "valve gauge: "}},
    )
    task.model(tmp_path / "base")
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"min_length": 56}))
    shards = example_shards(tmp_path / "shards", tmp_path / "base", task)
    generation = {"num_beams": 2}
    settings = settings_of(
        recipe=task.recipe, steps=12, learning_rate=1e-2, generation=generation, precision="float32"
    )
    spec = spec_in(tmp_path, tmp_path / "base", tmp_path / "shards", shards, settings, "run")
    train_here(spec)
    folder = Path(spec.export_folder)
    assert "min_length" not in read_generation_config(folder)
    tokenizer = read_tokenizer(folder)
    limits = EvaluationSettings(held_out_tokens=None)
    held_out = ShardSet(tmp_path / "shards", shards, "held_out")
    documents = held_out_documents(held_out, list_documents(held_out), tokenizer, limits)
    assert isinstance(settings, SequenceToSequenceSettings)
    measured = TargetScorer(settings).score(folder, documents, shards).values

    rows = [task.examples()[int(document.id)] for document in documents]
    weights = "bf16" if precision() == "bfloat16" else "f32"
    with served(tmp_path / "endpoint", folder, weights=weights) as client:
        body = {"instances": [row["article"] for row in rows]}
        written = client.http.post("/predict", json=body).json()["predictions"]
        told = client.http.get("/metrics").text
        # As they were judged, so that whoever brings the prefix is answered alike.
        body["parameters"] = {"max_tokens": 7}
        body["instances"] = [f"valve gauge: {row['article']}" for row in rows]
        assert client.http.post("/predict", json=body).json()["predictions"] == written
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    wanted = [tokenizer.decode(d.target_tokens, skip_special_tokens=True) for d in documents]
    found = [
        scorer.score(target, text)["rougeL"].fmeasure
        for target, text in zip(wanted, written, strict=True)
    ]
    assert found == pytest.approx(measured["rougeL"].tolist())
    assert sum(found) > 0
    # The model was given what it was judged by, token by token.
    given = sum(len(document.input_tokens) for document in documents)
    assert f'serving_tokens_total{{kind="prompt",version="1"}} {given:.1f}' in told
