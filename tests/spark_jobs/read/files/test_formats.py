"""Every format people have becomes text; what cannot is named."""

import gzip
import io
import json
import lzma
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import IO

import docx
import pytest
from docx.enum.style import WD_STYLE_TYPE
from docx.opc.constants import RELATIONSHIP_TYPE
from docx.opc.packuri import PackURI
from docx.opc.part import Part
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls

from artifacts.errors import UserError
from tests.folders import write_pdf
from tests.spark_jobs.read.test_snapshot import files_source, snapshot

PAGE = """<html><head><title>Pump</title><script>alert(1)</script></head><body>
<nav><a href="/">Home</a><a href="/shop">Shop</a></nav><article><h1>Pump</h1>
<p>The pump opens every week and must be checked by the operator before start-up.</p>
<p>The inner ring turns slowly when the lamp is red, and the filter is replaced.</p></article>
<footer>Imprint</footer></body></html>"""


def texts_of(folder: Path, **settings: object) -> dict[str, str]:
    rows, _ = snapshot(files_source(folder, **settings), folder.parent / "raw")
    return {row["id"]: row["text"] for row in rows}


def test_a_page_gives_its_main_text_and_a_piece_of_one_its_text(folder: Path) -> None:
    (folder / "a.html").write_text(PAGE)
    (folder / "b.html").write_text("<div><div><p>It opens.</p><p>So does this.</p></div></div>")

    texts = texts_of(folder)

    assert "The pump opens every week" in texts["a.html"] and "The inner ring" in texts["a.html"]
    assert "alert" not in texts["a.html"]
    assert texts["b.html"] == "It opens.\n\nSo does this."


@pytest.mark.parametrize(
    ("module", "name"), [("trafilatura", "a.html"), ("pypdf", "a.pdf"), ("docx", "a.docx")]
)
def test_an_absent_extra_is_no_fault_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    (folder / name).write_text(PAGE)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UserError, match=rf"{module}, which is not installed here.*llm-assets\[read\]"
    ):
        texts_of(folder, on_bad_file="quarantine")


def test_pdf_and_word_give_their_text(folder: Path) -> None:
    write_pdf(folder / "a.pdf", "The valve opens before start-up")
    document = docx.Document()
    document.add_heading("Valves", level=2)
    # Headings alone are marked, and not what has a number for another style's name.
    document.styles.add_style("12", WD_STYLE_TYPE.PARAGRAPH)
    document.add_paragraph("Each gauge is checked.", style="12")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "gauge", "40 °C"
    document.save(str(folder / "b.docx"))

    texts = texts_of(folder)

    assert texts["a.pdf"] == "The valve opens before start-up"
    assert texts["b.docx"] == "## Valves\n\nEach gauge is checked.\n\ngauge | 40 °C"


