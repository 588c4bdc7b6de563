"""Input as it should not be: named with its file and row, or set aside and counted."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from tests.spark_jobs.read.test_snapshot import files_source, snapshot


def test_parquet_files_of_one_folder_may_differ_in_what_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["alpha"], "stars": [3]}), folder / "a.parquet")
    large = pa.table({"language": ["de"], "text": pa.array(["beta"], pa.large_string())})
    pq.write_table(large, folder / "b.parquet")
    dictionary = pa.table({"text": pa.array(["gamma"]).dictionary_encode()})
    pq.write_table(dictionary, folder / "c.parquet")

    rows, _ = snapshot(files_source(folder), tmp_path / "raw")

    assert [row["text"] for row in rows] == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"body": ["beta"]}, r"b.parquet has no column 'text'; its columns are body"),
        ({"text": [7]}, r"b.parquet, row 1: no text under the key 'text'"),
        ({"text": [None]}, r"b.parquet, row 1: no text under the key 'text'"),
    ],
    ids=["missing column", "column of numbers", "null"],
)
def test_a_parquet_file_whose_text_differs_is_named(
    tmp_path: Path, second: dict[str, list], message: str
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["alpha"]}), folder / "a.parquet")
    pq.write_table(pa.table(second), folder / "b.parquet")

    with pytest.raises(UserError, match=message):
        snapshot(files_source(folder), tmp_path / "raw")


def test_parquet_text_that_is_not_utf8_is_set_aside_with_its_row(tmp_path: Path) -> None:
    texts = [b"sound"] * 199
    texts.insert(120, b"caf\xe9")
    offsets = pa.py_buffer(pa.array([0, *_ends(texts)], pa.int32()).buffers()[1])
    column = pa.StringArray.from_buffers(len(texts), offsets, pa.py_buffer(b"".join(texts)))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")

    rows, stats = snapshot(files_source(tmp_path / "a.parquet"), tmp_path / "raw")

    assert len(rows) == 199 and stats["dropped"] == {"not_utf8": 1}
    assert "a.parquet: row 121 is not UTF-8" in stats["faults"][0]


def _ends(texts: list[bytes]) -> list[int]:
    ends, end = [], 0
    for text in texts:
        end += len(text)
        ends.append(end)
    return ends


def test_rows_of_different_keys_are_set_aside_and_the_first_is_named(tmp_path: Path) -> None:
    lines: list[object] = [{"text": f"sound {number}"} for number in range(300)]
    lines[10], lines[20] = {"body": "no text key"}, ["a", "list"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))

    rows, stats = snapshot(files_source(tmp_path / "a.jsonl"), tmp_path / "raw")

    assert len(rows) == 298 and stats["dropped"] == {"no_text": 2}
    assert "a.jsonl, line 11: no text under the key 'text' (found: body)" in stats["faults"][0]


def test_a_hundred_thousand_empty_documents_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100_000 + '{"text": "full"}\n')

    rows, stats = snapshot(files_source(tmp_path / "a.jsonl"), tmp_path / "raw")

    assert len(rows) == 1 and stats["dropped"] == {"empty": 100_000}


def test_nul_bytes_reach_the_snapshot_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"before\x00after")

    rows, _ = snapshot(files_source(tmp_path / "a.txt"), tmp_path / "raw")

    assert rows[0]["text"] == "before\x00after"
