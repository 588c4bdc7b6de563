"""The encoding of a text: recognized where nothing else is possible, and otherwise not guessed.

A wrong guess would be learned.
"""

import codecs
import re

WINDOWS_1252 = "windows-1252"
"""Western European text as older programs write it; Latin-1 is a part of it."""
MOST_ACCENTED = 0.3
"""Share of non-ASCII letters above which text is in no language of Western Europe."""
_MISPLACED = re.compile(
    r"(?<=[A-Za-z])[^\W\d_]*(?:[^\w\s\x00-\x7f\u00ad\u2013\u2014\u2019\u2026]|[¼½¾])(?=[a-z])"
    r"|(?<=[a-z])[À-ÖØ-ÞŒŠŽŸ]"
)
"""A symbol or a capital where other encodings have a small letter: `cafŽ` is `café` of an old
Macintosh. Dashes and dots stand between words without blanks, too."""
_SUPERSCRIPT = re.compile(r"([^\W\d_]*)[¹²³]([^\W\d_]?)")
UNITS = {"m", "mm", "cm", "dm", "km", "µm", "nm", "ft", "in", "s"}
"""What is squared and cubed; after other letters, `by³` is the Polish `był`."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
LOOKED_AT = 1024
"""Bytes that show whether every other one is zero, as in UTF-16 without a mark."""


def decode(content: bytes, declared: str | None = None) -> tuple[str, str | None]:
    """Decode text; also return the encoding that it was found to be in, None for UTF-8.

    UTF-16 is recognized by its mark or its zeros. Other bytes are in the encoding that the source
    declares. If it declares none, they are taken for Windows-1252 if they read as Western European
    text. The encoding of anything else cannot be told, and UnicodeDecodeError is raised, so that
    nothing wrong is learnt.
    """
    if encoding := wide_encoding_of(content):
        return content.decode(encoding), encoding
    try:
        return content.decode("utf-8-sig"), None
    except UnicodeDecodeError:
        if declared is None:
            text = content.decode(WINDOWS_1252, "replace")
            if _is_western(text):
                return text, WINDOWS_1252
        elif not is_damaged_utf_8(content):
            return content.decode(declared), declared
        raise


def is_damaged_utf_8(content: bytes) -> bool:
    """Whether most of what is not ASCII is UTF-8, so that no other encoding explains the rest."""
    text = content.decode("utf-8", "replace")
    lost = text.count("\ufffd")
    return sum(not c.isascii() for c in text) > 2 * lost


def wide_encoding_of(start: bytes) -> str | None:
    """The kind of UTF-16 or UTF-32 that a file is in, by its first bytes; None where in none."""
    # Before UTF-16, with whose mark one of these begins.
    if start.startswith(UTF_32):
        return "UTF-32"
    if start.startswith(UTF_16):
        return "UTF-16"
    start = start[:LOOKED_AT]
    halves = {"UTF-16BE": start[::2], "UTF-16LE": start[1::2]}
    zeros = {encoding: half.count(0) for encoding, half in halves.items()}
    most = max(zeros, key=zeros.__getitem__)
    # One byte of every Latin letter is zero; which one tells the byte order.
    return most if zeros[most] > len(halves[most]) / 2 > 0 and min(zeros.values()) == 0 else None


def _is_western(text: str) -> bool:
    if "\ufffd" in text or any(ord(c) < 32 and c not in "\t\n\r\f" for c in text):
        return False
    letters = [c for c in text if c.isalpha()]
    accented = sum(not c.isascii() for c in letters)
    if accented > MOST_ACCENTED * len(letters) or _MISPLACED.search(text):
        return False
    powers = _SUPERSCRIPT.finditer(text)
    return all(
        not after and (not before or before in UNITS)
        for before, after in (m.groups() for m in powers)
    )
