"""The text of mail, subtitles, XML and the documents of office programs."""

import codecs
import email
import html
import io
import posixpath
import re
import zipfile
from collections.abc import Container, Iterator
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import EmailMessage, MIMEPart
from email.policy import default
from itertools import groupby
from typing import Any
from urllib.parse import unquote

from artifacts.errors import first_line
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.rows import naming_encoding, one_document
from spark_jobs.read.files.streams import (
    BadFile,
    Content,
    OverlongLine,
    decode,
    decoded,
    lines_of,
    too_large,
)

_TIMING = re.compile(r"(?:^\d+\n)?^[-\d:., \t]*-->.*$", re.MULTILINE)
"""A line of times, and a number before it."""
_TIMES = re.compile(r"[-\d:., \t]*-->")
_VTT_ASIDE = re.compile(r"WEBVTT|(NOTE|STYLE|REGION)(\s|$)")
_TAG = re.compile(r"<[^>]*>")
_MEANT: dict[str, tuple[str, ...]] = {
    "ascii": (),
    "utf-8": ("utf-8-sig",),
    "iso8859-1": ("utf-8-sig", "cp1252"),
    "big5": ("cp950", "big5hkscs"),
    "cp1252": ("utf-8-sig", "cp1252"),
    "shift_jis": ("cp932",),
    "gb2312": ("gb18030",),
    "gbk": ("gb18030",),
    "euc_kr": ("cp949",),
    "iso2022_jp": ("iso2022_jp_ext",),
}
"""Maps an encoding that a message names to what programs write under its name: larger encodings,
and UTF-8, as which hardly any other text can be decoded."""
MOST_LOST = 0.02
"""Share of characters that may be lost: of a footer, a cut end, or a vendor's signs."""
_DUMP = re.compile(rb"<mediawiki[\s>]")
HEAD_BYTES = 4096
_NOTED = "{*}nvSpPr/{*}nvPr/{*}ph[@type='body']"
"""The mark of the shape that holds a speaker's notes."""
_SPACES = {"br": "\n", "line-break": "\n", "tab": "\t", "s": " "}
"""Elements that stand for a space between words, by their local names."""
_PARAGRAPHS = ("p", "h")
_PASSED_OVER = ("tracked-changes", "annotation", "note-citation", "ruby-text")
"""What an OpenDocument text holds that is not its text: what was deleted, comments, the numbers of
notes, and how a word is read."""
_HTML_BLOCKS = ["h1", "h2", "h3", "h4", "h5", "h6", "p", "li", "pre", "td", "th", "blockquote"]
_HTML_BLOCKS += ["br", "div", "tr", "table", "ul", "ol", "dl", "dt", "dd", "section", "article"]
_HTML_BLOCKS += ["header", "footer", "figure", "figcaption"]

_KEPT_BLANKS = {ord(" "): 0xFDD0, ord("\t"): 0xFDD1}
"""Blanks of preformatted text, mapped to characters that no text has."""


def read_mail(content: Content) -> Iterator[Document | Fault]:
    """A message's subject and text; of a mailbox (`.mbox`) each message is a document.

    Addresses and attachments are left out: of the headers a model learns the subject alone.
    """
    if content.file.format.ending != ".mbox":
        yield from one_document(content, _mail_text)
        return
    encodings: set[str] = set()
    for number, message in enumerate(_messages(content), start=1):
        where = f"message {number}"
        if isinstance(message, OverlongLine):
            yield too_large(content, where, message.length)
            continue
        try:
            text, encoding = _mail_text(message, content.source.encoding)
        except Exception as error:
            # As the extractors of whole files, the parser raises whatever it stumbles over.
            reason = f"cannot be read as mail ({first_line(error)})"
            yield Fault("bad_message", f"{content.file.shown}: {where} {reason}.")
        else:
            if encoding and encoding not in encodings:
                encodings.add(encoding)
                yield decoded(content, encoding)
            yield content.document(f"{content.file.name}:{number}", text, where)


