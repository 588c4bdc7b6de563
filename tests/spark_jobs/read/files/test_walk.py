"""What lies in a folder: read, or counted by kind and named, and nothing hangs."""

import errno
import os
import random
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from artifacts.storage import files
from spark_jobs.read.files.find import NoFiles, Walk, find_files
from spark_jobs.read.files.reading import documents_of
from spark_jobs.read.files.streams import Content
from spark_jobs.read.formats import Format
from spark_jobs.read.opened import SkippedFiles
from spark_jobs.read.settings import Files
from spark_jobs.read.snapshot import open_sources
from spark_jobs.read.source_file import RemoteFile
from spark_jobs.read.survey import survey
from tests.llm_assets.privilege import run_without_privilege
from tests.spark_jobs.read.test_snapshot import files_source, snapshot
from tests.stand_ins.google import BUCKET, LocalGoogle


def source_of(path: Path | str, **settings: object) -> Files:
    (source,) = files_source(path, **settings).sources
    assert isinstance(source, Files)
    return source


def unread_in(folder: Path, **settings: object) -> dict[str, list[str]]:
    return find_files(source_of(folder, **settings)).unread.examples


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "a.md").write_text("The valve opens.")
    return folder


def test_what_has_no_end_is_passed_over_and_named(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s.txt"))

    _, stats = snapshot(files_source(folder), folder.parent / "raw")

    assert stats["unread"] == {"FIFO": 1, "socket": 1}
    assert stats["unread_examples"] == {"FIFO": ["pipe.txt"], "socket": ["s.txt"]}
    with pytest.raises(UserError, match=r"pipe.txt is a FIFO, socket or device"):
        open_sources(files_source(folder / "pipe.txt"))


@pytest.mark.fault(
    "raw_corpus",
    "one file under two spellings of its path",
    sees="how many other spellings there are, among what was not read",
    then="it is read once",
)
def test_a_file_is_read_once_however_often_its_path_is_spelled(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    spelled = f"{folder.parent}/{{text/a.md,text/../text//a.md,link/a.md,link}}"

    rows, stats = snapshot(files_source(Path(spelled)), folder.parent / "raw")

    assert [row["id"] for row in rows] == ["a.md"] and stats["repeated_ids"] == 0
    assert stats["unread"] == {"other spelling of a file that is read": 3}


def test_links_are_read_within_the_folder_and_named_where_they_lead_elsewhere(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "b.md").write_text("A pump.")
    (folder / "again.md").symlink_to("a.md")
    (folder / "out.md").symlink_to(outside / "b.md")
    (folder / "all").symlink_to(outside)
    (folder / "dangling.md").symlink_to("nothing.md")
    (folder / "loop.md").symlink_to("loop.md")
    # A process of the kernel has no program, and the system does not say where the link leads.
    (folder / "program.md").symlink_to("/proc/2/exe")

    found = {kind: set(names) for kind, names in unread_in(folder).items()}
    assert found == {
        "link out of the folder": {"out.md"},
        "link to a folder": {"all/"},
        "broken link": {"dangling.md", "loop.md", "program.md"},
    }
    rows, _ = snapshot(files_source(folder, follow_links=True), folder.parent / "raw")
    assert [row["id"] for row in rows] == ["a.md", "again.md", "out.md"]


def test_folders_and_files_that_are_removed_during_the_walk_are_passed_over(folder: Path) -> None:
    for number in range(100):
        (folder / f"{number}").mkdir()
        (folder / f"{number}" / "b.md").write_text("A pump.")
    source = source_of(folder, on_bad_file="stop")
    unread = SkippedFiles()
    walked = Walk(source, unread, str(folder)).files()

    first, _ = next(walked)
    for number in range(100):
        shutil.rmtree(folder / f"{number}")

    assert {first, *(path for path, _ in walked)} <= {first, str(folder / "a.md")}
    assert not unread.counts


@pytest.mark.parametrize("name", ["b.md", "b.zip", "b.csv", "b.jsonl", "b.pdf"])
def test_a_file_that_is_removed_before_it_is_read_does_not_end_the_look(
    folder: Path, name: str
) -> None:
    (folder / name).write_text("A pump.")
    source = source_of(folder, on_bad_file="stop")
    found = find_files(source).files
    (folder / name).unlink()

    seen = survey(source, found, 1)

    assert seen.documents == 1 and seen.share == 1
    assert seen.unread.counts == {"removed while the folder was read": 1}


@pytest.mark.parametrize("name", ["b.csv", "b.tsv", "b.json"])
def test_what_is_looked_at_twice_counts_once_towards_how_much_was_read(
    folder: Path, name: str
) -> None:
    line = '{"text": "The valve opens."}' if name == "b.json" else "The valve opens.\t2"
    (folder / name).write_text("\n".join(["text\tnumber", *[line] * 5_000][name == "b.json" :]))
    source = source_of(folder)
    (file,) = (file for file in find_files(source).files if file.name == name)
    read: list[int] = []

    assert len(list(documents_of(Content(file, source, read.append)))) == 5_000
    assert sum(read) == file.size


@pytest.mark.parametrize("count", [1, 10])
def test_of_parquet_files_the_columns_that_are_read_tell_how_much_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rows = range(4_000 // count)
    pictures = [random.Random(row).randbytes(2_000) for row in rows]
    for number in range(count):
        texts = [f"Valve {row} of file {number} opens." for row in rows]
        table = pa.table({"text": texts, "picture": pictures})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=200)
    source = source_of(folder, formats=["parquet"])
    read: list[str] = []
    monkeypatch.setattr("spark_jobs.read.survey.guess_language", read.append)
    # Time passes with each document that is read.
    monkeypatch.setattr("time.monotonic", lambda: len(read))

    seen = survey(source, find_files(source).files, 1, seconds=1_500)

    assert 1_500 < seen.read < 4_000
    assert seen.documents == pytest.approx(4_000, rel=0.02)
    assert seen.share == pytest.approx(seen.read / 4_000, rel=0.02)


def test_hidden_files_other_formats_and_the_store_are_counted_by_kind(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD.txt").write_text("ref")
    (folder / ".notes.md").write_text("hidden")
    (folder / "store" / "raw_corpus").mkdir(parents=True)
    (folder / "store" / "raw_corpus" / "part.jsonl").write_text('{"text": "made"}')
    for name in ("a.png", "B.PNG", "core", "tool.py"):
        (folder / name).write_bytes(b"x")
    source = source_of(folder)

    found = find_files(source, str(folder / "store"))

    assert [file.name for file in found.files] == ["a.md"]
    assert found.unread.counts == {
        ".png": 2,
        "no ending": 1,
        "code files": 1,
        "hidden": 2,
        "store of llm-assets": 1,
    }
    assert "2 .png (" in str(found.unread)
    hidden = find_files(source.model_copy(update={"hidden": True}))
    assert {".git/HEAD.txt", ".notes.md"} <= {file.name for file in hidden.files}


@pytest.mark.parametrize("path", [".", "raw_corpus", "raw_corpus/*.jsonl", "raw_corpus/part.jsonl"])
def test_a_path_into_the_store_is_refused(folder: Path, path: str) -> None:
    store = folder / "store"
    (store / "raw_corpus").mkdir(parents=True)
    (store / "raw_corpus" / "part.jsonl").write_text('{"text": "made"}')
    (folder / "link").symlink_to(store)
    for place in (store, folder / "link"):
        source = source_of(place / path)
        with pytest.raises(UserError, match=r"`path` \(.*\) is in the pipeline's `store` \("):
            find_files(source, str(store))
    # A folder of a longer name is another one.
    (folder / "store of texts").mkdir()
    (folder / "store of texts" / "b.md").write_text("beta")
    source = source_of(folder / "store of texts")
    found = find_files(source, str(store))
    assert [file.name for file in found.files] == ["b.md"]


def test_the_store_in_a_bucket_is_no_text(google: LocalGoogle) -> None:
    root = f"gs://{BUCKET}/walk"
    files.write(f"{root}/a.md", b"The valve opens.")
    files.write(f"{root}/store/part.jsonl", b'{"text": "made"}')
    source = source_of(root)

    found = find_files(source, f"{root}/store")

    assert [file.name for file in found.files] == ["a.md"]
    assert found.unread.counts == {"store of llm-assets": 1}
    for store in (root, f"gs://{BUCKET}"):
        with pytest.raises(UserError, match=r"`path` \(gs://.*\) is in the pipeline's `store`"):
            find_files(source, store)


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_a_name_with_two_colons_is_that_of_one_file(
    google: LocalGoogle, tmp_path: Path, place: str
) -> None:
    """As Perl and C++ name things; to fsspec they part the URLs of a file within a file."""
    root = f"{tmp_path}/Local" if place == "local" else f"gs://{BUCKET}/{tmp_path.name}/Cloud"
    files.write(f"{root}/File::Spec.md", b"The valve opens.")
    files.write(f"{root}/File", b"Another file.")

    for path in (root, f"{root}/File::Spec.md", f"{root}/File::*.md"):
        rows, _ = snapshot(files_source(path), tmp_path / "raw")
        assert [(row["id"], row["text"]) for row in rows] == [("File::Spec.md", "The valve opens.")]


def test_names_that_no_terminal_could_bear_are_written_out(folder: Path) -> None:
    (Path(os.fsdecode(bytes(folder) + b"/caf\xe9.md"))).write_text("latin")
    (folder / "red\x1b[31m.md").write_text("escape")

    rows, _ = snapshot(files_source(folder), folder.parent / "raw")

    assert [row["id"] for row in rows] == ["a.md", r"caf\xe9.md", r"red\x1b[31m.md"]


def test_a_glob_finds_what_it_did_and_enters_no_more_than_it_must(folder: Path) -> None:
    (folder / "x" / "y").mkdir(parents=True)
    (folder / "x" / "b.md").write_text("b")
    (folder / "x" / "y" / "c.md").write_text("c")
    (folder / "x" / "y" / "d.txt").write_text("d")

    def names(pattern: str) -> list[str]:
        source = source_of(folder / pattern)
        return [file.name for file in find_files(source).files]

    assert names("*.md") == ["a.md"]
    assert names("x/*.md") == ["b.md"]
    assert names("**/*.md") == ["a.md", "x/b.md", "x/y/c.md"]
    assert names("**/y/*") == ["x/y/c.md", "x/y/d.txt"]
    # What it does not name is not there.
    (folder / ".notes.md").write_text("hidden")
    (folder / "all").symlink_to(folder.parent)
    with pytest.raises(NoFiles, match=r"matches no file\. Check"):
        names("*.txt")
    with pytest.raises(UserError, match=r"1 hidden \(.notes.md\)\. .*set `hidden`"):
        names(".n*")


@pytest.mark.parametrize(
    ("pattern", "counts"),
    [
        ("*.md", {}),
        ("*/*.md", {"hidden": 1, "link to a folder": 1, "store of llm-assets": 1}),
        ("**/*.md", {"hidden": 2, "link to a folder": 2, "store of llm-assets": 1}),
    ],
)
def test_folders_that_a_glob_could_reach_below_are_counted_where_they_are_not_entered(
    folder: Path, pattern: str, counts: dict[str, int]
) -> None:
    for place in (folder, folder / "x"):
        (place / ".git").mkdir(parents=True)
        (place / "all").symlink_to(folder.parent)
        (place / ".notes.txt").write_text("hidden")
        (place / "b.md").write_text("b")
    (folder / "store").mkdir()

    found = find_files(source_of(folder / pattern), str(folder / "store"))

    assert found.files and found.unread.counts == counts


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("hidden", "set `hidden` to read such files, "),
        ("link out of the folder", "set `follow_links` to read such files, "),
        ("link to a folder", ""),
        (".png", ""),
    ],
)
def test_where_nothing_is_read_a_setting_is_named_only_if_it_would_read_that(
    folder: Path, kind: str, advice: str
) -> None:
    (folder / "a.md").rename(folder.parent / "a.md")
    if kind.startswith("link"):
        target = folder.parent / "a.md" if kind.startswith("link out") else folder.parent
        (folder / "link.md").symlink_to(target)
    else:
        (folder / (".a.md" if kind == "hidden" else "a.png")).write_text("x")
    with pytest.raises(UserError) as refused:
        find_files(source_of(folder))
    assert f"Found instead: 1 {kind} (" in str(refused.value)
    assert f"Convert them to text, {advice}or point `path`" in str(refused.value)


@pytest.mark.parametrize("name", ["manuals [2024]", "a{b}", "all*"])
def test_a_folder_or_file_whose_name_could_be_a_pattern_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / f"{name}.md").write_text("A pump.")
    for path in (tmp_path / name, tmp_path / name / f"{name}.md"):
        source = source_of(path)
        found = find_files(source).files
        assert [file.name for file in found] == [f"{name}.md"]


