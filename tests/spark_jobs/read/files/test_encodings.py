"""Text in the encodings of older programs is learnt as it was meant, or not at all."""

import json
from pathlib import Path

import pytest

from artifacts.errors import UserError
from tests.spark_jobs.read.test_snapshot import files_source, snapshot

GERMAN = "Die größte Düse öffnet sich \u201csp\u00e4ter\u201d, für 5 € je Stück."
ENGLISH = "The pump is inspected before every start, and must not run dry. In Cairo, it is called"
FRENCH = "L\u2019été, la vanne s\u2019ouvre à 5 °C ; où est l\u2019œuvre ?"


@pytest.mark.parametrize(
    ("name", "before", "after"), [("a.txt", "", ""), ("a.html", "<html><body><p>", "</p></html>")]
)
@pytest.mark.parametrize(
    "text",
    [
        GERMAN,
        FRENCH,
        "Die Fläche hat 25 m², das Fass 40 cm³.",
        "late\u2014too late\u2014for the café, wait\u2026what",
        "Nord\u2013Süd und a\u2013b",
        "Größe, Düse, Gerät und für: Umlaute wie äöü sind erlaubt.",
    ],
)
@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-16", "UTF-16"),
        ("windows-1252", "windows-1252"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
    ],
)
def test_text_is_decoded_and_counted(
    tmp_path: Path, text: str, encoding: str, said: str, name: str, before: str, after: str
) -> None:
    (tmp_path / name).write_bytes(f"{before}{text}{after}".encode(encoding))

    (row,), stats = snapshot(files_source(tmp_path / name), tmp_path / "raw")

    assert row["text"] == text
    assert stats["decoded"] == {said: 1} and stats["decoded_examples"] == {said: [name]}
    assert stats["dropped"] == {} and stats["faults"] == []


@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE")]
)
@pytest.mark.parametrize(
    "text",
    ["يجب فحص المضخة قبل كل تشغيل.", "Клапан открывается каждую неделю.", "השסתום נפתח כל שבוע."],
)
@pytest.mark.parametrize(("name", "head"), [("a.txt", ""), ("a.csv", "text\n")])
def test_utf_16_without_a_mark_is_recognized_in_other_alphabets(
    tmp_path: Path, name: str, head: str, text: str, encoding: str, said: str
) -> None:
    (tmp_path / name).write_bytes(f"{head}{text}".encode(encoding))

    (row,), stats = snapshot(files_source(tmp_path / name), tmp_path / "raw")

    assert row["text"] == text
    assert stats["decoded"] == {said: 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_a_line_has_as_many_bytes_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    kept, left_out = "ä" * 400, "ä" * 500
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in (kept, left_out)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding)
    limits = {"maximum_document_megabytes": 0.001, "maximum_faulty_share": 0.5}
    source = files_source(tmp_path / "a.jsonl", **limits)

    rows, stats = snapshot(source, tmp_path / "raw")

    assert [row["text"] for row in rows] == [kept]
    assert stats["dropped"] == {"too_large": 1}


POLISH = "<html><body><p>Największy zawór otwiera się później.</p></body></html>"
CUT_UTF_8 = r"is not UTF-8 \(byte 0xc3 .* ends within a character: where it was cut off, fetch it"
UNKNOWN = r"the file is not UTF-8.*Set `encoding`.*iconv -f ENCODING"
CUT_OFF = r"UTF-16 that is cut off or damaged \(truncated data\)"


