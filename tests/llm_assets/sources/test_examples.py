"""Examples to learn a task from, out of files and data sets; bad ones are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from artifacts.errors import UserError
from artifacts.examples import read_example
from llm_assets.sources.document import Document
from llm_assets.sources.faults import Fault
from llm_assets.sources.settings import RawCorpusSettings
from llm_assets.sources.snapshot.snapshot import open_sources


def read(source: dict[str, Any]) -> list[Document | Fault]:
    settings = RawCorpusSettings.model_validate({"sources": [source]})
    chunks = open_sources(settings)[settings.sources[0].name].chunks
    numbers = list(range(len(chunks.keys)))
    return [one for _, batch in chunks.read(numbers) for one in batch]


def only(source: dict[str, Any]) -> dict[str, Any]:
    (document,) = read(source)
    assert isinstance(document, Document), document
    assert document.example is not None
    return read_example(document.example)


def file_source(path: Path, content: str, **examples: Any) -> dict[str, Any]:
    path.write_text(content)
    return {"type": "files", "path": str(path), "examples": examples}


def fault_of(path: Path, record: dict[str, Any], **examples: Any) -> Fault:
    (found,) = read(file_source(path, json.dumps(record) + "\n", **examples))
    assert isinstance(found, Fault), found
    return found


TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def test_messages_pairs_and_labels_are_taken_from_rows(tmp_path: Path) -> None:
    chat = file_source(
        tmp_path / "chat.jsonl", json.dumps({"messages": TURNS}) + "\n", form="conversations"
    )
    assert only(chat) == {"messages": TURNS}
    table = file_source(
        tmp_path / "pairs.tsv",
        "article\thighlights\nA long text.\tShort.\n",
        form="pairs",
        document_column="article",
        summary_column="highlights",
    )
    assert only(table) == {"input": "A long text.", "target": "Short."}
    labels = file_source(tmp_path / "labels.csv", "text,label\nGood.,1\n", form="labeled")
    assert only(labels) == {"text": "Good.", "label": "1"}


def test_one_array_of_alpaca_has_alpacas_prompt(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hello"},
    ]
    source = file_source(
        tmp_path / "alpaca.json", json.dumps(rows), form="conversations", layout="alpaca"
    )
    with_input, without = (
        read_example(str(document.example))["messages"]
        for document in read(source)
        if isinstance(document, Document)
    )
    assert (
        "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:" in with_input[0]["content"]
    )
    assert "### Input" not in without[0]["content"]
    assert without[1] == {"role": "assistant", "content": "Hello"}


def test_columns_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2?", "answer": "4", "unused": 1}]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "gsm"))
    columns = {"layout": "prompt_answer", "prompt_column": "question"}
    examples = {"form": "conversations", **columns}
    source = {"type": "hugging_face", "dataset": str(tmp_path / "gsm"), "examples": examples}
    assert [m["content"] for m in only(source)["messages"]] == ["2 + 2?", "4"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (TURNS[:1], "ends_with_user"),
        ([TURNS[1], TURNS[0]], "wrong_roles"),
        ([{"role": "tool", "content": "x"}, TURNS[1]], "wrong_roles"),
        ([TURNS[0], {"role": "assistant", "content": " "}], "empty_target"),
        ([], "no_example"),
        (["text"], "no_example"),
    ],
)
def test_conversations_that_teach_nothing_are_named(
    tmp_path: Path, messages: list[Any], reason: str
) -> None:
    fault = fault_of(tmp_path / "chat.jsonl", {"messages": messages}, form="conversations")
    assert fault.reason == reason
    assert "chat.jsonl, line 1" in fault.message


def test_missing_columns_and_targets_are_named(tmp_path: Path) -> None:
    pair = fault_of(tmp_path / "a.jsonl", {"document": "text"}, form="pairs")
    assert "no text under the key 'summary'" in pair.message
    empty = fault_of(tmp_path / "b.jsonl", {"document": "text", "summary": ""}, form="pairs")
    assert empty.reason == "empty_target"
    label = fault_of(tmp_path / "c.jsonl", {"text": "x", "label": 0.5}, form="labeled")
    assert "no class" in label.message
    table = file_source(tmp_path / "d.csv", "document,abstract\na,b\n", form="pairs")
    with pytest.raises(UserError, match="has no column 'summary'; its columns are document, abst"):
        read(table)


def test_a_pickle_is_refused_with_the_way_to_convert_it() -> None:
    with pytest.raises(ValueError, match="convert it: python -c"):
        RawCorpusSettings.model_validate({"sources": [{"type": "files", "path": "data.pkl"}]})
