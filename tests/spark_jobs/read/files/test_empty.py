"""Files and rows without text: counted and named, and never taken for a damaged file."""

import json
from pathlib import Path

import pytest

from artifacts.errors import UserError
from spark_jobs.read.document import EXAMPLES
from spark_jobs.read.files.find import find_files
from spark_jobs.read.settings import Files
from spark_jobs.read.survey import survey
from tests.spark_jobs.read.test_snapshot import files_source, snapshot


@pytest.mark.fault(
    "raw_corpus",
    "upload truncated to 0 bytes: {ending}",
    sees="the file",
    then="nothing of it is read",
)
@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "tar.gz"])
def test_a_compressed_file_of_no_bytes_is_damaged(folder: Path, ending: str) -> None:
    (folder / "a.txt").write_text("The valve opens.")
    (folder / f"b.{ending}").write_bytes(b"")

    with pytest.raises(UserError, match=rf"b.{ending} is damaged"):
        snapshot(files_source(folder), folder.parent / "raw")


@pytest.mark.fault(
    "raw_corpus",
    "empty files",
    sees="how many, and the first ones",
    then="the others are read",
)
def test_every_file_and_row_without_text_is_counted_and_named(folder: Path) -> None:
    (folder / "a.txt").write_text("The valve opens.")
    (folder / "b.jsonl").write_text('{"text": "sound"}\n{"text": " "}\n')
    empty = {"c.csv": "text\n", "d.json": " \n", "e.json": "[]"}
    empty |= dict.fromkeys(("f.txt", "g.jsonl", "h.json", "i.csv", "j.tsv", "k.parquet"), "")
    for name, content in empty.items():
        (folder / name).write_text(content)
    source = files_source(folder)

    rows, stats = snapshot(source, folder.parent / "raw")

    assert [row["text"] for row in rows] == ["The valve opens.", "sound"]
    assert stats["dropped"] == {"empty": 10}
    (wanted,) = source.sources
    assert isinstance(wanted, Files)
    seen = survey(wanted, find_files(wanted).files, 1, messages=10)
    assert seen.faults == {"empty": 10} and len(stats["faults"]) == EXAMPLES
    for name in (*empty, "b.jsonl, line 2"):
        assert sum(name in message for message in seen.messages) == 1


def test_empty_rows_do_not_count_towards_the_share_that_may_be_faulty(folder: Path) -> None:
    texts = [{"text": " "}] * 90 + [{"text": "sound"}] * 9 + [{"body": "no text"}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, texts)))

    _, stats = snapshot(files_source(folder), folder.parent / "raw")

    assert stats["dropped"] == {"empty": 90, "no_text": 1}


@pytest.mark.fault(
    "raw_corpus",
    "every file or row set aside, so that nothing is left",
    sees="the first of them, with what is wrong, and what was not read",
    then="nothing is recorded as built",
)
def test_an_empty_corpus_names_what_was_set_aside(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(b"no gzip")
    (folder / "b.txt").write_bytes(b"")
    (folder / "c.png").write_bytes(b"picture")
    (folder / "d.jsonl").write_text('{"body": "x"}')
    settings = {"on_bad_file": "quarantine", "maximum_faulty_share": 1}

    with pytest.raises(UserError) as caught:
        snapshot(files_source(folder, **settings), folder.parent / "raw")

    said = str(caught.value)
    assert "1 bad_file, 1 empty, 1 no_text" in said
    assert "a.jsonl.gz is damaged" in said and "b.txt" in said and "1 .png (c.png)" in said
    assert "d.jsonl, line 1: no text under the key 'text' (found: body). Set `text_column`" in said