READ = """
import sys
from tests.llm_assets.privilege import run_without_privilege
from tests.spark_jobs.read.test_snapshot import files_source
from spark_jobs.read.snapshot import open_sources
from artifacts.errors import UserError
try:
    opened = open_sources(files_source(sys.argv[1], on_bad_file=sys.argv[2]))
    print(opened["manual"].unread)
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_may_not_be_read_is_named_or_set_aside(folder: Path, kind: str) -> None:
    locked = folder / "locked"
    if kind == "folder":
        locked.mkdir()
    else:
        locked = folder / "locked.md"
        locked.write_text("secret")
    locked.chmod(0)

    stopped = run_without_privilege(READ, str(folder), "stop")
    set_aside = run_without_privilege(READ, str(folder), "quarantine")

    assert f"the {kind} {locked} may not be read" in stopped.stderr
    assert "on_bad_file: quarantine" in stopped.stderr and "Traceback" not in stopped.stderr
    assert f"1 unreadable {kind} ({locked.name})" in set_aside.stdout
    (folder / "a.md").unlink()
    nothing_left = run_without_privilege(READ, str(folder), "quarantine").stderr
    assert f"may read none of: 1 unreadable {kind}" in nothing_left
    assert "owner" in nothing_left and "Convert" not in nothing_left


def test_a_drive_that_is_gone_ends_the_reading_and_sets_nothing_aside(folder: Path) -> None:
    # The kernel answers a read at its beginning with an I/O error, as of a drive that was pulled.
    (folder / "b.md").symlink_to("/proc/self/mem")
    source = source_of(folder, follow_links=True, on_bad_file="quarantine")

    with pytest.raises(UserError, match=r"b.md cannot be read: its disk or network drive does not"):
        survey(source, find_files(source).files, 1)


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), socket.gaierror(socket.EAI_NONAME, "unknown"), OSError(errno.ENETUNREACH, "")],
)
def test_a_bucket_that_does_not_answer_sets_nothing_aside_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(path: str) -> None:
        raise error

    monkeypatch.setattr(files, "open_file", refuse)
    file = RemoteFile("gs://bucket/b.md", "b.md", 8, Format("text", ".md"), "1")
    source = source_of(folder, on_bad_file="quarantine")

    with pytest.raises(UserError, match=r"b.md cannot be read: its disk or network drive does not"):
        list(documents_of(Content(file, source, lambda number: None)))
