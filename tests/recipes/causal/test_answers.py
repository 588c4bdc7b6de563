"""Answers that a model writes: what it is given, and what of them is compared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from artifacts.model import GENERATION_NAME, read_tokenizer
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet, list_documents
from recipes.causal.objective import AnswerScorer, final_answer, last_answer
from recipes.causal.settings import ExactMatchSettings
from recipes.evaluation.bits import as_served, complete, load_causal
from recipes.evaluation.documents import TokenizedDocument, held_out_documents
from recipes.evaluation.settings import EvaluationSettings, GenerationSettings
from recipes.model.causal_model import load_model
from recipes.settings import training_settings
from tests.example_shards import example_shards
from tests.tiny import save_random_model, tiny_base_model
from tests.tiny_models import gpt2
from tests.tiny_tasks import TASKS

TASK = TASKS["exact_match"]


def held_out(folder: Path, stats: ShardStats, tokenizer: Any) -> list[TokenizedDocument]:
    """All held-out conversations of some shards."""
    shards, everything = (
        ShardSet(folder, stats, "held_out"),
        EvaluationSettings(held_out_tokens=None),
    )
    return held_out_documents(shards, list_documents(shards), tokenizer, everything)


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


@pytest.mark.parametrize(
    ("targets", "last", "expected"),
    [
        ("001100110", 9, slice(6, 8)),
        ("001100011", 9, slice(7, 9)),
        # Cut off in the question after an answer, and in the second answer.
        ("001100000", 5, slice(2, 4)),
        ("001100011", 5, slice(2, 4)),
        # Of one answer there is no other.
        ("000000011", 5, slice(7, 9)),
    ],
)
def test_the_last_whole_answer_of_a_conversation_that_was_cut_off_counts(
    targets: str, last: int, expected: slice
) -> None:
    tokens = np.array([*range(10, 18), last], np.uint32)
    is_target = np.array([one == "1" for one in targets])
    document = TokenizedDocument("a", "a", 9, tokens, is_target=is_target)

    assert last_answer(document, 9, {9}) == expected


def test_an_answer_is_written_from_all_that_was_said_before(tmp_path: Path) -> None:
    """As one conversation alone, without padding, would be answered."""
    TASK.model(tmp_path / "base")
    stats = example_shards(tmp_path / "shards", tmp_path / "base", TASK)
    model = as_served(load_causal(tmp_path / "base"))
    tokenizer = read_tokenizer(tmp_path / "base")
    documents = held_out(tmp_path / "shards", stats, tokenizer)
    first = documents[0]
    answer = last_answer(first, stats.sequence_length, {stats.end_token_id})
    prompt = tokenizer.decode(first.tokens[: answer.start])
    assert prompt.startswith("user:\n") and prompt.endswith(
        "How many valves?<|endoftext|>\nassistant:\n"
    )
    assert tokenizer.decode(first.tokens[answer]).endswith("#### 1,024<|endoftext|>\n")

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
    documents = held_out(tmp_path / "shards", stats, tokenizer)
    positions = model.config.n_positions
    scorer = AnswerScorer(ExactMatchSettings(new_tokens=positions))
    told = scorer.score(tmp_path / "base", documents, stats).samples[0]["completion"]
    answer = last_answer(documents[0], stats.sequence_length, {stats.end_token_id})
    prompt = torch.from_numpy(documents[0].tokens[: answer.start])[None]
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


@pytest.mark.parametrize(
    "chosen",
    [
        {"recipe": "continued_pretraining"},
        {"recipe": "pretraining"},
        {"recipe": "fine_tuning"},
        {"recipe": "fine_tuning", "exact_match": {}},
        {"recipe": "classification"},
        {"recipe": "masked_language_modeling"},
        {"recipe": "sequence_to_sequence"},
    ],
)
def test_what_settings_say_of_a_recipes_scorer_is_so(chosen: dict[str, Any]) -> None:
    """Models answer questions where none measures them."""
    settings = training_settings(chosen)
    scorer = settings.objective().scorer
    assert settings.answers_questions == (scorer is None)
    if settings.family == "causal":
        assert settings.is_judged_in_bits == (scorer is None or scorer.metric.is_bits)


def test_an_answer_ends_with_its_turn(tmp_path: Path) -> None:
    """Of a base model, whose own end is that of a document, with a template that has another."""
    turn_end = "<|im_end|>"
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:\n{% endif %}"

    def base(folder: Path) -> None:
        tiny_base_model(folder)
        tokenizer = read_tokenizer(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": [turn_end]})
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template)
        ends = dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id
        )
        config = AutoConfig.from_pretrained(folder, vocab_size=len(tokenizer))
        config.tie_word_embeddings = False
        save_random_model(folder, LlamaForCausalLM, config, ends)

    folder = tmp_path / "base"
    base(folder)
    tokenizer = read_tokenizer(folder)
    stats = example_shards(tmp_path / "shards", folder, replace(TASK, model=base))
    documents = held_out(tmp_path / "shards", stats, tokenizer)[:1]
    end, word = tokenizer.convert_tokens_to_ids(turn_end), tokenizer("pump")["input_ids"][0]
    writes_on = load_causal(folder)
    with torch.no_grad():
        for name, weight in writes_on.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                weight.zero_()
        # It ends the turn after any token, and after its end it writes a word.
        given, written = writes_on.model.embed_tokens.weight, writes_on.lm_head.weight.zero_()
        given[:, 0] = written[end, 0] = 1
        given[end, 0], given[end, 1], written[word, 1] = 0, 1, 1
    writes_on.save_pretrained(folder)

    scorer = AnswerScorer(ExactMatchSettings(new_tokens=6))

    assert scorer.score(folder, documents, stats).samples[0]["completion"] == ""
    exported = load_model(folder)
    exported.export_form_of(stats, folder)
    generation = json.loads(exported.exported_files[GENERATION_NAME])
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, end]