def _messages(content: Content) -> Iterator[bytes | OverlongLine]:
    """The messages of a mailbox; each begins with a line `From ...` after an empty one."""
    with content.open() as stream:
        message: list[bytes] = []
        size, before = 0, b"\n"
        for line in lines_of(stream, b"\n", content.maximum_bytes):
            if isinstance(line, OverlongLine):
                size += line.length
                continue
            if line.startswith(b"From ") and not before.strip():
                if message:
                    yield b"".join(message) if size <= content.maximum_bytes else OverlongLine(size)
                message, size = [], 0
            else:
                size += len(line)
                # Nothing more is kept of a message that is too long.
                if size <= content.maximum_bytes:
                    message.append(line)
            before = line
        if message:
            yield b"".join(message) if size <= content.maximum_bytes else OverlongLine(size)


def _mail_text(content: bytes, declared: str | None) -> tuple[str, str | None]:
    """A message's subject and text, and the encoding of text that names none."""
    message = email.message_from_bytes(content, policy=default)
    assert isinstance(message, EmailMessage)
    texts = [_subject(message, declared), *_own_texts(message, declared)]
    text = "\n\n".join(filter(None, (text.strip() for text, _ in texts)))
    return text, next((encoding for _, encoding in texts if encoding), None)


def _subject(message: EmailMessage, declared: str | None) -> tuple[str, str | None]:
    """A message's subject, and the encoding of one that names none."""
    subject = str(message["subject"] or "")
    if "\ufffd" not in subject:
        return subject, None
    # Python has put that sign where the subject is not in the encoding that it names.
    header = next(value for name, value in message.raw_items() if name.lower() == "subject")
    texts, encoding = [], None
    try:
        for piece, charset in decode_header("".join(str(header).splitlines())):
            if charset is None and isinstance(piece, bytes):
                piece = piece.decode("raw-unicode-escape")
            encoded = (
                piece if isinstance(piece, bytes) else piece.encode("ascii", "surrogateescape")
            )
            text, other = _decode_as(encoded, charset or "us-ascii", declared)
            texts.append(text)
            encoding = encoding or other
    except (UnicodeError, HeaderParseError):
        # Cut within a character, or in no encoding that can be told: no reason to lose the text.
        return subject if subject.count("\ufffd") == 1 else "", None
    return "".join(texts), encoding


def _own_texts(part: MIMEPart, declared: str | None) -> Iterator[tuple[str, str | None]]:
    """What a message itself says, part by part in its order, and the encoding of text that names
    none; not what is attached or forwarded."""
    kind = part.get_content_type()
    if part.is_attachment():
        return
    if kind in ("text/plain", "text/html"):
        yield _part_text(part, declared)
        return
    if part.get_content_maintype() != "multipart":
        return
    parts = [child for child in part.iter_parts() if isinstance(child, MIMEPart)]
    if kind == "multipart/alternative":
        # The same text in several versions, the plain one first; it is often left empty.
        parts.sort(key=lambda child: child.get_content_type() != "text/plain")
        versions = (list(_own_texts(child, declared)) for child in parts)
        yield from next((v for v in versions if any(text.strip() for text, _ in v)), [])
        return
    # The second part is the signature.
    if kind == "multipart/signed":
        parts = parts[:1]
    elif kind == "multipart/related":
        # The root alone: the other parts, such as pictures, belong to it.
        start = part.get_param("start")
        parts = [child for child in parts if start and child["content-id"] == start][:1] or parts[
            :1
        ]
    for number, piece in enumerate(parts):
        # Text goes on after a picture in a part of its own; what has a name then is a file.
        if number == 0 or not piece.get_filename():
            yield from _own_texts(piece, declared)


def _part_text(part: MIMEPart, declared: str | None) -> tuple[str, str | None]:
    payload = part.get_payload(decode=True)
    content = payload if isinstance(payload, bytes) else b""
    text, encoding = _decode_as(content, part.get_content_charset("us-ascii"), declared)
    return _html_text(text) if part.get_content_subtype() == "html" else text, encoding


