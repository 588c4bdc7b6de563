"""Operations on single texts: repair, normalization, word shingles, shapes.

Shingles follow Broder, "On the resemblance and containment of documents" (1997). A shingle's hash
comes from prefix sums of a polynomial over the text's bytes (Karp and Rabin, 1987), so no word ever
becomes a Python object.

A shape is a text's words without the figures, dates and ids that fill it in: words with a digit,
and English months and weekdays, are masked. Texts of one shape come from one template, such as the
reports of a machine.
"""

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from artifacts.numbers import GOLDEN, ends_of, mix, sorted_unique
from artifacts.words import UNSPACED

# Control characters other than tab and newline, the byte-order mark, and lone surrogates, which
# no UTF-8 can hold.
_UNWANTED = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x9f\ufeff\ud800-\udfff]")
_UNWANTED_ASCII = bytes(byte for byte in range(128) if _UNWANTED.match(chr(byte)))
# A vertical tab is a line break in a paragraph, a form feed a new page; 1C to 1F separate records.
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")
_ASCII_LINE_ENDS = bytes.maketrans(b"\x0b\x0c\x1c\x1d\x1e\x1f", 6 * b"\n")
_OTHER_C1 = re.compile("[\x80-\x84\x86-\x9f]")

HASH_BYTES = 16


def repair_encoding(text: str) -> str:
    """Repair text that was decoded with the wrong encoding (`cafÃ©` for `café`), by ftfy.

    Only lines that show such damage are changed, and only lines that could show it are examined:
    ftfy takes longer than everything else that is done to a text.
    """
    if text.isascii():
        return text
    from ftfy import fix_encoding

    # Without other C1 characters, U+0085 is the line end that Unicode defines, and not the ellipsis
    # of Windows-1252 that ftfy makes of it.
    is_line_end = _OTHER_C1.search(text) is None

    def repaired(line: str) -> str:
        fixed = line if line.isascii() else fix_encoding(line)
        return line if is_line_end and fixed == line.replace("\x85", "\u2026") else fixed

    lines = text.split("\n")
    of_lines = list(map(repaired, lines))
    # The same object if nothing changed: by that, `prepare` tells which texts were repaired.
    return text if of_lines == lines else "\n".join(of_lines)


def normalize(text: str, form: Literal["NFC", "NFKC"]) -> tuple[str, bool]:
    """Bring a text into one Unicode form, with newlines alone and without control characters.

    Returns:
        The text without outer space, and whether it lost characters: here, or earlier, which
        U+FFFD in their place shows.
    """
    if text.isascii():
        if "\r" in text:
            text = _LINE_ENDS.sub("\n", text)
        cleaned = text.encode().translate(_ASCII_LINE_ENDS, _UNWANTED_ASCII).decode()
    else:
        text = _LINE_ENDS.sub("\n", text)
        cleaned = _UNWANTED.sub("", text)
    # Compared with the text whose line ends are changed: that may shorten it, and loses nothing.
    has_lost = len(cleaned) < len(text) or "\ufffd" in cleaned
    return unicodedata.normalize(form, cleaned).strip(), has_lost


def fold(text: str) -> str:
    """The form in which exact copies are equal: NFKD, lower case, single spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
    return " ".join(text.lower().split())


def text_hash(folded: str) -> str:
    """32 hexadecimal digits, uniform over texts: the identity of a text.

    A cluster is named by the smallest hash of its texts, and the split of a new cluster follows
    from that number (`spark_jobs.clean.history`).
    """
    content = folded.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=HASH_BYTES).hexdigest()


# Odd, so that it has an inverse modulo 2**64.
_BASE = int(GOLDEN) | 1
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_SPACE, _NEWLINE = 0x20, 0x0A
_THREE_BYTES, _FOUR_BYTES = 0xE0, 0xF0
"""The smallest first byte of characters that take three and four bytes in UTF-8."""
_UNSPACED_BLOCKS = np.zeros(0x110000 >> 6, bool)
"""Whether the script of each block of 64 code points is written without spaces."""
for _ranges in UNSPACED.values():
    for _first, _end in _ranges:
        _UNSPACED_BLOCKS[_first >> 6 : _end >> 6] = True
_BLOCK = 1 << 14
"""Bytes summed at a time, so that the work stays in the processor's cache."""