def test_merged_cells_of_a_word_file_come_once_and_tables_within_cells_come_too(
    folder: Path,
) -> None:
    document = docx.Document()
    table = document.add_table(rows=3, cols=3)
    texts = ["Checks", "", "", "pump", "40 °C", "", "", "50 °C", "daily"]
    for place, text in enumerate(texts):
        table.cell(*divmod(place, 3)).text = text
    table.cell(0, 0).merge(table.cell(0, 2))
    table.cell(1, 0).merge(table.cell(2, 0))
    inner = table.cell(1, 2).add_table(rows=1, cols=2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "lamp", "red"
    document.save(str(folder / "a.docx"))

    assert texts_of(folder) == {"a.docx": "Checks\npump | 40 °C | lamp | red\n | 50 °C | daily"}


def write_docx(path: Path, blocks: str) -> None:
    """A Word file whose body has these blocks."""
    document = docx.Document()
    body = parse_xml(f"<w:body {nsdecls('w', 'm')}>{blocks}</w:body>")
    for number, block in enumerate(list(body)):
        document.element.body.insert(number, block)
    document.save(str(path))


RUN = '<w:r><w:t xml:space="preserve">{}</w:t></w:r>'


CONTROL = "<w:sdt><w:sdtPr>{}</w:sdtPr><w:sdtContent>{}</w:sdtContent></w:sdt>"
FORMULA = "<m:oMath><m:r><m:t>E=</m:t></m:r><m:r><m:t>mc</m:t></m:r></m:oMath>"


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (
            CONTROL.format("", f"<w:p>{RUN.format('Checked by Ann.')}</w:p>")
            + CONTROL.format("<w:showingPlcHdr/>", f"<w:p>{RUN.format('Enter text.')}</w:p>")
            + f"<w:p>{RUN.format('It opens ')}<w:del><w:r><w:delText>old</w:delText></w:r></w:del>"
            + CONTROL.format("", f"<w:ins>{RUN.format('weekly')}</w:ins>")
            + "</w:p>",
            "Checked by Ann.\n\nIt opens weekly",
        ),
        (
            f"<w:p>{RUN.format('In ')}<w:r><w:ruby><w:rt>{RUN.format('とう')}</w:rt><w:rubyBase>"
            f"{RUN.format('東')}</w:rubyBase></w:ruby></w:r>{RUN.format(' is ')}{FORMULA}.</w:p>"
            f"<w:p><m:oMathPara>{FORMULA}</m:oMathPara></w:p>",
            "In 東 is E=mc\n\nE=mc",
        ),
    ],
    ids=["inserted, filled in and deleted", "formulas, and words whose reading is shown"],
)
def test_a_word_file_gives_what_is_shown(folder: Path, blocks: str, text: str) -> None:
    write_docx(folder / "a.docx", blocks)

    assert texts_of(folder) == {"a.docx": text}


def test_a_word_file_gives_fields_text_boxes_and_notes_once(folder: Path) -> None:
    field = f'<w:fldSimple w:instr="SEQ">{RUN.format("7")}</w:fldSimple>'
    turned = f'<w:bdo w:val="rtl">{RUN.format(" pumps")}</w:bdo>'
    box = f"<w:txbxContent><w:p>{RUN.format('In a box.')}</w:p></w:txbxContent>"
    markup = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    twice = (
        f"<w:r><mc:AlternateContent {markup}><mc:Choice>{box}</mc:Choice>"
        f"<mc:Fallback>{box}</mc:Fallback></mc:AlternateContent></w:r>"
    )
    document = docx.Document()
    paragraph = f"<w:p {nsdecls('w')}>{RUN.format('Table ')}{field}{turned}{twice}</w:p>"
    document.element.body.insert(0, parse_xml(paragraph))
    note = '<w:footnote w:type="separator"><w:p/></w:footnote><w:footnote w:id="1"><w:p>{}</w:p>'
    notes = f"<w:footnotes {nsdecls('w')}>{note.format(RUN.format('Of the roof.'))}</w:footnote>"
    part = Part(
        PackURI("/word/footnotes.xml"),
        "application/vnd.openxmlformats-officedocument.wordprocessingml.footnotes+xml",
        f"{notes}</w:footnotes>".encode(),
        document.part.package,
    )
    document.part.relate_to(part, RELATIONSHIP_TYPE.FOOTNOTES)
    document.save(str(folder / "a.docx"))

    assert texts_of(folder) == {"a.docx": "Table 7 pumps\n\nIn a box.\n\nOf the roof."}


def test_a_pdf_without_text_is_set_aside_and_one_with_a_password_named(folder: Path) -> None:
    (folder / "a.md").write_text("The valve opens.")
    write_pdf(folder / "scanned.pdf", None)
    _, stats = snapshot(files_source(folder), folder.parent / "raw")
    assert stats["dropped"] == {"no_text_layer": 1}
    assert "scanned.pdf has no text" in stats["faults"][0]

    write_pdf(folder / "secret.pdf", "hidden", password="x")
    with pytest.raises(UserError, match=r"secret.pdf cannot be read as pdf \(it is encrypted"):
        texts_of(folder)


