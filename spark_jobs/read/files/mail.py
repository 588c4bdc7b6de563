"""Mail: what a message itself says, and the messages of a mailbox."""

import codecs
import email
from collections.abc import Iterator
from contextlib import suppress
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import EmailMessage, MIMEPart
from email.policy import default
from itertools import chain

from artifacts.errors import first_line
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.markup import all_text
from spark_jobs.read.files.streams import Content, OverlongLine, decode, lines_of
from spark_jobs.read.files.whole import one_document

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
            yield content.too_large(where, message.length)
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
                yield content.decoded(encoding)
            yield content.document(f"{content.file.name}:{number}", text, where)


def _messages(content: Content) -> Iterator[bytes | OverlongLine]:
    """The messages of a mailbox; each begins with a line `From ...` after an empty one."""
    with content.open() as stream:
        message: list[bytes] = []
        size, before = 0, b"\n"
        # No line is empty: this one ends the last message, as another's first line ends the rest.
        for line in chain(lines_of(stream, b"\n", content.maximum_bytes), [b""]):
            if isinstance(line, OverlongLine):
                size += line.length
                continue
            if not line or (line.startswith(b"From ") and not before.strip()):
                if size:
                    yield b"".join(message) if size <= content.maximum_bytes else OverlongLine(size)
                message, size = [], 0
            else:
                size += len(line)
                # Nothing more is kept of a message that is too long.
                if size <= content.maximum_bytes:
                    message.append(line)
            before = line


def _mail_text(content: bytes, declared: str | None) -> tuple[str, str | None]:
    """A message's subject and text, and the encoding of text that names none."""
    # Python's older policy, its default, would leave encoded words in the subject undecoded.
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
        payload = part.get_payload(decode=True)
        content = payload if isinstance(payload, bytes) else b""
        text, encoding = _decode_as(content, part.get_content_charset("us-ascii"), declared)
        yield all_text(text) if kind == "text/html" else text, encoding
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


def _decode_as(content: bytes, charset: str, declared: str | None) -> tuple[str, str | None]:
    """Decode text that names its encoding; if that is unknown or wrong, it is decoded as text files
    are. If only a few bytes are not in the encoding, these are lost.

    Raises:
        UnicodeDecodeError: there is no telling.
    """
    encodings: tuple[str, ...] = ()
    with suppress(LookupError, UnicodeError):
        name = codecs.lookup(charset).name
        # Some that Python knows are none of text.
        "".encode(name)
        encodings = _MEANT.get(name, (name,))
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
    # The last resort, since bytes are lost; text that is wholly in another encoding would lose more
    # than is allowed.
    for encoding in encodings:
        text = content.decode(encoding, "replace")
        if text.count("\ufffd") <= MOST_LOST * len(text):
            return text, None
    raise failure
