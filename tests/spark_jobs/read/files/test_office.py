"""Mail, subtitles, XML and office documents become text, or are named."""

import bz2
import mailbox
import zipfile
from email.message import EmailMessage, Message
from email.mime.image import MIMEImage
from email.mime.message import MIMEMessage
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from pathlib import Path

import openpyxl
import pytest

from artifacts.errors import UserError
from tests.folders import presentation_members, write_pptx, write_zip
from tests.spark_jobs.read.files.test_formats import texts_of
from tests.spark_jobs.read.test_snapshot import files_source, snapshot


def message(subject: str, text: str, html: str | None = None) -> EmailMessage:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = subject, "ann@example.org", "bob@example.org"
    if html is None:
        mail.set_content(text)
    else:
        mail.set_content(html, subtype="html")
    mail.add_attachment(b"\x00secret", maintype="application", subtype="zip", filename="a.zip")
    return mail


def read_mail(folder: Path, content: bytes) -> tuple[str, dict[str, int]]:
    """The text of a message, and the encodings that it was decoded from."""
    (folder / "a.eml").write_bytes(content)
    (row,), stats = snapshot(files_source(folder), folder.parent / "raw")
    return row["text"], stats["decoded"]


def test_a_message_is_its_subject_and_text_without_addresses(folder: Path) -> None:
    (folder / "a.eml").write_bytes(bytes(message("Pump 7", "It leaks at the größte valve.")))
    (folder / "b.eml").write_bytes(bytes(message("Web", "", "<p>It <b>öffnet</b>.</p><p>So.</p>")))

    found = texts_of(folder)

    assert found == {
        "a.eml": "Pump 7\n\nIt leaks at the größte valve.",
        "b.eml": "Web\n\nIt öffnet.\nSo.",
    }


def test_each_message_of_a_mailbox_is_a_document(folder: Path) -> None:
    box = mailbox.mbox(folder / "team.mbox")
    for number in range(3):
        box.add(message(f"Ticket {number}", f"Line one of {number}.\nFrom here on it leaks."))
    box.close()

    found = texts_of(folder)

    assert list(found) == [f"team.mbox:{number}" for number in (1, 2, 3)]
    assert found["team.mbox:2"] == "Ticket 1\n\nLine one of 1.\n>From here on it leaks."


def test_messages_that_are_too_long_or_cannot_be_read_are_set_aside_alone(folder: Path) -> None:
    head = b"Subject: Pump\n\n"
    messages = [
        head + b"word " * 4_000,
        head + "Клапан открывается.".encode("koi8_r"),
        head + b"It leaks.",
        # In a single line, at the end.
        b"word" * 4_000,
    ]
    (folder / "a.mbox").write_bytes(b"".join(b"From a\n" + one + b"\n\n" for one in messages))
    source = files_source(folder, maximum_document_megabytes=0.01, maximum_faulty_share=0.8)

    rows, stats = snapshot(source, folder.parent / "raw")

    assert [(row["id"], row["text"]) for row in rows] == [("a.mbox:3", "Pump\n\nIt leaks.")]
    assert stats["dropped"] == {"too_large": 2, "bad_message": 1}


def test_xml_is_its_text_and_fetches_nothing(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "a.xml").write_text(
        f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{folder.parent}/secret">]>'
        "<a><title>Pump</title><!-- no --><p>It   opens &x; weekly.</p></a>"
    )

    assert texts_of(folder) == {"a.xml": "Pump\nIt opens\n&x;\nweekly."}


WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo>x</siteinfo>
<page><title>Pump</title><id>7</id><revision><text>It closes.</text></revision>
<revision><text>It opens &amp; closes.</text></revision></page>
<page><title>Pumps</title><id>8</id><redirect title="Pump"/><revision><text>x</text></revision>
</page>
<page><title>Lamp</title><id>9</id><revision><text>It is red.</text></revision></page>
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_each_page_of_a_wiki_is_a_document(folder: Path, encoding: str) -> None:
    (folder / "wiki.xml.bz2").write_bytes(bz2.compress(f"{WIKI}</mediawiki>".encode(encoding)))

    assert texts_of(folder) == {
        "wiki.xml.bz2:7": "Pump\n\nIt opens & closes.",
        "wiki.xml.bz2:9": "Lamp\n\nIt is red.",
    }