@dataclass(frozen=True)
class WordSums:
    """The words of several texts, one after another, by prefix sums of a polynomial."""

    before: np.ndarray
    """uint64: the sum before each word."""
    after: np.ndarray
    """uint64: the sum after each word."""
    scale: np.ndarray
    """uint64: what makes a difference of sums independent of the word's position."""
    sizes: np.ndarray
    """Words in each text; an empty text has one, which is empty."""


@dataclass(frozen=True)
class Shingles:
    """The hashed shingles of several texts, one after another; a shingle may come repeatedly."""

    hashes: np.ndarray
    """uint64."""
    offsets: np.ndarray
    """Shape (texts + 1,): where each text's shingles begin; `shingle` finds one in every text."""

    def select(self, is_selected: np.ndarray) -> "Shingles":
        """The shingles of some texts, for a bool of each: shape (texts,)."""
        sizes = np.diff(self.offsets)
        return Shingles(self.hashes[np.repeat(is_selected, sizes)], ends_of(sizes[is_selected]))


def sum_words(folded: list[str], parts_characters: bool = True) -> WordSums:
    """Compute prefix sums of texts, from which any run of words is hashed in constant time.

    Args:
        folded: texts as `fold` returns them, words separated by single spaces.
        parts_characters: whether each character counts as a word in scripts without spaces
            (`artifacts.words`).
    """
    content, starts, ends = find_words(folded, parts_characters)
    sums = _prefix_sums(content)
    # The last word of a text ends at the newline that `find_words` puts after each text.
    last_words = np.flatnonzero(content[ends] == _NEWLINE)
    sizes = np.diff(last_words, prepend=-1)
    return WordSums(sums[starts], sums[ends], _inverses_at(starts), sizes)


