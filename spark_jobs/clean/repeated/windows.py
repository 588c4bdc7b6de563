"""The words of a text, every window of so many of them, and fingerprints that find equal windows.

A window is identified by a 128-bit digest of its folded words, as an exact copy is by that of its
text. Fingerprints are those of winnowing (Schleimer, Wilkerson and Aiken, "Winnowing: Local
Algorithms for Document Fingerprinting", 2003): of all hashes of shorter runs within a window, the
smallest. Equal windows have an equal fingerprint, and there is one in some thirteen words (at 50
words a window), so that few rows are shuffled to find the windows that are looked at whole.
"""

import hashlib
import re
from collections.abc import Collection

import numpy as np

from spark_jobs.decontaminate.overlap import ngrams_of
from spark_jobs.text.normalize import HASH_BYTES, fold
from spark_jobs.text.shingles import sum_words

_WORD = re.compile(r"\S+\s*")


def fold_words(text: str) -> str:
    """A text as `fold` leaves it, but with just the words of `word_spans`, in their order."""
    if text.isascii():
        return fold(text)
    # A character may fold to several, a space among them.
    return " ".join(fold(word).replace(" ", "") or word for word in text.split())


def word_spans(text: str) -> np.ndarray:
    """Shape (words, 2): where each word begins, and where the space after it ends, in characters.

    Args:
        text: without space before its first word.
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    return np.array(spans, np.int64).reshape(-1, 2)


def fingerprints(folded: list[str], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of which each window of a text has at least one, and equal windows the same.

    Args:
        folded: texts as `fold_words` leaves them.
        window: words in a window.

    Returns:
        `(hashes, texts)`, int64 of shape (fingerprints,): a hash, and the number of its text.
    """
    long = [number for number, text in enumerate(folded) if text.count(" ") + 1 >= window]
    run, width = _run_words(window), _runs(window)
    ngrams = ngrams_of(sum_words([folded[number] for number in long]), run)
    hashes = ngrams.hashes.view(np.int64)
    # Windows that reach over the end of a text choose some hashes too many, and none too few.
    smallest = ~_sliding_maximum(~hashes, width)
    edge = np.full(width - 1, np.iinfo(np.int64).min)
    reached = _sliding_maximum(np.concatenate([edge, smallest, edge]), width)
    chosen = np.flatnonzero(reached == hashes) if len(smallest) else np.empty(0, np.int64)
    owners = np.searchsorted(ngrams.offsets, chosen, side="right") - 1
    return hashes[chosen], np.array(long, np.int64)[owners]


def windows_with(folded: str, window: int, hashes: Collection[int]) -> list[tuple[int, bytes]]:
    """The windows of a text that have one of these fingerprints: `(first word, digest)`.

    Args:
        folded: a text of at least `window` words, as `fold_words` leaves it.
    """
    ngrams = ngrams_of(sum_words([folded]), _run_words(window)).hashes.view(np.int64)
    found = np.isin(ngrams, np.fromiter(hashes, np.int64))
    firsts = np.flatnonzero(_sliding_maximum(found, _runs(window)))
    content = folded.encode("utf-8", "surrogatepass")
    spaces = np.flatnonzero(np.frombuffer(content, np.uint8) == ord(" "))
    starts, ends = np.append(0, spaces + 1), np.append(spaces, len(content))
    return [
        (first, _digest(content[starts[first] : ends[first + window - 1]]))
        for first in firsts.tolist()
    ]


def _run_words(window: int) -> int:
    """Words in a hashed run: few runs of half a window occur twice by chance."""
    return window // 2


def _runs(window: int) -> int:
    """Hashed runs in a window."""
    return window - _run_words(window) + 1


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def _sliding_maximum(values: np.ndarray, width: int) -> np.ndarray:
    """Shape (n - width + 1,): the largest of each `width` neighbors; none where n is smaller."""
    reached = 1
    while reached < width and len(values):
        step = min(reached, width - reached)
        values = np.maximum(values[:-step], values[step:])
        reached += step
    return values
