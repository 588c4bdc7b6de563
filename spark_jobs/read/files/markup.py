"""The text between tags: of web pages, of pages that are one document, and of XML."""

import logging
import re
from collections.abc import Iterator
from html import unescape
from html.entities import name2codepoint
from typing import Any

from artifacts.errors import first_line
from artifacts.settings import with_whole_characters
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.streams import BadFile, Content, decode
from spark_jobs.read.files.whole import naming_encoding, one_document

_DECLARED = re.compile(rb"<meta[^>]+charset|<\?xml[^>]+encoding", re.IGNORECASE)
LONG_TEXT = 10_000_000
"""Bytes up to which libxml2 reads a text unless it is told otherwise, such as a log in a page."""


def page_text(content: bytes, declared: str | None) -> tuple[str, str | None]:
    """A page's text, and the encoding that it is in if it does not say so (`Extract`)."""
    # trafilatura would guess the encoding, and is often wrong.
    if _DECLARED.search(content[:8192]):
        return html_text(content), None
    page, encoding = decode(content, declared)
    return html_text(page if encoding else content), encoding


def html_text(content: bytes | str) -> str:
    """A page's main text, as trafilatura finds it; where it finds none, all its text."""
    import trafilatura
    from lxml.etree import ParserError
    from lxml.html import HTMLParser, document_fromstring

    # It logs an error where a page is only a piece of one, which is read all the same.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    # Without that tag, trafilatura finds nothing in a page that has no head.
    markup = f"<html>{content}" if isinstance(content, str) else b"<html>" + content
    pages: list[Any] = [content, markup]
    encoded = content.encode() if isinstance(content, str) else content
    if max(map(len, encoded.split(b"<"))) >= LONG_TEXT:
        # trafilatura's own parser ends the page there, and says nothing of it.
        is_named = encoded is content and _DECLARED.search(encoded[:8192])
        parser = HTMLParser(encoding=None if is_named else "utf-8", huge_tree=True)
        try:
            pages = [document_fromstring(encoded, parser=parser)]
        except ParserError:  # It is a comment alone.
            return ""
    for page in pages:
        text = trafilatura.extract(
            page, output_format="markdown", include_comments=False, include_tables=True
        )
        if text := text or trafilatura.html2txt(page):
            return str(text)
    return ""


_HTML_BLOCKS = (
    *("h1", "h2", "h3", "h4", "h5", "h6", "p", "li", "pre", "td", "th", "blockquote", "br", "div"),
    *("tr", "table", "ul", "ol", "dl", "dt", "dd", "section", "article", "header", "footer"),
    *("figure", "figcaption"),
)
_KEPT_BLANKS = {ord(" "): 0xFDD0, ord("\t"): 0xFDD1}
"""Blanks of preformatted text, mapped to characters that no text has."""
_TITLE, _TITLE_END = re.compile("<title[^>]*>", re.IGNORECASE), re.compile("</title", re.IGNORECASE)


def all_text(markup: str) -> str:
    """All text of a page that is a document as a whole, block by block."""
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    # The page is encoded as UTF-8 here, whatever it says of its encoding.
    parser = HTMLParser(encoding="utf-8", huge_tree=True)
    if not _TITLE_END.search(markup):
        # A title that is not closed would take in the whole page.
        markup = _TITLE.sub("", markup)
    try:
        page = document_fromstring(markup.encode(), parser=parser)
    except etree.ParserError:  # It is blank, or a comment alone.
        return ""
    for aside in page.xpath("//head | //script | //style"):
        # `drop_tree` keeps the text behind it, which lxml counts to the element.
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


_TAGS = r"(?i:</[a-z][a-z0-9]*\s*>|<br\s*/?>)"
_ENTITY = rf"&(?:#\d+|#x[\da-fA-F]+|apos|{'|'.join(name2codepoint)});"
MARKUP = re.compile(f"{_TAGS}|{_ENTITY}")
"""What a text with HTML has, and one that only compares, as in `a < b`, has not."""


def without_html(value: Any) -> Any:
    """A row whose texts have no tags."""
    if isinstance(value, list):
        return [without_html(item) for item in value]
    if isinstance(value, dict):
        return {key: without_html(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if re.search(_TAGS, value):
        return all_text(with_whole_characters(value))
    # Without tags it may be code, of which a parser would take `a<b` for one.
    return re.sub(_ENTITY, lambda found: unescape(found[0]).replace("\xa0", " "), value)


_SAFE = {"resolve_entities": False, "no_network": True, "huge_tree": True}
"""Without entities, which may multiply or fetch other files. Sizes are bounded where files are
opened, and libxml2's own bound, 10 MB a text, is less than a document may have."""
_DUMP = re.compile(rb"<mediawiki[\s>]")
HEAD_BYTES = 4096


def read_xml(content: Content) -> Iterator[Document | Fault]:
    """All text of a file as one document; of a wiki's dump each page is a document."""
    with content.open() as stream:
        # In UTF-16 every other byte of the tag is zero.
        is_dump = _DUMP.search(stream.read(HEAD_BYTES).replace(b"\0", b""))
    if not is_dump:
        yield from one_document(content, naming_encoding(_xml_text))
        return
    from lxml import etree

    try:
        with content.open() as stream:
            pages = etree.iterparse(stream, tag="{*}page", **_SAFE)
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
        return content.too_large(where, len(text))
    text = f"{title}\n\n{text}" if text else ""
    return content.document(f"{content.file.name}:{number}", text, where)


def _xml_text(content: bytes) -> str:
    """All text between the tags, a line for each element that has some."""
    return "\n".join(filter(None, (" ".join(t.split()) for t in parse_xml(content).itertext())))


def parse_xml(found: bytes) -> Any:
    """The root of an XML document, without what it might fetch or multiply."""
    from lxml import etree

    return etree.fromstring(found, etree.XMLParser(remove_comments=True, **_SAFE))
