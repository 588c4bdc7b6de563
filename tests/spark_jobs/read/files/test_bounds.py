"""Memory, time and change while reading: bounded, told, noticed."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.snapshot import open_sources, write_snapshot
from tests.spark_jobs.read.test_snapshot import files_source, snapshot
from tests.waiting import WAIT_SECONDS

READ = """
import resource, sys
from pathlib import Path
from tests.spark_jobs.read.test_snapshot import files_source
from spark_jobs.read.snapshot import write_snapshot
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stats = write_snapshot(files_source(sys.argv[1]), Path(sys.argv[2]), lambda line: None)
print(stats["documents"], stats["dropped"].get("too_large", 0),
      (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def read_apart(path: Path, output: Path) -> tuple[int, int, int]:
    """Documents, too large ones, and megabytes by which memory grew, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", READ, str(path), str(output)],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_SECONDS,
    )
    documents, too_large, megabytes = map(int, ended.stdout.split())
    return documents, too_large, megabytes


@pytest.mark.soak
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_sixty_documents_of_ten_megabytes_take_the_memory_of_a_few(
    tmp_path: Path, ending: str
) -> None:
    text = "The valve opens before start-up. " * 320_000
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        line = json.dumps({"text": text}).encode() + b"\n"
        path.write_bytes(line * 60)
    else:
        column = pa.array([text] * 10)
        with pq.ParquetWriter(path, pa.schema({"text": pa.string()})) as writer:
            for _ in range(6):
                writer.write_table(pa.table({"text": column}))

    documents, _, megabytes = read_apart(path, tmp_path / "raw")

    assert documents == 60
    assert megabytes < 500


@pytest.mark.soak
def test_a_line_of_200_mb_is_passed_over_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(b'{"text": "sound"}\n')
        file.write(b'{"text": "' + b"valve " * 33_000_000 + b'"}\n{"text": "last"}\n')

    documents, too_large, megabytes = read_apart(path, tmp_path / "raw")

    assert (documents, too_large) == (101, 1)
    assert megabytes < 300


@pytest.mark.fault(
    "raw_corpus", "damaged page of a Parquet file", sees="the file and its checksum", then="refused"
)
def test_a_damaged_page_is_noticed_where_the_file_has_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"The valve number {number} opens." for number in range(500)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    place = content.index(b"number 250")
    content[place] ^= 1
    path.write_bytes(content)

    with pytest.raises(UserError, match=r"a.parquet is damaged.*CRC checksum"):
        snapshot(files_source(path), tmp_path / "raw")


def test_a_file_that_grows_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n')
    settings = files_source(path)
    opened = open_sources(settings)
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    with pytest.raises(SourceChanged, match=r"a.jsonl changed while it was read"):
        write_snapshot(settings, tmp_path / "raw", lambda line: None, opened=opened)

    path.unlink()
    with pytest.raises(SourceChanged, match="was removed while"):
        write_snapshot(settings, tmp_path / "again", lambda line: None, opened=opened)


def test_little_that_unpacks_to_much_says_that_it_is_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.progress.REPORT_SECONDS", 0)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 3_000_000 + b'{"text": "end"}'))
    lines: list[str] = []

    write_snapshot(files_source(path, maximum_expansion=10_000), tmp_path / "raw", lines.append)

    assert sum("reading" in line for line in lines) > 20


@pytest.mark.fault(
    "raw_corpus",
    "ids with control characters or half a surrogate pair",
    sees="how many rows",
    then="set aside",
)
def test_ids_that_nothing_could_bear_are_set_aside_and_named(tmp_path: Path) -> None:
    ids = [f"sound {number}" for number in range(600)]
    ids[100:106] = ["\ud800", "x" * 2_000, "red\x1b[31m", "", {"a": 1}, [7]]  # type: ignore[list-item]
    lines = [json.dumps({"key": one, "text": "The valve opens."}) for one in ids]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    _, stats = snapshot(files_source(tmp_path / "a.jsonl", id_column="key"), tmp_path / "raw")

    assert stats["dropped"] == {"bad_id": 6}
    named = "\n".join(stats["faults"])
    assert r"\ud800" in named and r"red\x1b[31m" in named and "\x1b" not in named
    assert "line 104: the id is an empty string" in named
    assert "a.jsonl, line 103: the id 'red" in named
    assert "line 105: the id is an object" in named
