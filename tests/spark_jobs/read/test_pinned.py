"""Files that stay where they lie: the same corpus, and every change of them is noticed."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from artifacts.errors import UserError
from artifacts.storage import files
from spark_jobs.clean import job as clean
from spark_jobs.read.files import pinned
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import open_sources, write_snapshot
from spark_jobs.runtime.pinned import RAW_COLUMNS, find_raw_parts
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import CleanCorpusSettings
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.tiny import tiny_texts

TEXTS = tiny_texts(90)


def parquet_of(rows: dict[str, list], row_group_size: int = 20) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(rows), sink, row_group_size=row_group_size)
    return sink.getvalue()


def line_of(key: object, body: object) -> bytes:
    return json.dumps({"key": key, "body": body}).encode() + b"\n"


def write_source(folder: str) -> None:
    """Two files with texts, some of them copies, one null; ids are numbers."""
    texts = [*TEXTS[:50], *TEXTS[:5], None]
    rows = {"key": list(range(len(texts))), "body": texts, "unused": [1] * len(texts)}
    files.write(f"{folder}/a.parquet", parquet_of(rows))
    files.write(f"{folder}/deep/b.parquet", parquet_of({"key": [99] * 1, "body": [TEXTS[60]]}))


def write_lines(folder: str) -> None:
    """As `write_source`, of JSON lines: some blank, half a surrogate pair, keys within keys."""
    texts = [*TEXTS[:50], *TEXTS[:5], None, "half a pair \ud83d and more of the text than that"]
    lines = [json.dumps({"key": n, "page": {"body": text}}) for n, text in enumerate(texts)]
    lines[3] += "\r\n   \n"
    files.write(f"{folder}/a.jsonl", "\n".join(lines).encode())
    last = json.dumps({"key": "99", "page": {"body": TEXTS[60]}}, ensure_ascii=False)
    files.write(f"{folder}/deep/b.ndjson", f"\n{last}\n".encode())


def pinning(folder: str | Path, **settings: object) -> RawCorpusSettings:
    source = {"type": "files", "name": "manual", "path": str(folder), "pin": True}
    source |= {"text_column": "body", "id_column": "key"}
    return RawCorpusSettings.model_validate({"sources": [source | settings]})


def pin(settings: RawCorpusSettings, folder: Path) -> dict:
    return write_snapshot(settings, folder, lambda line: None)


def rows_of(raw: Path) -> list[dict]:
    return [row for part in find_raw_parts(str(raw)) for row in part.read(RAW_COLUMNS).to_pylist()]


@pytest.fixture(params=["parquet", "lines"])
def manual(request: pytest.FixtureRequest, tmp_path: Path) -> RawCorpusSettings:
    """A pinned source of either format."""
    if request.param == "parquet":
        write_source(f"{tmp_path}/text")
        return pinning(tmp_path / "text", maximum_faulty_share=0.5)
    write_lines(f"{tmp_path}/text")
    return pinning(tmp_path / "text", maximum_faulty_share=0.5, text_column="page.body")


def changed(settings: RawCorpusSettings, **source: object) -> dict:
    """The settings of its one source, some of them changed."""
    return settings.model_dump()["sources"][0] | source


def test_pinned_text_gives_the_clean_corpus_that_copied_text_gives(
    manual: RawCorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "STRETCH_BYTES", 2_000)
    other = {"type": "files", "name": "other", "path": f"{tmp_path}/other"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.txt").write_text(TEXTS[70])

    def cleaned(is_pinned: bool) -> dict[str, object]:
        sources = [changed(manual, pin=is_pinned), other]
        raw, output = tmp_path / f"raw-{is_pinned}", tmp_path / f"clean-{is_pinned}"
        pin(RawCorpusSettings.model_validate({"sources": sources}), raw)
        spec = clean.CleanSpec(
            raw_corpus=str(raw),
            output=str(output),
            settings=CleanCorpusSettings(minimum_characters=40),
        )
        stats = clean.run(local_session(partitions=2), spec, lambda line: None)
        table = pa.concat_tables([pq.read_table(f) for f in sorted(output.glob("part-*"))])
        return {
            "rows": sorted(table.to_pylist(), key=lambda row: row["id"]),
            "cluster_sizes": stats["cluster_sizes"],
            "duplicates": pq.read_table(output / "duplicates-00000.parquet"),
        }

    assert cleaned(True) == cleaned(False)
    assert len(find_raw_parts(str(tmp_path / "raw-True"))) > 4


def test_without_an_id_column_ids_are_those_of_a_copy(
    manual: RawCorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "STRETCH_BYTES", 2_000)
    for name, is_pinned in (("pinned", True), ("copied", False)):
        source = changed(manual, id_column=None, pin=is_pinned)
        pin(RawCorpusSettings.model_validate({"sources": [source]}), tmp_path / name)

    with_text = [row for row in rows_of(tmp_path / "pinned") if row["text"]]
    assert with_text == rows_of(tmp_path / "copied")


def test_nothing_of_the_text_is_copied_and_documents_are_counted(tmp_path: Path) -> None:
    write_source(f"{tmp_path}/text")

    stats = pin(pinning(tmp_path / "text"), tmp_path / "raw")

    assert [file.name for file in (tmp_path / "raw").iterdir()] == ["pinned.jsonl"]
    assert (stats["documents"], stats["pinned_files"]) == (57, 2)
    assert stats["sources"]["manual"]["documents"] == 57 and stats["bytes"] > 1_000


def test_a_file_in_a_bucket_that_changes_is_named(google: LocalGoogle, tmp_path: Path) -> None:
    folder = f"gs://{BUCKET}/pinned"
    write_source(folder)
    pin(pinning(folder), tmp_path / "raw")
    expected = rows_of(tmp_path / "raw")
    assert [row["id"] for row in expected] == [*map(str, range(56)), "99"]

    files.write(f"{folder}/deep/b.parquet", files.read(f"{folder}/deep/b.parquet"))
    assert rows_of(tmp_path / "raw") == expected

    files.write(f"{folder}/deep/b.parquet", parquet_of({"key": [99], "body": ["Another text."]}))
    with pytest.raises(UserError, match=r"deep/b\.parquet, which .* has changed since.*raw_corpus"):
        rows_of(tmp_path / "raw")

    files.remove(f"{folder}/deep/b.parquet")
    with pytest.raises(UserError, match=r"deep/b\.parquet.* is no longer there"):
        rows_of(tmp_path / "raw")


def test_a_file_that_changes_before_it_is_pinned_begins_the_source_again(tmp_path: Path) -> None:
    write_source(f"{tmp_path}/text")
    settings = pinning(tmp_path / "text")
    opened = open_sources(settings)
    files.write(f"{tmp_path}/text/a.parquet", parquet_of({"key": [1], "body": ["Another text."]}))

    with pytest.raises(SourceChanged, match=r"a\.parquet changed"):
        write_snapshot(settings, tmp_path / "raw", lambda line: None, opened=opened)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"key": "1"}]', r"pins Parquet files and JSON lines .*a\.json is \.json"),
        ("a.txt", b"text", r"not compressed, and .*a\.txt is \.txt \(text\)\. Set `formats`"),
        ("a.jsonl.gz", gzip.compress(b"{}"), r"a\.jsonl\.gz is gzip\. .* `pin: false`"),
        ("a.jsonl", gzip.compress(b"{}"), r"a\.jsonl is compressed \(gzip\), though its name"),
        ("a.jsonl", b'\n{"key": 1}\n', r"a\.jsonl, line 2: no text under the key 'body'"),
        (
            "a.jsonl",
            line_of("1", "a") + line_of("2", "b" * 300),
            r"line 2: more than 0.0002 MB\. Div",
        ),
        ("a.parquet", b"PAR1 no", r"a\.parquet is not a readable Parquet file"),
        ("a.parquet", parquet_of({"key": [1]}), r"no column 'body'; its columns are key"),
        ("a.parquet", parquet_of({"key": [1], "body": [["a"]]}), r"'body' is list<"),
        ("a.parquet", parquet_of({"key": [0.5], "body": ["a"]}), r"'key' is double"),
        ("a.parquet", parquet_of({"key": [1], "body": ["long " * 99]}), r"row group 0 has .* MB"),
    ],
    ids=[
        *("a JSON list", "text", "compressed", "compressed, unsaid", "no text", "a long line"),
        *("damaged", "without a column", "lists", "ids that are fractions", "too large"),
    ],
)
def test_what_cannot_be_pinned_is_refused_before_anything_is_read(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "MOST_GROUP_BYTES", 200)
    files.write(tmp_path / "text" / name, content)

    with pytest.raises(UserError, match=message):
        pin(pinning(tmp_path / "text", maximum_document_megabytes=0.0002), tmp_path / "raw")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["1", None], r"a\.parquet, row 2: the id '' is null"),
        (["1", " "], r"row 2: the id ' ' is empty"),
        (["a\nb", "2"], r"row 1: the id 'a.*b' holds control characters"),
    ],
    ids=["null", "blank", "line feed"],
)
def test_a_row_whose_id_cannot_be_used_is_named(
    ids: list[str], message: str, tmp_path: Path
) -> None:
    files.write(tmp_path / "text" / "a.parquet", parquet_of({"key": ids, "body": TEXTS[:2]}))
    pin(pinning(tmp_path / "text"), tmp_path / "raw")

    with pytest.raises(UserError, match=message):
        rows_of(tmp_path / "raw")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"key": 2, "body": "caf\xe9"}', r"byte 0xe9 is not UTF-8\. Mend it, or have such lines"),
        (b'{"key": 2, "body": "cut', r"not valid JSON \(Unterminated string"),
        (b'["a", "list"]', r"no text under the key 'body'"),
        (line_of(2, ["a", "list"]), r"no text under the key 'body'"),
        (line_of(None, "text"), r"no text or number under the key 'key'"),
        (line_of(" ", "text"), r"the id ' ' is empty"),
        (line_of("a\nb", "text"), r"the id 'a\\nb' holds control characters"),
    ],
    ids=["encoding", "cut off", "a list", "text of lists", "no id", "a blank id", "a line feed"],
)
def test_a_line_that_cannot_be_used_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    files.write(tmp_path / "text" / "a.jsonl", line_of(1, TEXTS[0]) + b"\n" + line)
    pin(pinning(tmp_path / "text"), tmp_path / "raw")

    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: {message}"):
        rows_of(tmp_path / "raw")


def test_lines_in_a_bucket_that_moved_are_not_read(google: LocalGoogle, tmp_path: Path) -> None:
    folder = f"gs://{BUCKET}/pinned_lines"
    write_lines(folder)
    stats = pin(pinning(folder, text_column="page.body"), tmp_path / "raw")
    assert (stats["documents"], stats["pinned_files"]) == (58, 2)
    assert [row["id"] for row in rows_of(tmp_path / "raw")] == [*map(str, range(57)), "99"]

    files.write(f"{folder}/a.jsonl", b"\n" + files.read(f"{folder}/a.jsonl"))
    with pytest.raises(UserError, match=r"a\.jsonl, which .* has changed since.*raw_corpus"):
        rows_of(tmp_path / "raw")


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    broken = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    content = parquet_of({"key": ["1"], "body": broken})
    files.write(tmp_path / "text" / "a.parquet", content)
    pin(pinning(tmp_path / "text"), tmp_path / "raw")

    with pytest.raises(UserError, match=r"a\.parquet, row group 0, cannot be read .*UTF8"):
        rows_of(tmp_path / "raw")


def test_examples_are_not_pinned(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="examples are always copied"):
        pinning(tmp_path, examples={"form": "labeled"})
