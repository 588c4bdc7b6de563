"""Word shingles as hashes, in whole-array arithmetic.

Shingles follow Broder, "On the resemblance and containment of documents" (1997). A shingle's hash
comes from prefix sums of a polynomial over the text's bytes (Karp and Rabin, 1987), so no word ever
becomes a Python object.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from artifacts.numbers.arrays import ends_of

_BASE = 0x9E3779B97F4A7C15 | 1
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_SPACE, _NEWLINE = 0x20, 0x0A
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
    """uint64: what makes a difference of sums independent of where the word stands."""
    sizes: np.ndarray
    """Words in each text; an empty text has one, which is empty."""


@dataclass(frozen=True)
class Shingles:
    """The hashed shingles of several texts, one after another; a shingle may come repeatedly."""

    hashes: np.ndarray
    """uint64."""
    offsets: np.ndarray
    """Shape (texts + 1,): where each text's shingles begin. No text has none."""

    def select(self, chosen: np.ndarray) -> "Shingles":
        """Those of some texts, given which: shape (texts,)."""
        sizes = np.diff(self.offsets)
        return Shingles(self.hashes[np.repeat(chosen, sizes)], ends_of(sizes[chosen]))


def sum_words(folded: list[str]) -> WordSums:
    """Hash texts so far that any run of their words has its hash in constant time.

    Args:
        folded: texts as `text.normalize.fold` leaves them: words parted by single spaces.
    """
    joined = "\n".join([*folded, ""]).encode("utf-8", "surrogatepass")
    content = np.frombuffer(joined, np.uint8)
    ends = np.flatnonzero((content == _SPACE) | (content == _NEWLINE))
    starts = np.concatenate([[0], ends[:-1] + 1])
    sums = _prefix_sums(content)
    last_words = np.flatnonzero(content[ends] != _SPACE)
    sizes = np.diff(last_words, prepend=-1)
    return WordSums(sums[starts], sums[ends], _inverses_at(starts), sizes)


def shingle(texts: WordSums, words: int) -> Shingles:
    """Hash every run of `words` words; a text with fewer words is one shingle."""
    counts = np.maximum(texts.sizes - words + 1, 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    first_words = np.cumsum(texts.sizes) - texts.sizes
    first = np.arange(offsets[-1]) + np.repeat(first_words - offsets[:-1], counts)
    last = np.minimum(first + words - 1, np.repeat(first_words + texts.sizes - 1, counts))
    return Shingles(mix((texts.after[last] - texts.before[first]) * texts.scale[first]), offsets)


def mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), which spreads every bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _prefix_sums(content: np.ndarray) -> np.ndarray:
    """Sums of byte times power before each position, modulo 2**64. Shape (len(content) + 1,)."""
    sums = np.zeros(len(content) + 1, np.uint64)
    powers, _ = _powers()
    work = np.empty(_BLOCK + 1, np.uint64)
    for number, first in enumerate(range(0, len(content), _BLOCK)):
        last = min(first + _BLOCK, len(content))
        block = work[: last - first + 1]
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
