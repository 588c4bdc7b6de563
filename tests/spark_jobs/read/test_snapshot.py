"""The raw corpus: sources in, a pinned snapshot out."""

import gzip
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from artifacts.errors import UserError
from spark_jobs.read import opened
from spark_jobs.read.docstrings import docstrings_of
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import fingerprints_of, open_sources, write_snapshot
from tests.damage import cut, flip_bit
from tests.spark_jobs.jobs import files_below


def settings_of(**source: object) -> RawCorpusSettings:
    return RawCorpusSettings.model_validate({"sources": [source]})


def files_source(path: Path | str, **settings: object) -> RawCorpusSettings:
    return settings_of(type="files", name="manual", path=str(path), **settings)


def snapshot(settings: RawCorpusSettings, folder: Path) -> tuple[list[dict], dict[str, Any]]:
    stats = write_snapshot(settings, folder, lambda line: None)
    rows = [row for file in sorted(folder.glob("*")) for row in pq.read_table(file).to_pylist()]
    return rows, stats


def test_docstrings_come_with_qualified_names_and_conditional_definitions() -> None:
    source = b'''"""Module."""
if True:
    def f():
        """First."""
else:
    def f():
        """Second."""
class A:
    """Class."""
    try:
        async def m(self):
            """Method."""
            def inner():
                """Inner."""
    except ValueError:
        pass
'''

    assert list(docstrings_of(source)) == [
        ("", "Module."),
        ("f", "First."),
        ("f", "Second."),
        ("A", "Class."),
        ("A.m", "Method."),
        ("A.m.inner", "Inner."),
    ]
    for no_python in (b'"""x""" def', b'"""\x00"""'):
        assert list(docstrings_of(no_python)) == []