def test_a_notebook_gives_text_and_code_whichever_version_wrote_it(folder: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Pumps\n", "They turn."]},
        {"cell_type": "code", "source": "turn(3)", "outputs": [{"text": "3"}]},
    ]
    (folder / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    code = {"cell_type": "code", "input": ["turn(3)"]}
    old = {"cells": None, "worksheets": [{"cells": [cells[0], code]}]}
    (folder / "b.ipynb").write_text(json.dumps(old))
    blank = {"cell_type": "code", "source": None}
    (folder / "c.ipynb").write_text(json.dumps({"cells": [*cells, blank], "metadata": None}))
    unnamed = {"language_info": {"name": None}}
    (folder / "d.ipynb").write_text(json.dumps({"cells": cells, "metadata": unnamed}))

    assert texts_of(folder) == {
        f"{name}.ipynb": "# Pumps\nThey turn.\n\n```python\nturn(3)\n```" for name in "abcd"
    }


def test_code_is_read_where_the_settings_name_it(folder: Path) -> None:
    (folder / "pump").mkdir()
    (folder / "pump" / "turn.py").write_text("def turn(): ...\n")
    (folder / "Makefile").write_text("all:\n")

    rows, _ = snapshot(files_source(folder, formats=["code"]), folder.parent / "raw")

    assert {(row["path"], row["language"]) for row in rows} == {
        ("Makefile", "makefile"),
        ("pump/turn.py", "python"),
    }
    with pytest.raises(UserError, match=r"nothing at .* is read: 2 code files"):
        texts_of(folder)


def test_lists_of_objects_tables_and_text_within_text_are_rows(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps([{"key": 5, "page": {"text": "alpha"}}], indent=1))
    lines = [{"key": number, "page": {"text": f"beta {number}"}} for number in (6, 10)]
    (folder / "b.json").write_text("\n".join(map(json.dumps, lines)))
    (folder / "c.csv").write_text('key,page.text\n7,"delta, with a\nbreak"\n8,epsilon\n')
    (folder / "d.tsv").write_text("key\tpage.text\n9\tzeta\n")

    expected = {"5": "alpha", "6": "beta 6", "10": "beta 10", "7": "delta, with a\nbreak"}
    expected |= {"8": "epsilon", "9": "zeta"}
    assert texts_of(folder, text_column="page.text", id_column="key") == expected


def test_archives_are_read_in_place_and_what_is_passed_over_in_them_is_counted(
    folder: Path,
) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("docs/a.md", "alpha")
        archive.writestr("docs/rows.jsonl", '{"text": "beta"}\n')
        archive.writestr("docs/a.png", b"x")
    with tarfile.open(folder / "b.tar.gz", "w:gz") as archive:
        for name, content in (("c.txt", b"gamma"), ("d.json", b'[{"text": "delta"}]')):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    # The ending of the archive names a compression, too, and it is the inner one.
    (folder / "c.tgz.xz").write_bytes(lzma.compress(gzip.compress(tar_of("e.md"))))

    rows, stats = snapshot(files_source(folder), folder.parent / "raw")

    assert {row["id"]: row["text"] for row in rows} == {
        "a.zip/docs/a.md": "alpha",
        "a.zip/docs/rows.jsonl:1": "beta",
        "b.tar.gz/c.txt": "gamma",
        "b.tar.gz/d.json:1": "delta",
        "c.tgz.xz/e.md": "e.md",
    }
    assert stats["unread"] == {".png": 1, "link in an archive": 1}
    assert stats["unread_examples"][".png"] == ["a.zip/docs/a.png"]
    assert stats["dropped"] == {} and stats["faults"] == []


def tar_of(*names: str) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return written.getvalue()


SOUND_TAR = tar_of("a.md", "b.md")
SECOND_HEADER = 1024
"""Where it begins in that archive, after a header and a block of content."""


@pytest.mark.parametrize(
    "content",
    [
        SOUND_TAR[:SECOND_HEADER] + b"\x01" * 512 + SOUND_TAR[SECOND_HEADER + 512 :],
        SOUND_TAR[:SECOND_HEADER],
        SOUND_TAR[: SECOND_HEADER + 100],
        SOUND_TAR + tar_of("c.md"),
    ],
    ids=["damaged header", "cut at a header", "cut in a header", "two archives"],
)
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_tar_archive_that_ends_before_its_content_does_is_named(
    folder: Path, name: str, content: bytes
) -> None:
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (folder / name).write_bytes(packed)

    with pytest.raises(UserError, match=rf"{name} is damaged: its (archive|gzip) cannot be read"):
        texts_of(folder)


def test_a_member_of_a_tar_archive_is_read_when_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.tar").write_bytes(SOUND_TAR)
    read: list[str] = []
    extract = tarfile.TarFile.extractfile

    def noted(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes] | None:
        read.append(entry.name)
        return extract(archive, entry)

    monkeypatch.setattr(tarfile.TarFile, "extractfile", noted)
    monkeypatch.setattr("spark_jobs.read.files.archives.MOST_MEMBERS", 1)

    with pytest.raises(UserError, match=r"a.tar unpacks to more than.*maximum_expansion"):
        texts_of(folder)

    assert read == ["a.md"]


def test_an_archive_with_a_damaged_name_is_named(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("\u00e9\u00e9.md", "alpha")
    damaged = (folder / "a.zip").read_bytes().replace("\u00e9\u00e9".encode(), b"\xff\xfe\xff\xfe")
    (folder / "a.zip").write_bytes(damaged)
    with pytest.raises(UserError, match=r"a.zip is damaged: its archive .*Fetch the file again"):
        snapshot(files_source(folder), tmp_path / "raw")


@pytest.mark.fault(
    "raw_corpus", "damaged file: {name}", sees="the file", then="nothing of it is read"
)
@pytest.mark.parametrize(
    "name",
    [
        *("a.zip", "a.tar.gz", "a.docx", "a.pdf", "a.ipynb"),
        *("a.rtf", "a.odt", "a.pptx", "a.xlsx", "a.epub", "a.xml"),
    ],
)
def test_what_is_no_such_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"%PNG not what its name says")

    with pytest.raises(UserError, match=rf"{name} (cannot be read|is damaged)"):
        texts_of(folder)


def test_bad_files_among_many_are_set_aside_where_the_settings_say_so(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number:02d}.md").write_text(f"Document {number}.")
    (folder / "bad.zip").write_bytes(b"PK")
    (folder / "bad.parquet").write_bytes(b"PAR1")
    (folder / "table.csv").write_text("title\nwithout text\n")
    # Of documents, too, any number may be set aside then.
    (folder / "rows.jsonl").write_text('{"body": 1}\nno JSON\n')
    (folder / "koi8.txt").write_bytes("Клапан открывается.".encode("koi8_r"))

    rows, stats = snapshot(files_source(folder, on_bad_file="quarantine"), folder.parent / "raw")

    others = {"not_utf8": 1, "no_text": 1, "not_json": 1}
    assert len(rows) == 20 and stats["dropped"] == {"bad_file": 3} | others
    named = " ".join(stats["faults"])
    assert all(name in named for name in ("bad.zip", "bad.parquet", "table.csv"))


def test_nothing_of_a_file_is_kept_that_is_damaged_further_on(folder: Path) -> None:
    (folder / "a.md").write_text("Sound.")
    lines = [json.dumps({"text": f"{number} " * 40_000}) for number in range(200)]
    packed = gzip.compress("\n".join(lines).encode())
    (folder / "cut.jsonl.gz").write_bytes(packed[:-100])

    rows, stats = snapshot(files_source(folder, on_bad_file="quarantine"), folder.parent / "raw")

    assert [row["id"] for row in rows] == ["a.md"] and stats["dropped"] == {"bad_file": 1}