def _decode_as(content: bytes, charset: str, declared: str | None) -> tuple[str, str | None]:
    """Decode text that names its encoding; if that is unknown or wrong, it is decoded as text files
    are. If only a few bytes are not in the encoding, these are lost.

    Raises:
        UnicodeDecodeError: there is no telling.
    """
    encodings = _encodings(charset)
    failure: UnicodeDecodeError | None = None
    for encoding in encodings:
        try:
            return content.decode(encoding), None
        except UnicodeDecodeError as error:
            failure = failure or error
    # Text in an encoding of seven bits would pass for ASCII.
    if failure is None or not content.isascii():
        try:
            return decode(content, declared)
        except UnicodeDecodeError as error:
            failure = error
    for encoding in encodings:
        text = content.decode(encoding, "replace")
        if text.count("\ufffd") <= MOST_LOST * len(text):
            return text, None
    raise failure


def _encodings(charset: str) -> tuple[str, ...]:
    """What text that names an encoding is in, the first that fits."""
    try:
        name = codecs.lookup(charset).name
        "".encode(name)
    except (LookupError, UnicodeError):
        return ()
    return _MEANT.get(name, (name,))


def subtitles_text(content: bytes, declared: str | None) -> tuple[str, str | None]:
    """What is said, without numbers and times, and the encoding (`rows.Extract`); a line that goes
    on is written once."""
    text, encoding = decode(content, declared)
    is_vtt = text.startswith("WEBVTT")
    spoken: list[str] = []
    grouped = groupby(map(str.strip, text.splitlines()), key=bool)
    blocks = ["\n".join(block) for is_text, block in grouped if is_text]
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        before, *timed = _TIMING.split(block)
        if not timed and is_vtt and _VTT_ASIDE.match(before):
            continue
        # A number belongs to the times after it, even after a blank line, or at the end to none.
        if not timed and before.isdecimal() and (after is None or _TIMES.match(after)):
            continue
        # In a WebVTT file what is before the times is the name of what follows.
        shown = timed if timed and is_vtt else [before, *timed]
        for line in "\n".join(shown).splitlines():
            line = _TAG.sub("", line)
            line = (html.unescape(line) if is_vtt else line).strip()
            if line and spoken[-1:] != [line]:
                spoken.append(line)
    return "\n".join(spoken), encoding


def read_xml(content: Content) -> Iterator[Document | Fault]:
    """All text of a file as one document; of a wiki's dump each page is a document."""
    with content.open() as stream:
        is_dump = _DUMP.search(stream.read(HEAD_BYTES))
    if not is_dump:
        yield from one_document(content, naming_encoding(_xml_text))
        return
    from lxml import etree

    # Without entities, which may multiply or fetch other files.
    safe = {"resolve_entities": False, "no_network": True}
    try:
        with content.open() as stream:
            pages = etree.iterparse(stream, tag="{*}page", **safe)
            for number, (_, page) in enumerate(pages, start=1):
                yield _wiki_page(page, content, number)
                # Only one page of a dump, which may have gigabytes, is held at a time.
                page.clear()
                while page.getprevious() is not None:
                    del page.getparent()[0]
    except etree.XMLSyntaxError as error:
        raise BadFile(
            f"{content.file.shown} is not readable XML ({first_line(error)}). Fetch the file again."
        ) from error


def _wiki_page(page: Any, content: Content, number: int | str) -> Document | Fault:
    """A page's title and the newest of its texts, in the wiki's markup."""
    title = page.findtext("{*}title") or ""
    texts = [text.text or "" for text in page.iterfind("{*}revision/{*}text")]
    # A page that only leads to another one has no text of its own.
    text = texts[-1].strip() if texts and page.find("{*}redirect") is None else ""
    number = page.findtext("{*}id") or number
    where = f"page {number}"
    if len(text) > content.maximum_bytes:
        return too_large(content, where, len(text))
    text = f"{title}\n\n{text}" if text else ""
    return content.document(f"{content.file.name}:{number}", text, where)


def _xml_text(content: bytes) -> str:
    """All text between the tags, a line for each element that has some."""
    return "\n".join(filter(None, (" ".join(t.split()) for t in _parse(content).itertext())))


