"""Examples to learn a task from, out of files and data sets; bad ones are named."""

import gzip
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from artifacts.examples import read_example
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.snapshot import fingerprints_of, open_sources
from tests.spark_jobs.read.test_snapshot import settings_of


def read(source: dict[str, Any]) -> list[Document | Fault]:
    settings = settings_of(**source)
    chunks = open_sources(settings)[settings.sources[0].name].chunks
    numbers = list(range(len(chunks.keys)))
    return [one for _, one in chunks.read(numbers)]


def only(source: dict[str, Any]) -> dict[str, Any]:
    (document,) = read(source)
    assert isinstance(document, Document), document
    assert document.example is not None
    return read_example(document.example)


def file_source(path: Path, content: str, **examples: Any) -> dict[str, Any]:
    path.write_text(content)
    return {"type": "files", "path": str(path), "examples": examples}


REVISION = "0123456789abcdef0123456789abcdef01234567"
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


ROWS: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "pairs": (
        {"article": "A long text.", "highlights": "Short."},
        {"document_column": "article", "summary_column": "highlights"},
        {"input": "A long text.", "target": "Short."},
    ),
    "conversations": (
        {"question": "Why?", "answer": "So."},
        {"layout": "prompt_answer", "prompt_column": "question"},
        {"messages": TURNS},
    ),
    "labeled": ({"text": "Good.", "label": "1 "}, {}, {"text": "Good.", "label": "1"}),
    "preferences": (
        {"question": "Why?", "better": "So.", "worse": "No."},
        {"prompt_column": "question", "chosen_column": "better", "rejected_column": "worse"},
        {"prompt": TURNS[:1], "chosen": "So.", "rejected": "No."},
    ),
}
"""A row of each form, its columns, and the example that it is."""


def _table(row: dict[str, str], delimiter: str) -> bytes:
    return f"{delimiter.join(row)}\n{delimiter.join(row.values())}\n".encode()


