"""What is done to one text: repairing and normalizing it, and folding it for comparison."""

import hashlib
import re
import unicodedata
from typing import Literal

# Control characters other than tab and newline, the byte-order mark, and lone surrogates, which
# no UTF-8 can hold.
_UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ud800-\udfff]")
_UNWANTED_ASCII = bytes(byte for byte in range(128) if _UNWANTED.match(chr(byte)))
_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029]")

HASH_BYTES = 16


def repair_encoding(text: str) -> str:
    """Undo that text was decoded as another encoding than its own (`cafÃ©` for `café`), by ftfy.

    Only lines that show it are changed, and only lines that could are looked at: ftfy takes longer
    than everything else that is done to a text.
    """
    if text.isascii():
        return text
    from ftfy import fix_encoding

    lines = text.split("\n")
    repaired = [line if line.isascii() else fix_encoding(line) for line in lines]
    return text if repaired == lines else "\n".join(repaired)


def normalize(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """One Unicode form, newline as the only line end, no control characters, no outer space."""
    if text.isascii():
        if "\r" in text:
            text = _LINE_ENDS.sub("\n", text)
        return text.encode().translate(None, _UNWANTED_ASCII).decode().strip()
    text = _LINE_ENDS.sub("\n", unicodedata.normalize(form, text))
    return _UNWANTED.sub("", text).strip()


def fold(text: str) -> str:
    """What two texts must share to be exact copies: NFKD, lower case, single spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
    return " ".join(text.lower().split())


def text_hash(folded: str) -> str:
    """32 hexadecimal digits, uniform over texts: the identity of a text.

    A cluster takes its smallest member's, and the split of a new cluster follows from that number
    (`clean.splits`).
    """
    content = folded.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=HASH_BYTES).hexdigest()