@pytest.mark.parametrize(
    ("name", "content", "declared", "message"),
    [
        (
            "a.txt",
            "Największy zawór otwiera się później, głos żółty.".encode("cp1250"),
            "",
            UNKNOWN,
        ),
        ("a.txt", "Клапан открывается каждую неделю.".encode("koi8_r"), "", UNKNOWN),
        ("a.txt", "ポンプは毎週開きます。".encode("shift_jis"), "", UNKNOWN),
        ("a.txt", "水泵每周打开一次。".encode("gb18030"), "", UNKNOWN),
        ("a.txt", "El café y el té de después se enfrían.".encode("mac_roman"), "", UNKNOWN),
        ("a.txt", "Był tam mały zawór.".encode("cp1250"), "", UNKNOWN),
        ("a.txt", f"{ENGLISH} مضخة الطرد المركزي".encode("cp1256"), "", UNKNOWN),
        ("a.txt", f"{ENGLISH} насос проверен".encode("cp1251"), "", UNKNOWN),
        ("a.txt", f"{ENGLISH} αντλία ελέγχθηκε".encode("cp1253"), "", UNKNOWN),
        ("a.txt", "Otwiera później.".encode("iso8859_2"), "", UNKNOWN),
        ("a.html", POLISH.encode("iso8859_2"), "", UNKNOWN),
        ("a.txt", b"\x00\x01\xe9\x02 words", "", "is not UTF-8"),
        ("a.rtf", rb"{\rtf1\ansi\ansicpg932 It \'81\'20 opens.}", "", "is not UTF-8"),
        ("a.csv", ("text\n" + "Größe.\n" * 60_000).encode() + b"Gr\xf6\xdfe", "", "is not UTF-8"),
        ("a.csv", ("text\n" + "Größe.\n" * 200_000).encode("cp1252") + b"\x81", "", "is not UTF-8"),
        ("a.txt", "ポンプ".encode("shift_jis") + b"\xff", "shift_jis", "not UTF-8, nor shift_jis"),
        ("a.txt", "Größe über alles".encode() + b"\xf6", "cp1250", "is not UTF-8, nor cp1250"),
        ("a.txt", "Größe über alles\n".encode() + b"a\xffb", "cp1250", "is not UTF-8, nor cp1250"),
        ("a.csv", "text\nGröße\n".encode() + b"a\xffb\n", "cp1250", "is not UTF-8, nor cp1250"),
        ("a.txt", "Der Rückfluß".encode()[:-1], "", CUT_UTF_8),
        ("a.csv", "text\nDer Rückfluß".encode()[:-1], "", CUT_UTF_8),
        ("a.jsonl", '{"text": "Der Rückfluß'.encode()[:-1], "", CUT_UTF_8),
        ("a.txt", GERMAN.encode("utf-16")[:-1], "", CUT_OFF),
        ("a.csv", f"text\n{GERMAN}\n".encode("utf-16")[:-1], "", CUT_OFF),
        ("a.txt", GERMAN.encode("utf-32")[:-1], "", CUT_OFF.replace("16", "32")),
        ("a.csv", f"text\n{GERMAN}\n".encode("utf-32")[:-1], "", CUT_OFF.replace("16", "32")),
        ("a.jsonl", (json.dumps({"text": GERMAN}) + "\n").encode("utf-16")[:-1], "", CUT_OFF),
        ("a.json", (json.dumps({"text": GERMAN}) + "\n").encode("utf-16")[:-1], "", CUT_OFF),
    ],
)
def test_text_in_no_encoding_that_can_be_told_is_named(
    tmp_path: Path, name: str, content: bytes, declared: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UserError, match=f"{name}: .*{message}"):
        snapshot(files_source(tmp_path / name, encoding=declared or None), tmp_path / "raw")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Największy zawór otwiera się później, głos żółty.", "cp1250"),
        ("Клапан открывается каждую неделю.", "koi8_r"),
        ("ポンプは毎週開きます。", "shift_jis"),
        ("ポンプは毎週開きます。", "euc_jp"),
        ("水泵每周打开一次。", "gb18030"),
    ],
)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.txt", "{}"),
        ("a.html", "<html><body><p>{}</p></body></html>"),
        ("a.jsonl", '{{"text": "{}"}}\n'),
        ("a.json", '[{{"text": "{}"}}]'),
        ("a.csv", 'id,text\n1,"{}"\n'),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n{}\n"),
    ],
)
def test_text_is_in_the_encoding_that_the_source_declares(
    tmp_path: Path, text: str, encoding: str, name: str, form: str
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / name).write_bytes(form.format(text).encode(encoding))
    (folder / f"new{Path(name).suffix}").write_bytes(form.format(text * 2).encode())

    found, stats = snapshot(files_source(folder, encoding=encoding), tmp_path / "raw")

    assert {row["text"] for row in found} == {text, text * 2}
    assert stats["decoded"] == {encoding: 1} and stats["dropped"] == {}


@pytest.mark.parametrize("encoding", ["utf-16", "windows-1252"])
def test_a_table_is_decoded_as_a_whole(tmp_path: Path, encoding: str) -> None:
    lines = ["id,text", *(f"{n},The valve opens." for n in range(40_000)), f'"x","{GERMAN}"']
    (tmp_path / "a.csv").write_bytes("\r\n".join(lines).encode(encoding))

    rows, stats = snapshot(files_source(tmp_path / "a.csv"), tmp_path / "raw")

    assert len(rows) == 40_001 and rows[-1]["text"] == GERMAN
    assert sum(stats["decoded"].values()) == 1


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "whole.json"])
def test_json_is_decoded_and_counted(tmp_path: Path, name: str, encoding: str) -> None:
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in (GERMAN, FRENCH)]
    lines = f"[{', '.join(rows)}]" if name == "whole.json" else "\n".join(rows)
    (tmp_path / name).write_bytes(lines.encode(encoding))

    found, stats = snapshot(files_source(tmp_path / name), tmp_path / "raw")

    assert [row["text"] for row in found] == [GERMAN, FRENCH]
    assert sum(stats["decoded"].values()) == 1 and stats["dropped"] == {}