def find_words(
    folded: list[str], parts_characters: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes of texts, one after another, and where each of their words begins and ends."""
    joined = "\n".join([*folded, ""]).encode("utf-8", "surrogatepass")
    content = np.frombuffer(joined, np.uint8)
    is_between = (content == _SPACE) | (content == _NEWLINE)
    after = np.flatnonzero(is_between) + 1
    alone, sizes = _unspaced_characters(content)
    # At such a character a word begins, and another behind it unless a separator follows.
    if parts_characters and len(alone):
        # There is always a byte behind such a character: each text ends with a newline.
        behind = alone + sizes
        bounds = np.concatenate([after, alone, behind[~is_between[behind]]])
        after = sorted_unique(bounds[bounds > 0])
    # A word ends before its separator; a character that is a word may have none behind it.
    return content, np.concatenate([[0], after])[:-1], after - is_between[after - 1]


def _unspaced_characters(content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the characters of scripts without spaces begin, and how many bytes each has."""
    # All these scripts lie above U+0800, so their characters have three bytes or four, of which
    # all but the last give the block of 64 code points.
    first = np.flatnonzero(content >= _THREE_BYTES)
    is_longer = content[first] >= _FOUR_BYTES
    lead = content[first].astype(np.int64) & np.where(is_longer, 0x07, 0x0F)
    block = lead << 6 | (content[first + 1] & 0x3F)
    block = np.where(is_longer, block << 6 | (content[first + 2] & 0x3F), block)
    is_unspaced = _UNSPACED_BLOCKS[block]
    return first[is_unspaced], 3 + is_longer[is_unspaced]


def shingle(texts: WordSums, words: int) -> Shingles:
    """Hash every run of `words` words; a text with fewer words is one shingle."""
    counts = np.maximum(texts.sizes - words + 1, 1)
    offsets = ends_of(counts)
    first_words = np.cumsum(texts.sizes) - texts.sizes
    first = np.arange(offsets[-1]) + np.repeat(first_words - offsets[:-1], counts)
    last = np.minimum(first + words - 1, np.repeat(first_words + texts.sizes - 1, counts))
    # Scaled by the inverse power, so that equal words have one hash wherever they stand.
    return Shingles(mix((texts.after[last] - texts.before[first]) * texts.scale[first]), offsets)


def _prefix_sums(content: np.ndarray) -> np.ndarray:
    """Sums of byte times power before each position, modulo 2**64. Shape (len(content) + 1,)."""
    sums = np.zeros(len(content) + 1, np.uint64)
    powers, _ = _powers()
    work = np.empty(_BLOCK + 1, np.uint64)
    for number, first in enumerate(range(0, len(content), _BLOCK)):
        last = min(first + _BLOCK, len(content))
        block = work[: last - first + 1]
        # The powers within a block are the same for all blocks, apart from the block's own factor.
        np.multiply(powers[: last - first], _power(_BASE, number * _BLOCK), out=block[1:])
        np.multiply(content[first:last], block[1:], out=block[1:])
        block[0] = sums[first]
        np.cumsum(block, out=sums[first : last + 1])
    return sums


def _inverses_at(places: np.ndarray) -> np.ndarray:
    """The inverse of the power at each place."""
    blocks = places.max(initial=0) // _BLOCK + 1
    of_block = np.array([_power(_BASE_INVERSE, n * _BLOCK) for n in range(blocks)], np.uint64)
    _, within = _powers()
    return of_block[places // _BLOCK] * within[places % _BLOCK]


@lru_cache(maxsize=1)
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Powers of the polynomial's base and of its inverse within a block, modulo 2**64."""
    powers, inverses = np.empty((2, _BLOCK), np.uint64)
    for values, base in ((powers, _BASE), (inverses, _BASE_INVERSE)):
        values[0] = 1
        values[1:] = base
        np.cumprod(values, out=values)
    return powers, inverses


def _power(base: int, exponent: int) -> np.uint64:
    return np.uint64(pow(base, exponent, 2**64))


_NAMES = (
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec "
    "monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun"
)
# Hashed as words of a text are, with the punctuation that may follow them, and sorted.
_CALENDAR = np.sort(
    shingle(sum_words([name + end for name in _NAMES.split() for end in ("", ",", ".")]), 1).hashes
)


def shapes(folded: list[str], words: WordSums) -> tuple[np.ndarray, np.ndarray]:
    """Compute the shapes of texts, and which share of each is not masked.

    Args:
        folded: texts as `fold` leaves them.
        words: of the same texts (`sum_words`).

    Returns:
        int64 of shape (texts,): equal for texts of one shape; float64 of shape (texts,): the share
        of a text's bytes that is not masked.
    """
    content, starts, ends = find_words(folded)
    tokens = shingle(words, 1)
    first = tokens.offsets[:-1]
    # `numpy.isin` takes seven times as long.
    nearest = np.minimum(np.searchsorted(_CALENDAR, tokens.hashes), len(_CALENDAR) - 1)
    is_masked = _CALENDAR[nearest] == tokens.hashes
    # A digit anywhere masks a word; bytes below "0" wrap around to large numbers.
    is_masked |= np.logical_or.reduceat(content - np.uint8(ord("0")) < 10, starts)
    place = np.arange(1, len(starts) + 1) - np.repeat(first, words.sizes)
    # With its position, so that the same words in another order have another shape.
    hashes = np.where(is_masked, np.uint64(1), tokens.hashes)
    placed = mix(hashes + place.astype(np.uint64) * GOLDEN)
    sizes = ends - starts
    same = np.add.reduceat(np.where(is_masked, 0, sizes), first)
    shares = same / np.maximum(np.add.reduceat(sizes, first), 1)
    return np.add.reduceat(placed, first).view(np.int64), shares