_RTF_ERRORS = "llm-assets.rtf"
_RTF_MAC = re.compile(r"^\s*\{\\rtf\d*(\\[a-z]+-?\d*\s?)*?\\mac(?![a-z])")
_RTF_DELETED = re.compile(r"(?<!\\)((?:\\\\)*)\{(?:\\[a-z]+-?\d*\s?)*\\deleted(?![a-z0])")
"""The beginning of a group that was deleted while changes were tracked."""
_RTF_NOTE = re.compile(r"(?<!\\)((?:\\\\)*)\{(?:\\\*)?\\footnote(?![a-z])")
_RTF_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def rtf_text(content: bytes) -> str:
    """A rich text file's text, by striprtf."""
    from striprtf.striprtf import remove_pict_groups, rtf_to_text

    if not content.lstrip().startswith(b"{\\rtf"):
        raise ValueError("it does not begin with {\\rtf")
    # Its markup is ASCII; all other letters are escaped, in the encoding that it names.
    # Pictures go first, since anything in them may look like a brace.
    text = remove_pict_groups(content.decode("latin-1")).replace(r"\ansicpg10000", r"\mac")
    encoding = "mac_roman" if _RTF_MAC.search(text) else "cp1252"
    codecs.register_error(_RTF_ERRORS, _replace_undefined)
    text, _ = _cut_groups(text, _RTF_DELETED)
    # striprtf passes over footnotes, so they become paragraphs at the end.
    text, notes = _cut_groups(text, _RTF_NOTE)
    end = _group_end(text, text.find("{"))
    # One that is cut off has no brace at its end.
    end -= text[end - 1 : end] == "}"
    paragraphs = [rf"\par {{{note}" for note in notes]
    text = "".join([text[:end], *paragraphs, text[end:]])
    return str(rtf_to_text(text, encoding, errors=_RTF_ERRORS))


def _replace_undefined(error: UnicodeError) -> tuple[str, int]:
    """Replace a byte that is undefined in an encoding of single bytes; in others, more than that
    byte would be wrong."""
    if isinstance(error, UnicodeDecodeError) and error.encoding == "charmap":
        return "\ufffd", error.start + 1
    raise error


def _cut_groups(text: str, beginning: re.Pattern[str]) -> tuple[str, list[str]]:
    """A rich text without the groups that begin so, and of each what comes after that beginning."""
    kept, cut, place = [], [], 0
    while group := beginning.search(text, place):
        kept.append(text[place : group.end(1)])
        place = _group_end(text, group.end(1))
        cut.append(text[group.end() : place])
    return "".join([*kept, text[place:]]), cut


def _group_end(text: str, start: int) -> int:
    """Where a group of a rich text ends that begins there."""
    depth = 0
    for brace in _RTF_BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    return len(text)


_FILLED = ".//w:sdt[not(w:sdtPr/w:showingPlcHdr)]"
_DOCX_WRAPPERS = f".//w:ins | .//w:moveTo | .//w:smartTag | {_FILLED} | {_FILLED}/w:sdtContent"
_DOCX_WRAPPERS += " | .//w:fldSimple | .//w:bdo | .//w:dir | .//w:customXml | .//m:oMathPara"
"""What python-docx passes over with all text in it: text that was inserted or moved while changes
were tracked, smart tags, content controls, of which an empty one shows a prompt, and fields, such
as the number of a table."""
_FORMULA_TEXTS = ".//m:t[not(ancestor::w:del or ancestor::w:moveFrom)]"
_HEADING = re.compile(r"Heading (\d+)")
_NOTES = "./*[not(@w:type)]//w:p"
"""Paragraphs of notes; what has a type is the line between text and notes."""
_TEXT_BOXES = ".//w:txbxContent[not(ancestor::*[local-name()='Fallback'])]//w:p"
"""Paragraphs in text boxes, which are written a second time for old programs."""


def docx_text(content: bytes) -> str:
    """A Word file's paragraphs and tables, in their order, tracked changes taken as accepted."""
    import docx
    from docx.oxml import parse_xml

    document = docx.Document(io.BytesIO(content))
    _unwrap(document.element.body)
    blocks = []
    for block in document.iter_inner_content():
        if isinstance(block, docx.table.Table):
            blocks.append(_word_table(block._tbl))
        else:
            blocks.append(_word_paragraph(block))
        blocks += [paragraph.text for paragraph in _find(block._element, _TEXT_BOXES)]
    for related in document.part.rels.values():
        if related.reltype.endswith(("/footnotes", "/endnotes")):
            notes = parse_xml(related.target_part.blob)
            _unwrap(notes)
            blocks += [paragraph.text for paragraph in _find(notes, _NOTES)]
    return "\n\n".join(block for block in blocks if block.strip())