def test_text_between_two_tags_is_read_whole_whatever_its_length(folder: Path) -> None:
    """By default libxml2 refuses XML beyond 10 MB, and leaves out what follows in a page."""
    long = "valve " * 1_700_000
    (folder / "a.xml").write_text(f"<a><b>{long}</b><c>The end.</c></a>")
    (folder / "b.xml").write_text(f"{WIKI.replace('It closes.', long)}</mediawiki>")
    (folder / "c.html").write_text(f"<html><body><p>{long}</p><p>The end.</p></body></html>")
    message = "Subject: Log\nContent-Type: text/html\n\n<pre>{}</pre><p>The end.</p>"
    (folder / "d.eml").write_text(message.format(long))

    (folder / "e.html").write_text(f"<!-- {long} -->")

    texts = texts_of(folder)

    assert "e.html" not in texts
    assert all(texts[name].endswith("The end.") for name in ("a.xml", "c.html", "d.eml"))
    assert texts["b.xml:9"] == "Lamp\n\nIt is red."


def test_a_wiki_that_was_cut_off_is_named(folder: Path) -> None:
    (folder / "wiki.xml").write_text(WIKI)

    with pytest.raises(UserError, match=r"wiki.xml is not readable XML \(Premature end"):
        texts_of(folder)


def test_the_members_of_a_presentation_are_listed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive may have very many, and whatever a slide refers to is looked for among them."""
    write_pptx(folder / "a.pptx", [f"Pump {number}" for number in range(20)])
    lists: list[list[str]] = []
    namelist = zipfile.ZipFile.namelist

    def noted(archive: zipfile.ZipFile) -> list[str]:
        lists.append(namelist(archive))
        return lists[-1]

    monkeypatch.setattr(zipfile.ZipFile, "namelist", noted)
    assert texts_of(folder)["a.pptx"].endswith("Pump 19")
    assert len(lists) == 1


def test_office_documents_give_their_text(folder: Path) -> None:
    (folder / "a.rtf").write_text(r"{\rtf1\ansi\ansicpg1252 The gr\'f6\'dfte valve\par opens.}")
    text = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    write_zip(
        folder / "b.odt",
        {
            "content.xml": f'<d xmlns:t="{text}"><t:h>Pump</t:h>'
            "<t:p>It <t:span>opens</t:span>.<t:line-break/>By:<t:tab/>Ann<t:s/>Lee"
            "<box><t:p>Noted.</t:p></box>.</t:p><t:p/></d>"
        },
    )
    drawing = "http://schemas.openxmlformats.org/drawingml/2006/main"
    runs = "<a:r><a:t>Slide </a:t></a:r><a:t>{}</a:t><a:br/><a:r><a:t>Pumps</a:t></a:r>"
    slide = f'<s xmlns:a="{drawing}"><a:p>{runs}</a:p></s>'
    slides = {f"ppt/slides/slide{number}.xml": slide.format(number) for number in (2, 10, 3)}
    notes = (
        '<n><sp><nvSpPr><nvPr><ph type="sldNum"/></nvPr></nvSpPr><p>1</p></sp>'
        '<sp><nvSpPr><nvPr><ph type="body"/></nvPr></nvSpPr><p>Say why.</p></sp></n>'
    )
    beside = '<Relationships><Relationship Id="a" Type="t/notesSlide" Target="{}"/></Relationships>'
    members = {
        "ppt/slides/_rels/slide10.xml.rels": beside.format("../notesSlides/notesSlide1.xml"),
        "ppt/notesSlides/notesSlide1.xml": notes,
    }
    shown = ["ppt/slides/slide10.xml", "ppt/slides/slide2.xml"]
    write_zip(folder / "c.pptx", slides | members | presentation_members(shown))
    workbook = openpyxl.Workbook()
    workbook.active.title = "Parts"
    workbook.active.append(["part", "number", "size", "place", "note"])
    workbook.active.append(["ring_x000D_", 7, None, "inner", None])
    workbook.save(folder / "d.xlsx")

    assert texts_of(folder) == {
        "a.rtf": "The größte valve\nopens.",
        "b.odt": "Pump\n\nIt opens.\nBy:\tAnn Lee.\n\nNoted.",
        "c.pptx": "Slide 10\nPumps\n\nSay why.\n\nSlide 2\nPumps",
        "d.xlsx": "# Parts\npart | number | size | place | note\nring | 7 |  | inner",
    }


def test_a_book_is_its_chapters_in_their_order(folder: Path) -> None:
    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
        '<item id="b" href="two.xhtml"/><item id="a" href="one%20.xhtml"/></manifest>'
        '<spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
    )
    write_zip(
        folder / "book.epub",
        {
            "META-INF/container.xml": '<c xmlns="urn:c"><rootfile full-path="in/book.opf"/></c>',
            "in/book.opf": opf,
            "in/one .xhtml": "<html><head><title>Pumps</title></head><body><h1>One</h1>"
            "<p>It öffnet.<br/>So.</p></body></html>",
            "in/two.xhtml": "<html><body><script>no()</script><p>It closes.</p></body></html>",
        },
    )

    assert texts_of(folder) == {"book.epub": "One\nIt öffnet.\nSo.\n\nIt closes."}


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ('<div dir="ltr">Hello Ann,<div>the pump leaks.</div>Bob</div>', 3),
        ("<ul><li>Valves<ul><li>ball</li><li>gate</li></ul></li></ul>", 3),
        ("<dl><dt>Warranty</dt><dd>seven years</dd><dt>Origin</dt><dd>Riga</dd></dl>", 4),
        ("<table><tr><th>Part</th><th>Price</th></tr></table>", 2),
        ("<section>One.</section><section>Two.</section>", 2),
    ],
)
def test_each_block_of_a_page_is_a_line(folder: Path, body: str, lines: int) -> None:
    (folder / "a.eml").write_bytes(bytes(message("Web", "", body)))

    subject, *found = filter(None, texts_of(folder)["a.eml"].splitlines())

    assert subject == "Web" and len(found) == lines


def test_a_workbook_that_states_a_wrong_size_is_read_whole(folder: Path) -> None:
    workbook = openpyxl.Workbook()
    for number in range(50):
        workbook.active.append([f"part {number}", number])
    workbook.save(folder / "whole.xlsx")
    with zipfile.ZipFile(folder / "whole.xlsx") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    assert b'ref="A1:B50"' in members[sheet]
    members[sheet] = members[sheet].replace(b'ref="A1:B50"', b'ref="A1"')
    with zipfile.ZipFile(folder / "stated.xlsx", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)

    found = texts_of(folder)

    assert found["stated.xlsx"] == found["whole.xlsx"]
    assert found["stated.xlsx"].endswith("part 49 | 49")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            "<text:tracked-changes><text:deletion><text:p>The warranty is two years.</text:p>"
            "</text:deletion></text:tracked-changes><text:p>Price<office:annotation><text:p>Ask "
            "legal!</text:p></office:annotation> 5 EUR.</text:p>",
            "Price 5 EUR.",
        ),
        (
            "<text:p>It costs 100<text:note><text:note-citation>1</text:note-citation>"
            "<text:note-body><text:p>Without taxes.</text:p></text:note-body></text:note> EUR in "
            "<text:ruby><text:ruby-base>東京</text:ruby-base><text:ruby-text>とうきょう"
            "</text:ruby-text></text:ruby>.</text:p>",
            "It costs 100 EUR in 東京.\n\nWithout taxes.",
        ),
    ],
    ids=["deletions and comments", "numbers of notes and readings"],
)
def test_an_open_document_gives_its_text_alone(folder: Path, content: str, text: str) -> None:
    whole = f'<d xmlns:text="urn:t" xmlns:office="urn:o">{content}</d>'
    write_zip(folder / "a.odt", {"content.xml": whole})

    assert texts_of(folder) == {"a.odt": text}


def part_of(kind: str, *parts: Message | str) -> MIMEMultipart:
    """A multipart of that kind; text that begins with a tag is HTML."""
    whole = MIMEMultipart(kind)
    for one in parts:
        html = isinstance(one, str) and one.startswith("<")
        whole.attach(MIMEText(one, "html" if html else "plain") if isinstance(one, str) else one)
    return whole


NAMED = MIMEText("A file.")
NAMED.add_header("Content-Disposition", "inline", filename="log.txt")


@pytest.mark.parametrize(
    ("kind", "parts", "text"),
    [
        ("mixed", ["One.", MIMEImage(b"x", "png"), "Two.", NAMED], "One.\n\nTwo."),
        ("mixed", ["<p>It leaks.</p>", "A list's footer."], "It leaks.\n\nA list's footer."),
        ("mixed", [MIMEImage(b"x", "png"), "It leaks."], "It leaks."),
        (
            "signed",
            [part_of("mixed", "One.", MIMEImage(b"x", "png"), "Two."), MIMEText("signature")],
            "One.\n\nTwo.",
        ),
        ("alternative", [" \n", "<p>It leaks.</p>"], "It leaks."),
        ("alternative", ["<p>It leaks.</p>", "It leaks!"], "It leaks!"),
        ("mixed", [part_of("alternative", "One.", "<p>One.</p>"), "Two."], "One.\n\nTwo."),
        ("related", ["<p>It leaks.</p>", "A frame."], "It leaks."),
        ("mixed", [MIMEMessage(part_of("mixed", "Forwarded.")), "It leaks."], "It leaks."),
        ("mixed", ["<!-- nothing -->", "It leaks."], "It leaks."),
    ],
)
def test_a_message_is_all_its_own_text_once(
    folder: Path, kind: str, parts: list[Message | str], text: str
) -> None:
    (folder / "a.eml").write_bytes(b"Subject: Pump\n" + bytes(part_of(kind, *parts)))

    assert texts_of(folder) == {"a.eml": f"Pump\n\n{text}"}


WESTERN = {"windows-1252": 1}


@pytest.mark.parametrize(
    ("charset", "encoding", "text", "decoded"),
    [
        # Which none names, or nobody knows, it is decoded as text files are.
        *((name, "utf-8", "Das Gerät läuft.", {}) for name in ("", "unknown-8bit", "iso-8859-8-i")),
        ("", "cp1252", "Das Gerät läuft, sagt er.", WESTERN),
        ("iso-8859-2", "iso8859_2", "Zażółć", {}),
        ("shift_jis", "cp932", "①ポンプは毎週開きます。", {}),
        ("gb2312", "gbk", "鎔水泵每周打开。", {}),
        ("ks_c_5601-1987", "cp949", "펌프는 똠 열립니다.", {}),
        ("iso-2022-jp", "iso2022_jp_ext", "ﾎﾟﾝﾌﾟは毎週", {}),
        ("iso-8859-1", "utf-8", "Das Gerät läuft.", {}),
        ("iso-8859-1", "cp1252", "Das Gerät läuft, für 5 €.", {}),
        ("utf-8", "cp1252", "Das Gerät läuft.", WESTERN),
    ],
)
def test_mail_is_in_the_encoding_that_is_meant_by_its_name(
    folder: Path, charset: str, encoding: str, text: str, decoded: dict[str, int]
) -> None:
    named = charset and f"Content-Type: text/plain; charset={charset}\n"
    content = f"Subject: Pump\n{named}\n".encode() + text.encode(encoding)
    assert read_mail(folder, content) == (f"Pump\n\n{text}", decoded)


@pytest.mark.parametrize(
    ("subject", "text", "decoded"),
    [
        (b"=?gb2312?B?6Gc=?= =?gb2312?B?y64=?=", "鑗水", {}),
        (b"=?utf-8?Q?L=E4uft?=\n es", "Läuft es", WESTERN),
        ("Das Gerät läuft".encode("cp1252"), "Das Gerät läuft", WESTERN),
    ],
)
def test_a_subject_is_decoded_as_a_text_is(
    folder: Path, subject: bytes, text: str, decoded: dict[str, int]
) -> None:
    content = b"Subject: " + subject + b"\n\nIt leaks.\n"
    assert read_mail(folder, content) == (f"{text}\n\nIt leaks.", decoded)


@pytest.mark.parametrize(
    ("charset", "content"),
    [
        ("utf-8", "Клапан открывается.".encode("koi8_r")),
        ("iso-2022-jp", b"\x1b$B\x7d\x7d\x1b(B"),
    ],
)
def test_mail_that_is_not_in_its_encoding_is_set_aside(
    folder: Path, tmp_path: Path, charset: str, content: bytes
) -> None:
    head = f"Subject: Pump\nContent-Type: text/plain; charset={charset}\n\n".encode()
    (folder / "a.eml").write_bytes(head + content)
    (folder / "b.txt").write_text("It leaks.")

    rows, stats = snapshot(files_source(folder, maximum_faulty_share=0.6), tmp_path / "raw")

    assert [row["id"] for row in rows] == ["b.txt"] and stats["dropped"] == {"not_utf8": 1}


SUBTITLES = """1
00:00:01,000 --> 00:00:02,000
1984

