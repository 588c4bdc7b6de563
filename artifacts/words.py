"""What a word is, in scripts that part words by spaces and in those that do not.

Chinese, Japanese, Thai, Lao, Khmer and Burmese are written without spaces between words. To tell
those apart takes a dictionary of each language; search engines do without (Lucene's CJKAnalyzer),
and so does this: each character stands by itself. Where lengths count, as many characters make a
word as a word of the script has on average. Korean parts its words by spaces, but hangs particles
on them, so a word may end within what spaces part.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise

UNSPACED = {
    2: ((0x3040, 0x3100), (0x3400, 0xA000), (0xF900, 0xFB00), (0x20000, 0x40000)),
    4: ((0x0E00, 0x0F00), (0x1000, 0x1080), (0x1780, 0x1800)),
}
"""Characters that make a word to ranges of code points, from the first to before the last: kana and
Han, which Chinese and Japanese are written in; Thai and Lao, Burmese, Khmer. All are multiples of
64, so that the first bytes of UTF-8 tell them (`spark_jobs.text`)."""
_CLASSES = {
    size: "".join(f"{chr(first)}-{chr(end - 1)}" for first, end in ranges)
    for size, ranges in UNSPACED.items()
}
UNSPACED_CLASS = "".join(_CLASSES.values())
"""Those characters, as what stands in a regular expression's brackets."""
_WORD_SHARES = [(re.compile(f"[{characters}]"), 4 // size) for size, characters in _CLASSES.items()]
_CHARACTER = re.compile(f"[{UNSPACED_CLASS}]")
_PIECE = re.compile(rf"[{UNSPACED_CLASS}]|[^\s{UNSPACED_CLASS}]+")
_MARKS = (
    r"\u0300-\u036f\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0670"
    r"\u0900-\u0903\u093a-\u094f\u0951-\u0957\u0962\u0963\u0980-\u0dff"
)
"""Accents and vowels that Python counts as no part of a word, of Hebrew, Arabic and the scripts of
India; of most of those, all letters as well."""
_LETTER = rf"(?:[^\W{UNSPACED_CLASS}\u1100-\u11ff\uac00-\ud7ff]|[{_MARKS}])"
"""A letter or figure of a script in which a word ends where those end."""
_SPACED_WORD = rf"[^\W{UNSPACED_CLASS}]+(?:[{_MARKS}]+[^\W{UNSPACED_CLASS}]*)*"
_CONTINUED = re.compile(rf"[{UNSPACED_CLASS}\u3000-\u303f\uff01-\uff65]\s*\Z")
"""A text that goes on without a space: its last character, or sign, is of such a script."""
WORD = re.compile(rf"[{UNSPACED_CLASS}]|{_SPACED_WORD}")
"""A word, or a character where words are not parted."""
SEARCH_TERMS = (
    rf"(?s)(?=([{UNSPACED_CLASS}]{{2}}|(?=[^\W{UNSPACED_CLASS}](?:[^\W{UNSPACED_CLASS}]|[{_MARKS}])){_SPACED_WORD}))"
    rf"(?:{_SPACED_WORD}|.)"
)
"""Finds what a search looks for: words, and each two characters where words are not parted."""


def has_unspaced(text: str) -> bool:
    """Whether a text has a character of a script that does not part words."""
    return not text.isascii() and _CHARACTER.search(text) is not None


def count_words(text: str) -> float:
    """How long a text is, in words."""
    return sum(map(_quarters, _PIECE.findall(text))) / 4


def word_ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """All runs of so many words of a text, in lower case; signs between words do not count."""
    words = WORD.findall(text.casefold())
    ends = list(accumulate(map(_quarters, words)))
    starts = [0, *ends[:-1]]
    # By length and not by number: where characters stand by themselves, more of them make up so
    # many words.
    lasts = [bisect_left(ends, start + 4 * size) for start in starts]
    return {tuple(words[first : last + 1]) for first, last in enumerate(lasts) if last < len(words)}


def split_passages(text: str, words: int, overlap: int = 0) -> Iterator[str]:
    """A text in passages of at most so many words, of which some are in the next passage, too."""
    pieces = list(_PIECE.finditer(text))
    ends = list(accumulate(_quarters(piece[0]) for piece in pieces))
    starts = [0, *ends[:-1]]
    places = [*(piece.start() for piece in pieces), len(text)]
    length = -(-ends[-1] // 4)
    for first in range(0, max(1, length - overlap), words - overlap):
        begin, end = (bisect_left(starts, 4 * word) for word in (first, first + words))
        yield text[places[begin] : places[end]].strip()


def holds(text: str, value: str, edge: str = _LETTER) -> bool:
    """Whether a text has a value as whole words and numbers, wherever its lines are broken.

    Args:
        edge: what may not stand before or after it, as a pattern of one character; it may where
            the script has no spaces.
    """
    return may_hold(text, value) and _phrase(value, edge).search(text) is not None


def may_hold(text: str, value: str) -> bool:
    """Whether a text has every word and number of a value; if not, no part of it holds the value.
    That is found out much faster than `holds` searches for a pattern."""
    pieces = _pieces(value)
    return bool(pieces) and all(piece in text for piece in pieces)


# A table of facts is looked for in every document, so each value is taken apart only once.
@lru_cache(maxsize=10_000)
def _pieces(value: str) -> list[str]:
    """The longest first, since it is in the fewest texts."""
    return sorted(_PIECE.findall(value), key=len, reverse=True)


@lru_cache(maxsize=10_000)
def _phrase(value: str, edge: str) -> re.Pattern[str]:
    pieces = list(_PIECE.finditer(value))
    phrase = re.escape(pieces[0][0])
    for last, piece in pairwise(pieces):
        phrase += (r"\s+" if last.end() < piece.start() else r"\s*") + re.escape(piece[0])
    # A part of a number is no number of its own: neither `1,250` nor `250.5` stands in `1,250.5`.
    before, after = r"(?!(?<=\d[.,])\d)", r"(?!(?<=\d)[.,]\d)"
    if not _CHARACTER.match(pieces[0][0]):
        before = f"(?<!{edge}){before}"
    if not _CHARACTER.match(pieces[-1][0]):
        after = f"(?!{edge}){after}"
    return re.compile(before + phrase + after)


def continue_with(text: str, value: str) -> str:
    """The value, so that it goes on from a text: after a space, where the script has spaces."""
    return value if _CONTINUED.search(text) else f" {value}"


def _quarters(word: str) -> int:
    """How much a word, or a character of one, counts, in quarters of a word: as two or four
    characters make a word, sums stay whole numbers."""
    if len(word) > 1 or word.isascii():
        return 4
    return next((share for of, share in _WORD_SHARES if of.match(word)), 4)
