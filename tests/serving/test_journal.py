"""What is written down of answers, and found again, whatever happened to the files."""

from pathlib import Path

import pytest

from serving.journal import FOLDER, Journal, find_entries
from serving.settings import JournalSettings
from serving.state import OfVersion
from tests.serving.conftest import generate_request

VERSION = OfVersion(version="1", fingerprint="f")


def write(folder: Path, request: str) -> None:
    """One answer, by a server that has just started."""
    journal = Journal(folder, JournalSettings)
    journal.write(request, VERSION, [generate_request(prompt="Who?")], ["the answer"])


@pytest.mark.fault(
    "endpoint",
    "server killed, or disk full, in the middle of a line of the journal",
    sees="the answers before and after it",
    then="that one answer alone is lost",
)
def test_a_line_that_was_cut_short_loses_no_other_answer(tmp_path: Path) -> None:
    write(tmp_path, "before")
    (today,) = (tmp_path / "requests").glob("*.jsonl")
    with today.open("a") as file:
        file.write('{"request": "torn", "at"')
    for name in ("next", "last"):
        write(tmp_path, name)
    for name, count in (("before", 1), ("torn", 0), ("next", 1), ("last", 1)):
        assert len(find_entries(tmp_path, name, days=1)) == count, name
    assert today.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["copy.jsonl", "2026-13-01.jsonl"])
def test_a_file_that_is_no_days_is_left_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path, "before")
    (today,) = (tmp_path / "requests").glob("*.jsonl")
    stray = today.with_name(name)
    stray.write_bytes(today.read_bytes())
    write(tmp_path, "after")
    for request in ("before", "after"):
        assert len(find_entries(tmp_path, request, days=1)) == 1
    assert stray.exists()


@pytest.mark.parametrize("prefix", ["cmpl-", "chatcmpl-"])
def test_an_answer_is_found_by_the_id_that_openais_clients_show(
    tmp_path: Path, prefix: str
) -> None:
    for name in ("mine-0123456789ab", "cmpl-of-a-client-0123456789ab"):
        write(tmp_path, name)
        for asked in (name, prefix + name):
            (found,) = find_entries(tmp_path, asked, days=1)
            assert found.request == name
    assert not find_entries(tmp_path, f"{prefix}0123456789ab", days=1)


def test_a_key_that_a_full_disk_left_empty_is_made_again(tmp_path: Path) -> None:
    """Without one, short texts could be guessed."""
    path = tmp_path / FOLDER / "key"
    path.parent.mkdir()
    path.touch()
    journal = Journal(tmp_path, lambda: JournalSettings(keep="hashes"))
    journal.write("one", VERSION, [generate_request(prompt="yes")], ["no"])
    assert len(path.read_bytes()) == 32
