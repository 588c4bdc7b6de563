"""The text of documents of office programs and of e-books."""

import codecs
import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from spark_jobs.read.files.markup import all_text, parse_xml
from spark_jobs.read.files.streams import decode

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
            # A heading is marked as Markdown marks it.
            heading = _HEADING.fullmatch((block.style and block.style.name) or "")
            blocks.append(f"{'#' * int(heading[1])} {block.text}" if heading else str(block.text))
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
        # A list, since each part leaves the wrapper as it is moved.
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

    # Of a formula its last result; without `data_only` it would be the formula itself.
    workbook = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    sheets = []
    for sheet in workbook.worksheets:
        # Programs that write row by row state a size before they know it.
        sheet.reset_dimensions()
        if lines := list(filter(None, map(line, sheet.iter_rows(values_only=True)))):
            sheets.append("\n".join([f"# {sheet.title}", *lines]))
    return "\n\n".join(sheets)


_SPACES = {"br": "\n", "line-break": "\n", "tab": "\t", "s": " "}
"""Elements that stand for a space between words, by their local names."""
_PARAGRAPHS = ("p", "h")
_PASSED_OVER = ("tracked-changes", "annotation", "note-citation", "ruby-text")
"""What an OpenDocument text holds that is not its text: what was deleted, comments, the numbers of
notes, and how a word is read."""


def odt_text(content: bytes) -> str:
    """An OpenDocument text's headings and paragraphs."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return "\n\n".join(_paragraphs(parse_xml(archive.read("content.xml"))))


def _paragraphs(document: Any) -> Iterator[str]:
    """The paragraphs of a document in XML, or of a part of it, that say anything."""
    # Listed before any is cleared: one may lie within another, and the walk would end there.
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


_NOTED = "{*}nvSpPr/{*}nvPr/{*}ph[@type='body']"
"""The mark of the shape that holds a speaker's notes."""


def pptx_text(content: bytes) -> str:
    """A presentation's text, slide by slide in the order in which they are shown, each with what
    its speaker noted."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return "\n\n".join(_Presentation(archive).paragraphs())


class _Presentation:
    """The members of a presentation's archive, and how they refer to each other."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        # Listed once: there may be very many, and whatever a slide refers to is looked up in them.
        self._members = set(archive.namelist())

    def paragraphs(self) -> Iterator[str]:
        whole = "ppt/presentation.xml"
        slides = {identifier: slide for identifier, _, slide in self._relations(whole)}
        for shown in parse_xml(self._archive.read(whole)).iterfind("{*}sldIdLst/{*}sldId"):
            # Its other attribute `id`, in no namespace, is a number.
            slide = next((slides.get(v) for key, v in shown.items() if key.endswith("}id")), None)
            if slide is None:
                continue
            yield from _paragraphs(parse_xml(self._archive.read(slide)))
            for _, kind, notes in self._relations(slide):
                if kind.endswith("/notesSlide"):
                    # The other shapes of the notes repeat the slide and its number.
                    for shape in parse_xml(self._archive.read(notes)).iter("{*}sp"):
                        if shape.find(_NOTED) is not None:
                            yield from _paragraphs(shape)

    def _relations(self, name: str) -> Iterator[tuple[str, str, str]]:
        """The members that a member refers to: the reference's id, its kind and the other one."""
        folder, base = posixpath.split(name)
        place = f"{folder}/_rels/{base}.rels"
        if place not in self._members:
            return
        for relation in parse_xml(self._archive.read(place)).iter("{*}Relationship"):
            target = posixpath.join("/", folder, relation.get("Target", ""))
            other = posixpath.normpath(target).lstrip("/")
            # The reference may be escaped where the member's name is not.
            other = other if other in self._members else unquote(other)
            if other in self._members:
                yield relation.get("Id", ""), relation.get("Type", ""), other


def epub_text(content: bytes) -> str:
    """A book's chapters, in their order."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        chapters = (decode(archive.read(name))[0] for name in _chapters(archive))
        return "\n\n".join(map(all_text, chapters))


def _chapters(archive: zipfile.ZipFile) -> list[str]:
    """The pages of a book's spine, by its package document."""
    container = parse_xml(archive.read("META-INF/container.xml"))
    package_path = next(container.iter("{*}rootfile")).get("full-path", "")
    package = parse_xml(archive.read(package_path))
    places = {item.get("id"): item.get("href", "") for item in package.iter("{*}item")}
    folder = posixpath.dirname(package_path)
    spine = (places.get(reference.get("idref"), "") for reference in package.iter("{*}itemref"))
    # References are escaped as in URLs, and names of members are not.
    return [posixpath.join(folder, unquote(place)) for place in spine if place]
