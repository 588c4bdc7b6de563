"""Stretches of a text that stand in what some runs were trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from artifacts.numbers.arrays import spans
from artifacts.shards.span_index import SHORTEST, Matches, first_places
from llm_assets.tracing.indexed import IndexedShard
from llm_assets.tracing.lessons import Reader, stretches_of


@dataclass(frozen=True)
class Place:
    """Where a stretch stands."""

    shard: IndexedShard
    place: int
    """Its first token among all tokens of the shard."""
    segment: int


@dataclass(frozen=True)
class Found:
    """A stretch of the text, and everywhere that it was trained on."""

    first: int
    length: int
    """Tokens of the text."""
    places: list[Place]


def find_stretches(
    shards: Sequence[IndexedShard], tokens: np.ndarray, records: Sequence[str], read: Reader
) -> list[Found]:
    """The longest stretches, none inside another, longest first.

    Each place of a text is given in a row that was trained on, where that row is still there.

    Args:
        tokens: of the text.
        records: URLs of what the runs were trained on (`recipes.data.trained`).
        read: gives the records of some texts.
    """
    matches = [one.index.matches(tokens, one.shard) for one in shards]
    texts = [_texts(one, found) for one, found in zip(shards, matches, strict=True)]
    lessons = stretches_of(records, np.unique(np.concatenate(texts)), read)
    readers = [np.array([url in shard.records for url in records]) for shard in shards]
    columns = [
        _trained_part(one, found, of, lessons, number, readers[number])
        for number, (one, found, of) in enumerate(zip(shards, matches, texts, strict=True))
    ]
    every = np.concatenate(columns)
    every = every[every[:, 1] >= SHORTEST]
    every = every[np.argsort(every[:, 7], kind="stable")]
    # A place of a text counts once, in however many shards of the lineage the text lies.
    every = every[np.unique(every[:, :4], axis=0, return_index=True)[1]]
    found: list[Found] = []
    covered = np.zeros(len(tokens), np.int64)
    # A stretch begins no earlier and ends no later than one that holds it, and is shorter.
    for first, length in sorted({(int(f), int(n)) for f, n in every[:, :2]}, key=_longest_first):
        if covered[first] >= first + length:
            continue
        covered[first : first + length] = np.maximum(
            covered[first : first + length], first + length
        )
        same = every[(every[:, 0] == first) & (every[:, 1] == length)][:, 4:7]
        places = [Place(shards[n], at, segment) for n, at, segment in sorted(same.tolist())]
        found.append(Found(first, length, places))
    return found


def _longest_first(stretch: tuple[int, int]) -> tuple[int, int]:
    return -stretch[1], stretch[0]


def _texts(shard: IndexedShard, matches: Matches) -> np.ndarray:
    """Shape (matches,), uint64: the text that each stands in."""
    documents = shard.shard.segments["document"][matches.segment]
    return np.asarray(shard.index.texts[documents])


def _trained_part(
    shard: IndexedShard,
    matches: Matches,
    texts: np.ndarray,
    lessons: pa.Table,
    number: int,
    reads: np.ndarray,
) -> np.ndarray:
    """Shape (parts, 8): what of each match was trained on, as one stretch of one row.

    Columns: first token of the answer, tokens, the text and the stretch's first token in it; the
    shard's number, the place in the shard and the segment; and 1 where the stretch was trained on
    in a row of another shard.

    Args:
        lessons: of `stretches_of`.
        number: the shard's.
        reads: shape (records,), whether the run of each took rows of the shard.
    """
    order = np.argsort(lessons["text"].to_numpy(), kind="stable")
    of, start, end, record = (
        lessons[name].to_numpy()[order] for name in ("text", "start", "end", "record")
    )
    first = np.searchsorted(of, texts)
    counts = np.searchsorted(of, texts, side="right") - first
    match, lesson = np.repeat(np.arange(len(texts)), counts), spans(first, counts)
    segment = matches.segment[match]
    segments = shard.shard.segments[segment]
    begin = matches.place[match] - first_places(shard.shard, segment) + segments["offset"]
    cut = np.maximum(0, start[lesson] - begin)
    length = np.minimum(begin + matches.length[match], end[lesson]) - begin - cut
    of_text = (matches.first[match] + cut, length, texts[match].view(np.int64), begin + cut)
    of_shard = (np.full(len(match), number), matches.place[match] + cut, segment)
    return np.column_stack([*of_text, *of_shard, ~reads[record[lesson]]]).astype(np.int64)
