"""Braces, compression, Hugging Face folders, and documents that cannot be used."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import UserError
from spark_jobs.read.files.find import expand_braces
from spark_jobs.read.snapshot import open_sources
from tests.spark_jobs.read.test_snapshot import files_source, settings_of, snapshot


@given(st.integers(0, 300), st.integers(0, 40))
def test_a_range_names_every_number_once(first: int, more: int) -> None:
    expected = [f"a/{n}-of-9.gz" for n in range(first, first + more + 1)]

    assert expand_braces(f"a/{{{first}..{first + more}}}-of-9.gz") == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x{1..128", "without its pair"),
        ("x{a,{b,c}}", "or nested"),
        ("x{1.128}", r"neither a range like \{1..128\}"),
        ("x{9..1}", "runs backwards"),
        ("x{0..9999999}", "more than 100,000 files"),
    ],
)
def test_a_range_typed_wrong_is_named(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_braces(path)


def test_numbered_compressed_files_are_read_in_their_order(tmp_path: Path) -> None:
    for number in range(1, 12):
        line = json.dumps({"text": f"document {number}"}).encode()
        (tmp_path / f"t.{number}-of-11.jsonl.zst").write_bytes(
            pa.compress(line + b"\n" + line, "zstd", asbytes=True)
        )

    rows, _ = snapshot(files_source(tmp_path / "t.{1..11}-of-11.jsonl.zst"), tmp_path / "raw")

    assert [row["text"] for row in rows[::2]] == [f"document {n}" for n in range(1, 12)]
    with pytest.raises(UserError, match=r"t.12-of-11.jsonl.zst matches no file"):
        open_sources(files_source(tmp_path / "t.{1..12}-of-11.jsonl.zst"))


def test_faulty_documents_are_set_aside_counted_and_named(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"sound {n}"}).encode() for n in range(200)]
    lines[50], lines[60] = b'{"text": "\x81"}', b'{"text": '
    lines[70], lines[80] = b'{"texts": "x"}', b'{"text": "\\ud83d\\ude00 \\ud800"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))

    rows, stats = snapshot(
        files_source(tmp_path / "a.jsonl", maximum_faulty_share=0.02), tmp_path / "raw"
    )

    assert len(rows) == 197
    assert stats["dropped"] == {"no_text": 1, "not_json": 1, "not_utf8": 1}
    assert "a.jsonl: line 51 is not UTF-8" in stats["faults"][0]
    assert rows[77]["text"] == "\U0001f600 \ufffd"
    with pytest.raises(UserError, match=r"3 of 200 documents cannot be used.*0.01(?s:.*)line 51"):
        snapshot(files_source(tmp_path / "a.jsonl"), tmp_path / "again")


@pytest.mark.fault(
    "raw_corpus",
    "compression bomb",
    sees="the file and the limit",
    then="refused before memory is full",
)
def test_a_compression_bomb_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_jobs.read.files.streams.BOMB_BYTES", 1_000_000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"0" * 20_000_000))

    with pytest.raises(UserError, match=r"a.jsonl.gz unpacks to more than.*maximum_expansion"):
        snapshot(files_source(tmp_path / "a.jsonl.gz"), tmp_path / "raw")


@pytest.mark.fault("raw_corpus", "truncated zstd file", sees="the file", then="refused")
def test_a_truncated_zstd_file_is_named(tmp_path: Path) -> None:
    content = pa.compress(b'{"text": "x"}\n' * 10_000, "zstd", asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(content[: len(content) // 2])

    with pytest.raises(UserError, match=r"a.jsonl.zst is damaged"):
        snapshot(files_source(tmp_path / "a.jsonl.zst"), tmp_path / "raw")


@pytest.mark.parametrize("layout", ["files", "saved"])
def test_a_local_hugging_face_dataset_is_read(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setenv("HOME", str(tmp_path))
    rows = {"body": ["first", "second", "third"], "key": [7, 8, None]}
    folder = tmp_path / "dataset"
    if layout == "saved":
        dataset = datasets.Dataset.from_dict(rows)
        datasets.DatasetDict({"train": dataset}).save_to_disk(str(folder))
    else:
        folder.mkdir()
        lines = [{"body": b, "key": k} for b, k in zip(*rows.values(), strict=True)]
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = {
        "type": "hugging_face",
        "dataset": "~/dataset",
        "text_column": "body",
        "id_column": "key",
        "maximum_faulty_share": 0.5,
    }
    settings = settings_of(**source)

    found, stats = snapshot(settings, tmp_path / "raw")

    assert [(row["id"], row["text"]) for row in found] == [("7", "first"), ("8", "second")]
    assert stats["dropped"] == {"no_id": 1}
    assert stats["faults"] == ["~/dataset, row 2: no id under the key 'key'."]
    assert str(tmp_path) not in json.dumps(settings.content())
    wrong = settings_of(**source | {"text_column": "text"})
    with pytest.raises(UserError, match=r"no column 'text'; its columns are body, key"):
        snapshot(wrong, tmp_path / "wrong")
