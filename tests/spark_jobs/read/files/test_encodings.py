"""Text in the encodings of older programs is learnt as it was meant, or not at all."""

from pathlib import Path

import pytest

from artifacts.errors import UserError
from tests.spark_jobs.read.test_snapshot import files_source, snapshot

GERMAN = "Die größte Düse öffnet sich \u201csp\u00e4ter\u201d, für 5 € je Stück."
FRENCH = "L\u2019été, la vanne s\u2019ouvre à 5 °C ; où est l\u2019œuvre ?"


@pytest.mark.parametrize("text", [GERMAN, FRENCH])
@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-16", "UTF-16"), ("windows-1252", "windows-1252")]
)
def test_text_is_decoded_and_counted(tmp_path: Path, text: str, encoding: str, said: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))

    (row,), stats = snapshot(files_source(tmp_path / "a.txt"), tmp_path / "raw")

    assert row["text"] == text
    assert stats["decoded"] == {said: 1} and stats["decoded_examples"] == {said: ["a.txt"]}
    assert stats["dropped"] == {} and stats["faults"] == []


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Największy zawór otwiera się później, głos żółty.", "cp1250"),
        ("Клапан открывается каждую неделю.", "koi8_r"),
        ("ポンプは毎週開きます。", "shift_jis"),
        ("水泵每周打开一次。", "gb18030"),
    ],
)
def test_an_encoding_that_cannot_be_told_is_named(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))

    with pytest.raises(UserError, match=r"a.txt: the file is not UTF-8.*iconv"):
        snapshot(files_source(tmp_path / "a.txt"), tmp_path / "raw")


def test_bytes_that_are_no_text_are_not_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x00\x01\xe9\x02 words")

    with pytest.raises(UserError, match="not UTF-8"):
        snapshot(files_source(tmp_path / "a.txt"), tmp_path / "raw")


@pytest.mark.parametrize("encoding", ["utf-16", "windows-1252"])
def test_a_table_is_decoded_as_a_whole(tmp_path: Path, encoding: str) -> None:
    lines = ["id,text", *(f"{n},The valve opens." for n in range(40_000)), f'"x","{GERMAN}"']
    (tmp_path / "a.csv").write_bytes("\r\n".join(lines).encode(encoding))

    rows, stats = snapshot(files_source(tmp_path / "a.csv"), tmp_path / "raw")

    assert len(rows) == 40_001 and rows[-1]["text"] == GERMAN
    assert sum(stats["decoded"].values()) == 1


def test_quarantine_goes_on_while_some_text_remains(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.md").write_text("The valve opens.")
    for number in range(3):
        (folder / f"{number}.txt").write_bytes("Клапан открывается.".encode("koi8_r"))
    (folder / "rows.jsonl").write_text('{"text": "The pump stops."}\n{"body": 1}\nno JSON\n')

    rows, stats = snapshot(files_source(folder, on_bad_file="quarantine"), tmp_path / "raw")

    assert {row["text"] for row in rows} == {"The valve opens.", "The pump stops."}
    assert stats["dropped"] == {"not_utf8": 3, "no_text": 1, "not_json": 1}
    (folder / "a.md").unlink()
    (folder / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"corpus is empty(?s:.*)3 not_utf8(?s:.*)iconv"):
        snapshot(files_source(folder, on_bad_file="quarantine"), tmp_path / "again")
