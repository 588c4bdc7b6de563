"""Answers that a model writes: what it is given, and what of them is compared."""

from pathlib import Path

import pytest
import torch

from artifacts.model import read_tokenizer
from recipes.causal.objective import AnswerScorer, answer_start, final_answer
from recipes.causal.settings import ExactMatchSettings
from recipes.evaluation.bits import as_served, complete, load_causal
from recipes.evaluation.documents import held_out_documents
from recipes.evaluation.settings import EvaluationSettings, GenerationSettings
from recipes.settings import training_settings
from tests.example_shards import example_shards
from tests.tiny_models import gpt2
from tests.tiny_tasks import TASKS

TASK = TASKS["exact_match"]


@pytest.mark.parametrize(
    ("text", "after", "found"),
    [
        ("2 and 2 are 4. #### 4", "####", "4"),
        ("#### 3, no: #### 1,024\n", "####", "1024"),
        ("no mark, 12", "####", "no mark, 12"),
        (" It fails. ", None, "It fails."),
    ],
)
def test_what_is_compared_is_what_comes_after_the_last_mark(
    text: str, after: str | None, found: str
) -> None:
    assert final_answer(text, after) == found


def test_an_answer_is_written_from_all_that_was_said_before(tmp_path: Path) -> None:
    """As one conversation alone, without padding, would be answered."""
    TASK.model(tmp_path / "base")
    stats = example_shards(tmp_path / "shards", tmp_path / "base", TASK)
    model = as_served(load_causal(tmp_path / "base"))
    tokenizer = read_tokenizer(tmp_path / "base")
    documents = held_out_documents(
        tmp_path / "shards", stats, tokenizer, EvaluationSettings(held_out_tokens=None)
    )
    first = documents[0]
    prompt = tokenizer.decode(first.tokens[: answer_start(first)])
    assert prompt.startswith("user:\n") and prompt.endswith(
        "How many valves?<|endoftext|>\nassistant:\n"
    )
    assert tokenizer.decode(first.tokens[answer_start(first) :]).endswith(
        "#### 1,024<|endoftext|>\n"
    )

    scorer = AnswerScorer(ExactMatchSettings(after="####", new_tokens=6))
    scores = scorer.score(tmp_path / "base", documents, stats)
    assert scores.values["exact_match"].tolist() == [0.0] * len(documents)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    alone = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    told = tokenizer.decode(alone[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert scores.samples[0]["completion"] == told


def test_an_answer_ends_where_the_models_positions_do(tmp_path: Path) -> None:
    gpt2(tmp_path / "base")
    TASK.model(tmp_path / "chat")
    stats = example_shards(tmp_path / "shards", tmp_path / "chat", TASK)
    model = as_served(load_causal(tmp_path / "base"))
    tokenizer = read_tokenizer(tmp_path / "base")
    settings = EvaluationSettings(held_out_tokens=None)
    documents = held_out_documents(tmp_path / "shards", stats, tokenizer, settings)
    positions = model.config.n_positions
    scorer = AnswerScorer(ExactMatchSettings(new_tokens=positions))
    told = scorer.score(tmp_path / "base", documents, stats).samples[0]["completion"]
    prompt = torch.from_numpy(documents[0].tokens[: answer_start(documents[0])])[None]
    alone = model.generate(prompt, max_length=positions, do_sample=False)
    assert told == tokenizer.decode(alone[0, prompt.shape[1] :], skip_special_tokens=True)
    shown = GenerationSettings(new_tokens=positions)
    assert complete(model, tokenizer, documents[:1], shown)[0]["completion"]


def test_how_answers_are_compared_decides_no_weight() -> None:
    plain, compared = (
        training_settings({"recipe": "fine_tuning"} | more)
        for more in ({}, {"exact_match": {"after": "####"}})
    )
    assert plain.content() == compared.content()
    assert plain.scoring() == {}
    assert compared.scoring() == {"exact_match": {"after": "####", "new_tokens": 256}}


@pytest.mark.parametrize("exact_match", [None, {}])
def test_the_settings_say_whether_answers_are_judged_in_bits(exact_match: dict | None) -> None:
    settings = training_settings({"recipe": "fine_tuning", "exact_match": exact_match})
    scorer = settings.objective().scorer
    assert settings.is_judged_in_bits == (scorer is None or scorer.metric.is_bits)