2
00:00:02,000 --> 00:00:03,000
NOTE FOR ALL: STOP.
3
00:00:03,000 --> 00:00:04,000
x --> y &amp; z

It goes on.
"""
WEB_SUBTITLES = """WEBVTT - of the pump
Kind: captions

NOTE
Made by Ann.

STYLE
::cue { color: red }

intro
00:01.000 --> 00:02.000 align:start
NOTE FOR ALL: STOP.

NOTED
00:02.000 --> 00:03.000
<v Bob>R&amp;D &lt;now&gt;
"""


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Subject: =?UTF-8?Q?=D0=9F=D1=80=D0?=", b"cut subject"),
        (b"Subject: \xcf\xf0\xe8\xe2\xe5\xf2", b"raw subject"),
        (b"Subject: =?utf-8?B?w6TDp8Ow4?= \xe9", b"broken subject"),
        (b"Content-Type: text/plain; charset=undefined", b"no such encoding"),
        (b"Content-Type: text/plain; charset=utf-8", "G\u00f6\u00dfe ".encode() * 30 + b"\xe9 end"),
        (
            b"Content-Type: text/plain; charset=iso-8859-1",
            b"one odd byte \x81 among many others that are sound, and they go on up to here",
        ),
    ],
)
def test_a_message_is_read_though_its_subject_or_a_byte_is_not(
    folder: Path, head: bytes, body: bytes
) -> None:
    written = head + b"\nContent-Transfer-Encoding: 8bit\n\n" + body
    (folder / "a.eml").write_bytes(written)
    assert texts_of(folder)["a.eml"].endswith(body.strip()[-4:].decode())


@pytest.mark.parametrize(
    ("name", "written", "said"),
    [
        ("a.srt", SUBTITLES, "1984\nNOTE FOR ALL: STOP.\nx --> y &amp; z\nIt goes on."),
        ("a.vtt", WEB_SUBTITLES, "NOTE FOR ALL: STOP.\nR&D <now>"),
        (
            "a.srt",
            "1\n00:00:01,000 --> 00:00:02,000\n<i>The valve</i>\nopens.\n\n"
            "2\n00:00:02,000 --> 00:00:03,000\nopens.\nIt closes.\n",
            "The valve\nopens.\nIt closes.",
        ),
        ("a.srt", "1\n\n00:00:01,000 --> 00:00:02,000\nHello\n\n2\n", "Hello"),
        (
            "a.srt",
            "1\n00:00:01,000 --> 00:00:02,000\nOne\n\ntwo\n2\n00:00:03,000 --> 00:00:04,000\nx",
            "One\ntwo\nx",
        ),
        ("a.srt", "1\n-00:00:01,000 --> 00:00:02,000\nHello\n", "Hello"),
        (
            "a.srt",
            "1\n00:00:01,000 --> 00:00:02,000\nIn\n\n2024\n\n2\n00:00:03,000 --> 00:00:04,000\nx",
            "In\n2024\nx",
        ),
        ("a.rtf", r"{\rtf1\ansi It {\rtlch\af0 \deleted\revauthdel1 never }opens.}", "It opens."),
        (
            "a.rtf",
            r"{\rtf1\ansi It costs 9{\super{\*\footnote\pard\chftn In {\b euros}.}} now.\par }",
            "It costs 9 now.\n\nIn euros.",
        ),
        (
            "a.rtf",
            r"{\rtf1 A{\deleted gone{\footnote secret}} C:\\{\deleted gone} D{\footnote note} E}",
            "A C:\\ D E\n note",
        ),
        ("a.rtf", r"{\rtf1\mac Gr\'9a\'a7e}", "Größe"),
        ("a.rtf", r"{\rtf1\mac\ansicpg10000 Gr\'9a\'a7e}", "Größe"),
        ("a.rtf", r"{\rtf1\ansi Gr\'f6\'81e opens.}", "Grö\ufffde opens."),
        (
            "a.eml",
            "Content-Type: text/html\n\n"
            "<pre>if leaks:\n    <b>stop</b>(\n\tpump)</pre><p> It   stops.</p>",
            "if leaks:\n    stop(\n\tpump)\nIt stops.",
        ),
    ],
)
def test_a_file_is_all_that_its_program_shows(
    folder: Path, name: str, written: str, said: str
) -> None:
    (folder / name).write_text(written)

    assert texts_of(folder)[name] == said