def test_package_docs_are_read_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "never_imported"
    (package / "sub").mkdir(parents=True)
    long = "A valve that opens. " * 12
    (package / "__init__.py").write_text(f'"""{long}"""\nraise RuntimeError("imported")\n')
    (package / "sub" / "part.py").write_text(
        f'def f():\n    """{long}"""\n\n\ndef f():\n    """{long} Twice."""\n\n\ndef g(): "short"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of(type="package_docs", packages=["never_imported"])

    rows, stats = snapshot(settings, tmp_path / "raw")

    assert "never_imported" not in sys.modules
    assert [row["id"] for row in rows] == [
        "never_imported/never_imported",
        "never_imported/never_imported.sub.part:f",
        "never_imported/never_imported.sub.part:f#2",
    ]
    assert stats["documents"] == 3 and stats["repeated_ids"] == 1
    assert stats["sources"]["package_docs"]["documents"] == 3

    before = fingerprints_of(open_sources(settings))
    (package / "sub" / "part.py").write_text("changed = True\n")
    assert fingerprints_of(open_sources(settings)) != before


def test_installed_packages_carry_version_and_license_of_who_brought_them(tmp_path: Path) -> None:
    import networkx
    import yaml

    settings = settings_of(type="package_docs", packages=["networkx", "yaml"])

    rows, stats = snapshot(settings, tmp_path / "raw")

    assert {(row["package"], row["version"], row["license"]) for row in rows} == {
        ("networkx", networkx.__version__, "BSD-3-Clause"),
        ("yaml", yaml.__version__, "MIT License"),
    }
    assert stats["bytes"] == sum(len(row["text"].encode()) for row in rows) > 1_000_000
    assert len({row["id"] for row in rows}) == len(rows) == stats["documents"]


def test_files_are_read_by_their_endings_names_and_beginnings(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / "A.TXT").write_text("alpha\0é")
    (folder / "deep" / "b.txt.gz").write_bytes(gzip.compress(b"beta"))
    lines = [{"text": "gamma", "n": 1}, {"text": "", "n": 2}, {"text": "delta", "n": 3}]
    (folder / "C.JSONL").write_text("\n\n".join(map(json.dumps, lines)))
    for name in ("d.jsonl.gz", "packed.jsonl"):
        (folder / name).write_bytes(gzip.compress(json.dumps(lines[0]).encode()))
    # A backup of compressed files is often compressed again, with its ending or without.
    twice = gzip.compress(b"twice")
    (folder / "b.md.gz.zst").write_bytes(pa.compress(twice, "zstd", asbytes=True))
    (folder / "c.md.gz").write_bytes(gzip.compress(twice))
    pq.write_table(pa.table({"text": ["epsilon"]}), folder / "e.parquet")
    for name in ("README", "LICENSE", "run.log"):
        (folder / name).write_text(name)
    # `gz` is a program, and no ending of a name that is empty.
    for name in ("ignored.bin", "core", "gz"):
        (folder / name).write_bytes(b"\x7fELF")

    rows, stats = snapshot(files_source(folder), tmp_path / "raw")

    assert {row["id"]: row["text"] for row in rows} == {
        "A.TXT": "alpha\0é",
        "C.JSONL:1": "gamma",
        "C.JSONL:5": "delta",
        "d.jsonl.gz:1": "gamma",
        "packed.jsonl:1": "gamma",
        "deep/b.txt.gz": "beta",
        "b.md.gz.zst": "twice",
        "c.md.gz": "twice",
        "e.parquet:1": "epsilon",
        **{name: name for name in ("README", "LICENSE", "run.log")},
    }
    assert stats["dropped"] == {"empty": 1} and stats["unread"] == {".bin": 1, "no ending": 2}


def test_columns_globs_and_repeated_ids(tmp_path: Path) -> None:
    for name in ("x-1.jsonl", "x-2.jsonl", "y-1.jsonl"):
        (tmp_path / name).write_text(json.dumps({"key": 7, "body": name}))

    settings = files_source(tmp_path / "x-*.jsonl", text_column="body", id_column="key")
    rows, stats = snapshot(settings, tmp_path / "raw")

    assert [(row["id"], row["text"]) for row in rows] == [("7", "x-1.jsonl"), ("7#2", "x-2.jsonl")]
    assert stats["repeated_ids"] == 1


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few kilobytes instead of megabytes."""
    monkeypatch.setattr(opened, "PART_BYTES", (2_000, 16_000))


@pytest.mark.usefixtures("small_row_groups")
def test_the_same_source_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    found = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for number in range(90):
            (tmp_path / place / f"{number}.txt").write_text(f"Document {number}. " * 18)
        settings = files_source(tmp_path / place)
        snapshot(settings, tmp_path / f"raw-{place}")
        written = files_below(tmp_path / f"raw-{place}")
        found.append((settings.content(), fingerprints_of(open_sources(settings)), written))

    assert found[0] == found[1]
    files = (tmp_path / "raw-one").iterdir()
    assert sum(pq.ParquetFile(file).num_row_groups for file in files) > 3


def _corrupt_gzip() -> bytes:
    return gzip.compress(b'{"text": "a long enough line"}\n' * 500, mtime=0)[:-20]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\x81", r"a.txt: the file is not UTF-8 \(byte 0x81 at position 3\).*iconv"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\x81"}', r"a.jsonl: line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"body": "x"}', r"a.jsonl, line 1: no text under the key 'text'.*body"),
        (
            "a.jsonl",
            b'{"text": null}\n{"text": 7}',
            r"a.jsonl, line 1: no text under the key 'text', but null",
        ),
        (
            "a.jsonl",
            b'{"body": "x"}\n{"body": "y"}',
            r"a.jsonl has no column 'text'; its columns are body. Name",
        ),
        ("a.jsonl.gz", _corrupt_gzip(), r"a.jsonl.gz is damaged: its gzip"),
        ("a.txt.gz", b"not gzip at all", r"a.txt.gz is damaged: its gzip"),
        (
            "a.txt.gz",
            gzip.compress(gzip.compress(gzip.compress(b"It leaks.", mtime=0), mtime=0), mtime=0),
            r"a.txt.gz is compressed more than 2 times over. Unpack it until one gzip is left",
        ),
        ("a.ipynb", b"[]", r"a.ipynb cannot be read as notebook \(it is no object with `cells`\)"),
        ("a.json", b'[{"text": "x"},]', r"a.json is not valid JSON \(.* line 1 .*\). Repair it"),
        ("a.parquet", b"not parquet", r"a.parquet is damaged: its parquet cannot be read"),
        ("a.txt", b"  \n", r"raw corpus is empty.*1 empty.*\n.*a.txt: the id 'a.txt' has no text"),
        ("a.pdf", b"", r"raw corpus is empty.*1 empty.*\n.*a.pdf: the id 'a.pdf' has no text"),
        (
            "a.xlsx",
            bytes.fromhex("d0cf11e0a1b11ae1") + b"EncryptedPackage",
            r"a.xlsx cannot be read as xlsx \(it is encrypted, or .*; save .* without a password",
        ),
        ("~$a.docx", b"\x03Ann", r"no file .*1 lock file of an Office program \(~\$a\.docx\)"),
        ("a.odp", b"PK", r"no file at .*text has a format that is read.*1 \.odp \(a.odp\)"),
        ("a.jsonl", b'["text"]', "line 1: a list, where an object with the key 'text' belongs"),
        ("a.jsonl", b'{"text": 1%b}' % (b"0" * 400), "no text under the key 'text', but a number"),
        ("a.json", b'["so"]', "element 1: a text, where an object with the key 'text' belongs"),
    ],
)
def test_bad_files_are_named_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / name).write_bytes(content)

    with pytest.raises(UserError, match=message):
        snapshot(files_source(tmp_path / "text"), tmp_path / "raw")


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="'no_such', which is not installed"):
        open_sources(settings_of(type="package_docs", packages=["no_such"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"encoding": name}, f"'{name}' is not the name of a text encoding")
            for name in ("utf-16", "hex", "klingon")
        ),
        *(
            ({"text_template": template}, "text_template")
            for template in ("no column", "{}", "{a!r}", "{a:>3}", "{a", "{a\n}")
        ),
        ({"path": "data.pkl"}, "convert it and .*: python -c"),
        ({"text_template": "{a}", "examples": {"form": "pairs"}}, "give only one"),
    ],
)
def test_what_no_files_can_be_read_by_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(**{"type": "files", "path": "a", **settings})


def test_two_sources_of_one_name_are_refused() -> None:
    source = {"type": "package_docs", "packages": ["json"]}

    with pytest.raises(ValidationError, match="two sources are named package_docs"):
        RawCorpusSettings.model_validate({"sources": [source, source]})


@pytest.mark.usefixtures("small_row_groups")
def test_a_corpus_that_grew_in_one_place_has_the_same_parts_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(200):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(f"Document {number}. " * 5)

    def parts(name: str) -> set[str]:
        snapshot(files_source(tmp_path / "text"), tmp_path / name)
        return {
            str(file.read_row_group(group)["id"])
            for file in map(pq.ParquetFile, sorted((tmp_path / name).iterdir()))
            for group in range(file.num_row_groups)
        }

    before = parts("before")
    (tmp_path / "text" / "050a.txt").write_text("One more document. " * 5)
    after = parts("after")

    assert len(before) > 4
    assert len(after - before) <= 2


def _write_files(folder: Path, numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        rows = [
            {"id": f"{number * row % 97}", "text": f"Row {row} of file {number}."}
            for row in range(90)
        ]
        (folder / f"{number:02d}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.usefixtures("small_chunks")
def test_only_what_is_new_is_read_again_and_the_result_is_that_of_a_run_from_nothing(
    tmp_path: Path,
) -> None:
    settings = files_source(tmp_path / "text", id_column="id")
    cache = tmp_path / "cache"
    _write_files(tmp_path / "text", range(12))
    write_snapshot(settings, tmp_path / "before", lambda line: None, str(cache))
    before = {file.name for file in cache.iterdir()}
    _write_files(tmp_path / "text", range(12, 13))

    grown = write_snapshot(settings, tmp_path / "grown", lambda line: None, str(cache))
    full = write_snapshot(settings, tmp_path / "full", lambda line: None)

    after = {file.name for file in cache.iterdir()}
    assert before < after and len(after - before) < len(after) / 2
    assert grown == full and full["repeated_ids"] > 0
    assert files_below(tmp_path / "grown") == files_below(tmp_path / "full")


def test_an_edit_is_read_of_either_of_two_files_of_one_name(tmp_path: Path) -> None:
    for year in ("2023", "2024"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "report.md").write_text(f"Report of {year}.")
    settings, cache = files_source(tmp_path / "{2023,2024}"), str(tmp_path / "cache")
    write_snapshot(settings, tmp_path / "before", lambda line: None, cache)
    (tmp_path / "2023" / "report.md").write_text("Edited.")

    write_snapshot(settings, tmp_path / "after", lambda line: None, cache)

    texts = pq.read_table(tmp_path / "after" / "part-00000.parquet")["text"].to_pylist()
    assert texts == ["Edited.", "Report of 2024."]


@pytest.mark.fault(
    "raw_corpus",
    "cached chunks of sources cut, changed or gone",
    sees="nothing",
    then="read again; the snapshot is the same",
)
@pytest.mark.usefixtures("small_chunks")
def test_what_is_cut_changed_or_gone_in_the_cache_is_read_again(tmp_path: Path) -> None:
    settings = files_source(tmp_path / "text", id_column="id")
    cache = tmp_path / "cache"
    _write_files(tmp_path / "text", range(12))
    write_snapshot(settings, tmp_path / "whole", lambda line: None, str(cache))
    entries = sorted(cache.iterdir())
    assert len(entries) > 2

    for number, file in enumerate(entries):
        (cut, flip_bit)[number % 2](file)
    entries[0].unlink()
    write_snapshot(settings, tmp_path / "again", lambda line: None, str(cache))

    assert files_below(tmp_path / "again") == files_below(tmp_path / "whole")


@pytest.mark.fault(
    "raw_corpus",
    "two runs on different text at once",
    sees="nothing",
    then="each gets its own snapshot",
)
@pytest.mark.usefixtures("small_chunks")
def test_runs_on_other_text_at_once_do_not_meet(tmp_path: Path) -> None:
    sources = {}
    for number in range(4):
        _write_files(tmp_path / f"text{number}", range(number + 1))
        sources[number] = files_source(tmp_path / f"text{number}", id_column="id")
        write_snapshot(sources[number], tmp_path / f"alone{number}", lambda line: None)

    def run(number: int) -> dict[str, bytes]:
        for turn in range(3):
            folder = tmp_path / f"together{number}-{turn}"
            write_snapshot(sources[number], folder, lambda line: None, str(tmp_path / "cache"))
        return files_below(folder)

    with ThreadPoolExecutor(4) as runs:
        together = list(runs.map(run, sources))
    assert together == [files_below(tmp_path / f"alone{number}") for number in sources]
