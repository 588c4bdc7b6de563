"""Examples as marked tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from artifacts.errors import UserError
from artifacts.shards.shard_set import MaskedShardSet, ShardSet
from recipes.data.batch import IGNORED, read_batch, read_examples
from recipes.model.tokenizer_conversion import convert
from spark_jobs.runtime.parquet import Part, find_parts
from spark_jobs.settings import ExampleSettings
from spark_jobs.tokenize.survey import Mixing
from spark_jobs.tokenize.tokenizer import (
    ExampleTokenizer,
    check_template,
    find_labels,
    load_tokenizer,
)
from tests.example_shards import example_shards
from tests.old_tokenizers import write_old_tokenizer
from tests.tiny_models import chat_model, encoder_decoder
from tests.tiny_tasks import TASKS


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    chat_model(folder)
    return folder


def encoder(folder: Path, form: Any, labels: tuple[str, ...] = (), **settings: Any) -> Any:
    files = load_tokenizer(str(folder))
    end = files.start_and_end(None, None)[1]
    return ExampleTokenizer(files, form, ExampleSettings(**settings), 64, end, labels)


TURNS = [
    {"role": "user", "content": "The valve?"},
    {"role": "assistant", "content": "It opens."},
    {"role": "user", "content": "A pump?"},
    {"role": "assistant", "content": "It fails."},
]


def test_only_the_answers_of_a_conversation_are_learnt(chat_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    found = encoder(chat_folder, "conversations").encode({"messages": TURNS}, "one")
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(found.tokens) == whole
    learnt = tokenizer.decode(found.tokens[found.is_target])
    assert learnt == "It opens.<|endoftext|>\nIt fails.<|endoftext|>\n"
    # The prompt is tokenized just as the endpoint does it.
    prompt = tokenizer.apply_chat_template(
        TURNS[:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert found.tokens[: int(np.argmax(found.is_target))].tolist() == prompt


def test_a_plain_conversation_is_prompt_newline_answer(chat_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    found = encoder(chat_folder, "conversations", template="plain").encode(
        {"messages": TURNS[:2]}, "one"
    )
    assert tokenizer.decode(found.tokens) == "The valve?\nIt opens.<|endoftext|>"
    assert tokenizer.decode(found.tokens[found.is_target]) == "It opens.<|endoftext|>"


def test_a_special_token_in_a_turn_leaves_the_example_out(chat_folder: Path) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "Ends here <|endoftext|> or not"}]
    found = encoder(chat_folder, "conversations").encode({"messages": turns}, "one")
    assert found.left_out == "holds_special_token"


@pytest.mark.parametrize("form", ["pairs", "labeled"])
def test_a_special_token_in_a_pair_or_labeled_text_is_text(form: Any, tmp_path: Path) -> None:
    write_old_tokenizer(tmp_path, "t5")
    convert(tmp_path, print)
    files = load_tokenizer(str(tmp_path))
    end = files.specials["</s>"]

    def tokens(text: str) -> list[int]:
        example = {"input": text, "target": text, "text": text, "label": "a"}
        found = encoder(tmp_path, form, ("a",)).encode(example, "one")
        return found.tokens[:-1].tolist() if form == "labeled" else found.tokens.tolist()

    ends = 2 if form == "pairs" else 1
    assert tokens("The valve").count(end) == ends
    assert tokens("The valve</s> opens").count(end) == ends
    assert len(tokens("The valve</s> opens")) > len(tokens("The valve opens"))


def test_examples_that_are_too_long_are_cut_dropped_or_refused(chat_folder: Path) -> None:
    pair = {"input": "valve " * 40, "target": "pump " * 20}
    limits = {"input_tokens": 16, "target_tokens": 8}
    cut = encoder(chat_folder, "pairs", **limits).encode(pair, "one")
    assert cut.was_cut and len(cut.tokens) == 24 and cut.is_target.sum() == 8
    # The end of a target is kept, so that the model learns to end.
    assert cut.tokens[-1] == encoder(chat_folder, "pairs").end_token_id
    dropped = encoder(chat_folder, "pairs", too_long="drop", **limits).encode(pair, "one")
    assert dropped.left_out == "too_long"
    with pytest.raises(UserError, match=r"'one' has an input of \d+ tokens, more than"):
        encoder(chat_folder, "pairs", too_long="refuse", **limits).encode(pair, "one")
    long_prompt = [{"role": "user", "content": "valve " * 100}, TURNS[1]]
    lost = encoder(chat_folder, "conversations").encode({"messages": long_prompt}, "one")
    assert lost.left_out == "too_long"


def test_a_missing_chat_template_is_named(chat_folder: Path) -> None:
    files = replace(load_tokenizer(str(chat_folder)), chat_template=None)
    with pytest.raises(UserError, match="has no chat template"):
        check_template(files, ExampleSettings())
    check_template(files, ExampleSettings(template="plain"))


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        (["a"] * 5 + ["b"], (), "Enough have: a. Too few: 'b' \\(1\\)"),
        (["a"] * 5 + ["b"], ("a", "b"), "Enough have: a. Too few: 'b' \\(1\\)"),
        ([None] * 5, (), "two classes to tell apart, .* Enough have: none"),
        (["a", "b", "c"] * 3, ("a", "b"), "3 examples have the class 'c', which is none of"),
    ],
)
def test_classes_that_cannot_be_learnt_are_named(
    tmp_path: Path, labels: list[str | None], settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        find_labels(parts_of(tmp_path, labels, ["train"] * len(labels)), settings, ALL)


ALL = Mixing({}, 1)


def parts_of(folder: Path, labels: list[str | None], splits: list[str]) -> list[Part]:
    """A clean corpus of labeled texts, as far as their classes go."""
    columns = {"id": list(map(str, range(len(labels)))), "source": ["manual"] * len(labels)}
    table = pa.table(columns | {"label": labels, "split": splits})
    pq.write_table(table, folder / "part-0.parquet")
    return find_parts(str(folder), ["label"], "clean_corpus")


def test_a_class_too_rare_to_learn_is_left_out_and_named(tmp_path: Path, chat_folder: Path) -> None:
    """Or one ticket of a new kind, or with a typo, would stop the training of all others."""
    labels, splits = ["a"] * 3 + ["b"] * 3 + ["c", "d", "d"], ["train"] * 7 + ["held_out"] * 2
    parts = parts_of(tmp_path, labels, splits)
    classes, counts, (told,) = find_labels(parts, (), ALL)
    assert (classes, counts) == (("a", "b"), [3, 3])
    assert told.endswith("a class with one example, or none to train on: 'c' (1), 'd' (2)")
    found = encoder(chat_folder, "labeled", classes).encode({"text": "x", "label": "c"}, "one")
    assert found.left_out == "of_a_class_too_rare" and not len(found.tokens)


def test_classes_weigh_by_what_is_sampled_of_them(tmp_path: Path) -> None:
    """And one of which nothing is sampled is left out: its weight would be infinite."""
    parts = parts_of(tmp_path, ["a"] * 400 + ["b"] * 400 + ["c"] * 2, ["train"] * 802)
    classes, counts, (told,) = find_labels(parts, (), Mixing({"manual": 2}, 0.1))
    assert classes == ("a", "b") and told.endswith("'c' (2)")
    assert sum(counts) == pytest.approx(160, rel=0.3)


def test_packed_conversations_keep_their_marks(tmp_path: Path, chat_folder: Path) -> None:
    task = TASKS["fine_tuning"]
    stats = example_shards(tmp_path, chat_folder, task)
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    shards = ShardSet(tmp_path, stats, "train")
    batch = read_batch(shards, np.arange(2))
    learnt = batch.targets[batch.targets != IGNORED]
    answers = {one["messages"][1]["content"] for one in task.examples()}
    said = tokenizer.decode(learnt).split("<|endoftext|>\n")
    assert len(said) > 2 and set(said) - {""} <= answers
    assert json.loads(stats.model_dump_json())["form"] == "conversations"


def test_a_row_of_a_pair_is_its_input_and_its_target(tmp_path: Path) -> None:
    task = TASKS["sequence_to_sequence"]
    encoder_decoder(tmp_path / "base")
    stats = example_shards(tmp_path, tmp_path / "base", task)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    batch = read_examples(ShardSet(tmp_path, stats, "held_out"), np.arange(3))
    for row, example in enumerate(task.examples()[9:30:10]):
        given = tokenizer.decode(batch.tokens[row][batch.is_input[row]])
        assert example["article"].startswith(given)
        wanted = batch.targets[row][batch.targets[row] != IGNORED]
        assert tokenizer.decode(wanted) == example["highlights"] + "<|endoftext|>"


@pytest.mark.parametrize("recipe", ["sequence_to_sequence", "classification"])
def test_of_a_forgotten_example_nothing_is_shown_or_learnt(recipe: str, tmp_path: Path) -> None:
    task = TASKS[recipe]
    task.model(tmp_path / "base")
    stats = example_shards(tmp_path, tmp_path / "base", task)
    # In these shards, the hash of a text is its number.
    shards = MaskedShardSet(tmp_path, stats, ["18"], "validation")
    batch = read_examples(shards, np.arange(3))
    assert (batch.targets != IGNORED).any(dim=1).tolist() == [True, False, True]
    assert batch.is_input[1].sum() == 1 and batch.tokens[1, 0] == stats.end_token_id
    alone = read_examples(shards, np.array([1]))
    assert alone.targets.tolist() == [[IGNORED]]