def _unwrap(element: Any) -> None:
    """Put what lies in wrappers in their place, and the text of formulas and of words whose reading
    stands above them, which python-docx passes over, too."""
    from docx.oxml import OxmlElement

    for wrapper in _find(element, _DOCX_WRAPPERS):
        for part in list(wrapper):
            wrapper.addprevious(part)
        wrapper.getparent().remove(wrapper)
    for word in _find(element, ".//w:ruby"):
        _replace(word, _find(word, "./w:rubyBase//w:t"), OxmlElement("w:t"))
    for formula in _find(element, ".//m:oMath"):
        run, text = OxmlElement("w:r"), OxmlElement("w:t")
        _replace(formula, _find(formula, _FORMULA_TEXTS), text)
        text.addprevious(run)
        run.append(text)


def _replace(element: Any, texts: list[Any], text: Any) -> None:
    """Put one text that says what several do in an element's place."""
    text.text = "".join(run.text or "" for run in texts)
    element.getparent().replace(element, text)


def _find(element: Any, path: str) -> list[Any]:
    from docx.oxml.ns import nsmap
    from lxml import etree

    # Of elements that python-docx has a class for, and of others.
    return list(etree.XPath(path, namespaces=nsmap)(element))


def _word_table(table: Any) -> str:
    """A line for each row; merged cells are one, and a table within a cell is part of its text."""
    from docx.oxml.table import CT_Tbl

    def cell_text(cell: Any) -> str:
        parts = cell.inner_content_elements
        texts = (_word_table(block) if isinstance(block, CT_Tbl) else block.text for block in parts)
        return "\n".join(texts).strip()

    return "\n".join(" | ".join(map(cell_text, row.tc_lst)) for row in table.tr_lst)


def _word_paragraph(block: Any) -> str:
    """A paragraph's text; a heading is marked as Markdown marks it."""
    style = block.style.name if block.style is not None else ""
    heading = _HEADING.fullmatch(style or "")
    return f"{'#' * int(heading[1])} {block.text}" if heading else str(block.text)


def odt_text(content: bytes) -> str:
    """An OpenDocument text's headings and paragraphs."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return "\n\n".join(_paragraphs(_parse(archive.read("content.xml"))))


def pptx_text(content: bytes) -> str:
    """A presentation's text, slide by slide in the order in which they are shown, each with what
    its speaker noted."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return "\n\n".join(_slides_text(archive))


def _slides_text(archive: zipfile.ZipFile) -> Iterator[str]:
    whole = "ppt/presentation.xml"
    members = set(archive.namelist())
    places = {identifier: place for identifier, _, place in _relations(archive, members, whole)}
    for slide in _parse(archive.read(whole)).iterfind("{*}sldIdLst/{*}sldId"):
        # Its other attribute `id`, in no namespace, is a number.
        place = next((places.get(v, "") for key, v in slide.items() if key.endswith("}id")), "")
        if place not in members:
            continue
        yield from _paragraphs(_parse(archive.read(place)))
        for _, kind, beside in _relations(archive, members, place):
            if kind.endswith("/notesSlide") and beside in members:
                # The other shapes of the notes repeat the slide and its number.
                for shape in _parse(archive.read(beside)).iter("{*}sp"):
                    if shape.find(_NOTED) is not None:
                        yield from _paragraphs(shape)


def _relations(
    archive: zipfile.ZipFile, members: Container[str], name: str
) -> list[tuple[str, str, str]]:
    """What a member refers to: the reference's id, its kind and the other member.

    Args:
        there: the names of the archive's members, of which there may be very many.
    """
    folder, base = posixpath.split(name)
    place = f"{folder}/_rels/{base}.rels"
    if place not in members:
        return []
    return [
        (
            relation.get("Id", ""),
            relation.get("Type", ""),
            _member_at(members, folder, relation.get("Target", "")),
        )
        for relation in _parse(archive.read(place)).iter("{*}Relationship")
    ]


def _member_at(members: Container[str], folder: str, target: str) -> str:
    """The member that a target leads to; in the archive its name may be escaped as there."""
    name = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
    return name if name in members else unquote(name)


