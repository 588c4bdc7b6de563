"""Files whose whole text is one document, and what PDFs, notebooks and subtitles say."""

import html
import io
import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterator
from itertools import groupby

from artifacts.errors import UserError, first_line, install_advice
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.streams import BadFile, Content, decode
from spark_jobs.read.source_file import BLOCK_BYTES

FILE_BYTES = 512 * 1024 * 1024
"""Largest PDF or Word file, pictures included; it is read into memory as a whole."""
PLAIN = ("text", "code", "html", "subtitles", "xml")
"""Formats whose files are hardly larger than their text."""
ZIPPED = ("docx", "odt", "pptx", "xlsx", "epub")
_COMPOUND_FILE = bytes.fromhex("d0cf11e0a1b11ae1")
"""Begins Office's own container, in which an encrypted file lies whatever its ending."""

Extract = Callable[[bytes, str | None], tuple[str, str | None]]
"""Maps a file's content and the encoding that the source declares to the text and its encoding,
which is None for UTF-8, or if the file names it. Raises UnicodeDecodeError."""


def one_document(content: Content, extract: Extract) -> Iterator[Document | Fault]:
    """A file whose whole text is one document, or what is wrong with it.

    Raises:
        BadFile: the extractor stumbles over it.
        UserError: the extractor's library is not installed.
    """
    form = content.file.format.name
    maximum = content.maximum_bytes if form in PLAIN else FILE_BYTES
    with content.open() as stream:
        raw = stream.read(maximum + 1)
        # How much more there is, for the message.
        rest = sum(len(block) for block in iter(lambda: stream.read(BLOCK_BYTES), b""))
    if len(raw) > maximum:
        yield content.too_large("the file", len(raw) + rest)
        return
    try:
        # These formats are zip archives, and any of them may be a compression bomb.
        if form in ZIPPED and zipfile.is_zipfile(io.BytesIO(raw)):
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > content.maximum_unpacked:
                raise ValueError(f"it unpacks to {size / 1e6:,.0f} MB, see `maximum_expansion`")
        elif form in ZIPPED and raw.startswith(_COMPOUND_FILE):
            raise ValueError(f"it is encrypted, or no {form}; save it as one without a password")
        # An empty file is empty and not damaged, whatever its format.
        text, encoding = extract(raw, content.source.encoding) if raw.strip() else ("", None)
    except UnicodeDecodeError as error:
        yield content.not_utf8("the file", error)
    except MemoryError:
        # The machine's lack of memory is no fault of the file.
        raise
    except ModuleNotFoundError as error:
        # No fault of the file, which would be set aside and missed.
        raise UserError(install_advice(error.name or "") or str(error)) from error
    except Exception as error:
        # Extractors meet any file at all, and raise whatever they stumble over.
        reason = first_line(error)
        raise BadFile(
            f"{content.file.shown} cannot be read as {form} ({reason}). "
            "Replace the file, or take it out of the source."
        ) from error
    else:
        if encoding:
            yield content.decoded(encoding)
        if len(text) > content.maximum_bytes:
            yield content.too_large("the text", len(text))
        else:
            yield content.document(content.file.name, text)


def naming_encoding(text_of: Callable[[bytes], str]) -> Extract:
    """The extractor of a format whose files name their encoding."""
    return lambda content, _: (text_of(content), None)


def read_pdf(content: Content) -> Iterator[Document | Fault]:
    """A PDF's text layer, page by page."""
    for document in one_document(content, naming_encoding(_pdf_text)):
        if isinstance(document, Fault) or document.text.strip() or not content.file.size:
            yield document
        else:
            yield Fault(
                "no_text_layer",
                f"{content.file.shown} has no text, pictures at most. Where it is a scan, have "
                "it recognized, for example with: ocrmypdf in.pdf out.pdf",
            )


def _pdf_text(content: bytes) -> str:
    import pypdf

    # It warns of each oddity of a file, of which most are read well nevertheless.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(content))
    # An empty password opens files whose encryption only restricts what may be done with them.
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted; save it without its password")
    return "\n\n".join(page.extract_text().strip() for page in reader.pages)


def notebook_text(content: bytes) -> str:
    """A Jupyter notebook's text, and its code between fences; outputs are left out."""
    notebook = json.loads(content)
    if not isinstance(notebook, dict) or notebook.keys().isdisjoint(("cells", "worksheets")):
        raise ValueError("it is no object with `cells`")
    # Before version 4, cells lay in worksheets.
    sheets = [notebook] if notebook.get("cells") else notebook.get("worksheets") or ()
    cells = [cell for sheet in sheets for cell in sheet["cells"] or ()]
    # Programs that write notebooks put null where they know of nothing.
    about = (notebook.get("metadata") or {}).get("language_info") or {}
    language = about.get("name") or "python"
    texts = []
    for cell in cells:
        text = "".join(cell.get("source") or cell.get("input") or "").strip()
        is_code = cell.get("cell_type") == "code" and text
        texts.append(f"```{language}\n{text}\n```" if is_code else text)
    return "\n\n".join(filter(None, texts))


_TIMING = re.compile(r"(?:^\d+\n)?^[-\d:., \t]*-->.*$", re.MULTILINE)
"""A line of times, and a number before it."""
_TIMES = re.compile(r"[-\d:., \t]*-->")
_VTT_ASIDE = re.compile(r"WEBVTT|(NOTE|STYLE|REGION)(\s|$)")
_TAG = re.compile(r"<[^>]*>")


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
            # WebVTT escapes `&` and `<`; in SubRip, `&amp;` is what is shown.
            line = (html.unescape(line) if is_vtt else line).strip()
            if line and spoken[-1:] != [line]:
                spoken.append(line)
    return "\n".join(spoken), encoding