def _parquet(row: dict[str, str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({key: [value] for key, value in row.items()}), sink)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[dict[str, str]], bytes]] = {
    "one.json": lambda row: json.dumps([row], indent=1).encode(),
    "one.jsonl": lambda row: json.dumps(row).encode(),
    "one.csv": lambda row: _table(row, ","),
    "one.tsv": lambda row: _table(row, "\t"),
    "one.parquet": _parquet,
    "one.jsonl.gz": lambda row: gzip.compress(json.dumps(row).encode()),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", ROWS)
def test_every_format_gives_every_form(form: str, name: str, tmp_path: Path) -> None:
    row, columns, expected = ROWS[form]
    path = tmp_path / name
    path.write_bytes(FORMATS[name](row))
    source = {"type": "files", "path": str(path), "examples": {"form": form} | columns}
    assert only(source) == expected


def test_messages_may_stand_in_another_column(tmp_path: Path) -> None:
    columns = {"form": "conversations", "messages_column": "dialog"}
    assert only(file_source(tmp_path / "a.jsonl", json.dumps({"dialog": TURNS}), **columns)) == {
        "messages": TURNS
    }


def test_of_html_in_columns_only_the_text_is_learned(tmp_path: Path) -> None:
    """An answer that a ticket system exports with its tags must not be given with them."""
    row = {"prompt": "Is 2 < 3?", "answer": "<p>Yes &amp; no.</p><p>Regards<br>Ada&nbsp;B.</p>"}
    columns = {"form": "conversations", "layout": "prompt_answer"}
    source = file_source(tmp_path / "a.jsonl", json.dumps(row), **columns) | {"strip_html": True}
    prompt, answer = only(source)["messages"]
    assert (prompt["content"], answer["content"]) == ("Is 2 < 3?", "Yes & no.\nRegards\nAda B.")


@pytest.mark.parametrize(
    ("text", "learned"),
    [
        ("It&#x27;s &frac12;&nbsp;&amp; more", "It's ½ & more"),
        *((code, code) for code in ("if (a<b) {\n    p = &x;\n}", "?a=1&copy=2", "&amplitude;")),
        ("\ud800<br>b", "\ufffd\nb"),
    ],
)
def test_code_keeps_its_shape_where_html_is_left_out(
    text: str, learned: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    (document,) = read({"type": "files", "path": str(tmp_path), "strip_html": True})
    assert isinstance(document, Document) and document.text == learned


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as the Hub's client lays it out, of one data set with two subsets."""
    repository = tmp_path / "hub" / "datasets--team--news"
    snapshot = repository / "snapshots" / REVISION
    blobs, reference = repository / "blobs", repository / "refs" / "main"
    for folder in (blobs, reference.parent):
        folder.mkdir(parents=True)
    reference.write_text(REVISION)
    card = ["---", "configs:"]
    for subset in ("short", "long"):
        (snapshot / subset).mkdir(parents=True)
        card += [f"- config_name: {subset}", "  data_files:"]
        for split in ("train", "validation"):
            columns = ROWS["pairs"][0] | {"unused": "text"}
            row = {key: f"{subset} {split} {value}" for key, value in columns.items()}
            blob = blobs / f"{subset}-{split}"
            blob.write_text(json.dumps(row))
            (snapshot / subset / f"{split}.jsonl").symlink_to(blob)
            card += [f"  - split: {split}", f"    path: {subset}/{split}.jsonl"]
    (snapshot / "README.md").write_text("\n".join([*card, "---", ""]))
    # Read before: the library keeps what holds when it is read, for every test after this one.
    importlib.import_module("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_offline_a_data_set_is_read_from_the_hubs_cache(hub_cache: Path) -> None:
    """Its subset, its split, and several of its columns."""
    columns = {"form": "pairs"} | ROWS["pairs"][1]
    source = {"type": "hugging_face", "dataset": "team/news", "examples": columns}
    found = only(source | {"subset": "long", "split": "validation"})
    assert found["input"] == "long validation A long text."
    assert found["target"] == "long validation Short."
    named = source | {"subset": "short", "revision": REVISION, "name": "news"}
    assert only(named)["input"] == "short train A long text."
    assert fingerprints_of(open_sources(settings_of(**named))) == {"news": REVISION}


def test_offline_a_data_set_that_the_cache_lacks_is_named(hub_cache: Path) -> None:
    source = {"type": "hugging_face", "dataset": "team/other", "subset": "long"}
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set, .* no copy of team/other"):
        read(source)


WORSE = {"role": "assistant", "content": "No."}
OTHER = {"role": "user", "content": "When?"}
TWO = {"form": "preferences", "layout": "conversations"}


def test_of_two_conversations_the_last_answers_differ(tmp_path: Path) -> None:
    row = {"chosen": TURNS, "rejected": [TURNS[0], WORSE]}
    source = file_source(tmp_path / "a.jsonl", json.dumps(row) + "\n", **TWO)
    assert only(source) == {"prompt": TURNS[:1], "chosen": "So.", "rejected": "No."}


def test_one_array_of_alpaca_has_alpacas_prompt(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hello"},
    ]
    source = file_source(
        tmp_path / "alpaca.json", json.dumps(rows), form="conversations", layout="alpaca"
    )
    # An object of its own is one conversation, and not a list of rows.
    turns = file_source(tmp_path / "a.json", json.dumps({"messages": TURNS}), form="conversations")
    assert only(turns) == {"messages": TURNS}
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


def talk(*messages: object) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([*TURNS, OTHER], TURNS),
        ([*TURNS, OTHER, OTHER], TURNS),
        ([TURNS[0], OTHER | {"content": " "}, TURNS[1]], TURNS),
        (
            [TURNS[0], OTHER, WORSE, TURNS[1]],
            [OTHER | {"content": "Why?\n\nWhen?"}, WORSE | {"content": "No.\n\nSo."}],
        ),
    ],
)
def test_a_transcript_is_turns_up_to_its_last_answer(
    messages: list[dict[str, str]], turns: list[dict[str, str]], tmp_path: Path
) -> None:
    """Chats of a support desk end with thanks, and one person writes several messages in a row."""
    source = file_source(tmp_path / "a.jsonl", json.dumps(talk(*messages)), form="conversations")
    assert only(source) == {"messages": turns}


@pytest.mark.parametrize(
    ("columns", "record", "reason", "said"),
    [
        *(
            ({"form": "conversations"}, *row)
            for row in (
                (talk(TURNS[0]), "ends_with_user", "there is no last answer"),
                (talk(*TURNS[::-1]), "wrong_roles", "turn 1 is of 'assistant'"),
                (talk(WORSE | {"role": "tool"}, TURNS[1]), "wrong_roles", "is of 'tool'"),
                (talk(OTHER, OTHER, WORSE | {"role": "tool"}), "wrong_roles", "turn 2 is of"),
                (talk(TURNS[0], WORSE | {"content": " "}), "empty_target", "assistant is empty"),
                (talk(), "no_example", "no list of messages"),
                (talk("text"), "no_example", "is not an object with texts"),
            )
        ),
        *(
            (TWO, {"chosen": TURNS, "rejected": rejected}, reason, said)
            for rejected, reason, said in (
                ([OTHER, WORSE], "no_example", "the two conversations differ before their last"),
                (TURNS[:1], "no_example", "'rejected' does not end with the assistant's turn"),
                (TURNS, "same_answers", "the chosen and the rejected answer are the same"),
            )
        ),
        ({"form": "pairs"}, {"document": "text"}, "no_example", "no text under the key 'summary'"),
        ({"form": "pairs"}, {"document": "text", "summary": ""}, "empty_target", "target is empty"),
        ({"form": "labeled"}, {"text": "x", "label": 0.5}, "no_example", "'label', but a number"),
        ({"form": "labeled"}, {"text": "x", "label": [1]}, "no_example", "'label', but a list"),
    ],
)
def test_examples_that_teach_nothing_are_named(
    tmp_path: Path, columns: dict[str, str], record: dict[str, Any], reason: str, said: str
) -> None:
    source = file_source(tmp_path / "a.jsonl", json.dumps(record) + "\n", **columns)
    (fault,) = read(source)
    assert isinstance(fault, Fault) and fault.reason == reason
    assert "a.jsonl, line 1: " in fault.message and said in fault.message


def test_a_whole_number_that_pandas_wrote_beside_missing_ones_is_a_class(tmp_path: Path) -> None:
    rows = (json.dumps({"text": "x", "label": label}) for label in (3.0, 3))
    source = file_source(tmp_path / "a.jsonl", "\n".join(rows) + "\n", form="labeled")
    found = [document for document in read(source) if isinstance(document, Document)]
    assert [read_example(str(document.example))["label"] for document in found] == ["3", "3"]


@pytest.mark.parametrize("name", ["README.txt", "page.html", "dump.xml"])
def test_a_file_without_rows_beside_examples_is_named(tmp_path: Path, name: str) -> None:
    source = file_source(
        tmp_path / "a.jsonl", json.dumps({"messages": TURNS}), form="conversations"
    )
    source["path"] = str(tmp_path)
    (tmp_path / name).write_text("These are questions and answers.")
    with pytest.raises(UserError, match=rf"{name} is in the format .*`formats` of the source, or"):
        read(source)
    found = read(source | {"on_bad_file": "quarantine"})
    assert [one.reason for one in found if isinstance(one, Fault)] == ["bad_file"]
    assert [one.path for one in found if isinstance(one, Document)] == ["a.jsonl"]
    assert only(source | {"formats": ["json"]}) == {"messages": TURNS}