def epub_text(content: bytes) -> str:
    """A book's chapters, in their order."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        chapters = (decode(archive.read(name))[0] for name in _chapters(archive))
        return "\n\n".join(map(_html_text, chapters))


def _chapters(archive: zipfile.ZipFile) -> list[str]:
    """The pages of a book's spine, by its package document."""
    container = _parse(archive.read("META-INF/container.xml"))
    package_path = next(container.iter("{*}rootfile")).get("full-path", "")
    package = _parse(archive.read(package_path))
    places = {item.get("id"): item.get("href", "") for item in package.iter("{*}item")}
    folder = posixpath.dirname(package_path)
    spine = (places.get(reference.get("idref"), "") for reference in package.iter("{*}itemref"))
    return [posixpath.join(folder, unquote(place)) for place in spine if place]


_XLSX_ENDS = re.compile("_x000[dD]_")


def xlsx_text(content: bytes) -> str:
    """A workbook's cells, a line for each row, by openpyxl; sheets begin with their names."""
    import openpyxl

    def line(row: tuple[Any, ...]) -> str:
        # Some programs escape line ends in this way, which openpyxl does not undo.
        cells = ["" if cell is None else _XLSX_ENDS.sub("", str(cell)) for cell in row]
        # Empty ones between others stay, so that each value is where its column's name is.
        last = max((number for number, cell in enumerate(cells, start=1) if cell), default=0)
        return " | ".join(cells[:last])

    workbook = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    sheets = []
    for sheet in workbook.worksheets:
        # Programs that write row by row state a size before they know it.
        sheet.reset_dimensions()
        if lines := list(filter(None, map(line, sheet.iter_rows(values_only=True)))):
            sheets.append("\n".join([f"# {sheet.title}", *lines]))
    return "\n\n".join(sheets)


def _paragraphs(document: Any) -> Iterator[str]:
    """The paragraphs of a document in XML, or of a part of it, that say anything."""
    for element in list(document.iter(*(f"{{*}}{tag}" for tag in _PASSED_OVER))):
        element.clear(keep_tail=True)
    for element in document.iter(*(f"{{*}}{tag}" for tag in _PARAGRAPHS)):
        if text := "".join(_pieces(element)).strip():
            yield text


def _pieces(element: Any) -> Iterator[str]:
    """The text of a paragraph or of a part of it; not of the paragraphs within, as in a text box or
    a footnote."""
    yield element.text or ""
    for part in element:
        name = str(part.tag).rpartition("}")[2]
        if name not in _PARAGRAPHS:
            yield _SPACES.get(name, "")
            yield from _pieces(part)
        yield part.tail or ""


_TITLE, _TITLE_END = re.compile("<title[^>]*>", re.IGNORECASE), re.compile("</title", re.IGNORECASE)


def _html_text(markup: str) -> str:
    """All text of a page that is a document as a whole, block by block."""
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    # The page is encoded as UTF-8 here, whatever it says of its encoding.
    parser = HTMLParser(encoding="utf-8")
    if not _TITLE_END.search(markup):
        # A title that is not closed would take in the whole page.
        markup = _TITLE.sub("", markup)
    try:
        page = document_fromstring(markup.encode(), parser=parser)
    except etree.ParserError:  # It is blank, or a comment alone.
        return ""
    for aside in page.xpath("//head | //script | //style"):
        aside.drop_tree()
    for block in page.iter("pre"):
        for element in block.iter():
            element.text = (element.text or "").translate(_KEPT_BLANKS)
            if element is not block:
                element.tail = (element.tail or "").translate(_KEPT_BLANKS)
    for block in page.iter(*_HTML_BLOCKS):
        block.text = "\n" + (block.text or "")
        block.tail = "\n" + (block.tail or "")
    lines = (" ".join(line.split()) for line in page.text_content().splitlines())
    blanks = {kept: blank for blank, kept in _KEPT_BLANKS.items()}
    return "\n".join(filter(None, (line.translate(blanks).rstrip() for line in lines)))


def _parse(found: bytes) -> Any:
    """The root of an XML document, without what it might fetch or multiply."""
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True)
    return etree.fromstring(found, parser)
