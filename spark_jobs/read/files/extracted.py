"""The text of documents that are more than text: HTML, PDF, Word files, notebooks."""

import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from artifacts.errors import first_line
from spark_jobs.read.faults import Fault
from spark_jobs.read.files.content import Content, not_utf8, too_large
from spark_jobs.read.files.rows import Row, whole
from spark_jobs.read.files.streams import BadFile, Overlong

FILE_BYTES = 512 * 1024 * 1024
"""Largest PDF or Word file, pictures included; it is read into memory as a whole."""


def read_text(content: Content) -> Iterator[Row]:
    """A text file as one document."""
    yield from _one(content, content.maximum_bytes, lambda found: found.decode("utf-8-sig"))


def read_html(content: Content) -> Iterator[Row]:
    """A page's main text, as trafilatura finds it; where it finds none, all its text."""
    yield from _one(content, content.maximum_bytes, _html_text)


def read_notebook(content: Content) -> Iterator[Row]:
    """A Jupyter notebook: its text, and its code between fences; outputs are left out."""
    yield from _one(content, FILE_BYTES, _notebook_text)


def read_pdf(content: Content) -> Iterator[Row]:
    """A PDF's text layer, page by page."""
    for row in _one(content, FILE_BYTES, _pdf_text):
        if isinstance(row, Fault) or row[1].strip():
            yield row
        else:
            yield Fault(
                "no_text_layer",
                f"{content.file.shown} has no text, pictures at most. Where it is a scan, have "
                "it recognized, for example with: ocrmypdf in.pdf out.pdf",
            )


def read_docx(content: Content) -> Iterator[Row]:
    """A Word file's paragraphs and tables, in their order."""
    yield from _one(content, FILE_BYTES, lambda found: _docx_text(found, content.maximum_unpacked))


def _one(content: Content, maximum: int, extract: Callable[[bytes], str]) -> Iterator[Row]:
    with content.open() as stream:
        found = whole(stream, maximum)
    if isinstance(found, Overlong):
        yield too_large(content, "the file", found.length)
        return
    try:
        text = extract(found) if found.strip() else ""
    except UnicodeDecodeError as error:
        yield not_utf8(content, "the file", error)
    except MemoryError:
        raise
    except Exception as error:
        # Extractors meet any file at all, and raise whatever they stumble over.
        reason = first_line(error)
        raise BadFile(
            f"{content.file.shown} cannot be read as {content.file.format.name} ({reason}). "
            "Fetch the file again, or take it out of the source."
        ) from error
    else:
        if len(text) > content.maximum_bytes:
            yield too_large(content, "the text", len(text))
        else:
            yield content.file.name, text


def _html_text(found: bytes) -> str:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    text = trafilatura.extract(
        found, output_format="markdown", include_comments=False, include_tables=True
    )
    return text or trafilatura.html2txt(found) or ""


def _pdf_text(found: bytes) -> str:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(found))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted; save it without its password")
    return "\n\n".join(page.extract_text().strip() for page in reader.pages)


def _docx_text(found: bytes, maximum_unpacked: int) -> str:
    import docx

    with zipfile.ZipFile(io.BytesIO(found)) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > maximum_unpacked:
        raise ValueError(f"it unpacks to {size / 1e6:,.0f} MB, see `maximum_expansion`")
    blocks = []
    for block in docx.Document(io.BytesIO(found)).iter_inner_content():
        if isinstance(block, docx.table.Table):
            rows = (" | ".join(cell.text.strip() for cell in row.cells) for row in block.rows)
            blocks.append("\n".join(rows))
        else:
            blocks.append(_paragraph(block))
    return "\n\n".join(block for block in blocks if block.strip())


def _paragraph(block: Any) -> str:
    """A paragraph's text; a heading is marked as Markdown marks it."""
    style = block.style.name if block.style is not None else ""
    level = style.removeprefix("Heading ") if style else ""
    return f"{'#' * int(level)} {block.text}" if level.isdigit() else str(block.text)


def _notebook_text(found: bytes) -> str:
    notebook = json.loads(found)
    cells = notebook.get("cells")
    if cells is None:
        # Before version 4, cells lay in worksheets.
        cells = [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    return "\n\n".join(filter(None, (_cell(cell, language) for cell in cells)))


def _cell(cell: dict[str, Any], language: str) -> str:
    lines = cell.get("source", cell.get("input", ""))
    text = "".join(lines).strip()
    if cell.get("cell_type") == "code" and text:
        return f"```{language}\n{text}\n```"
    return text
