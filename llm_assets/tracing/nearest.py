"""The documents nearest to a text by BM25, over the model's own tokens.

Of a long text the most telling tokens are looked for, those that the fewest documents hold, as
Lucene's MoreLikeThis does: the others are in so many documents that they decide little and cost
most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from artifacts.numbers.arrays import spans
from llm_assets.tracing.indexed import IndexedShard

K1, B = 1.5, 0.75
"""Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009)."""
COMMON_SHARE = 0.2
"""A token that this share of the documents has says nothing about any of them."""
MOST_TERMS = 32
"""Different tokens of a text that are looked for."""
_BLOCK = 1_024
"""Documents that are asked at a time whether they were trained on."""


@dataclass(frozen=True)
class Nearby:
    """A document and how near it is."""

    shard: IndexedShard
    document: int
    """Its number in the shard."""
    score: float
    """Of BM25; comparable within one search."""

    @property
    def text(self) -> int:
        """What its text is known by (`artifacts.shards.texts`)."""
        return int(self.shard.index.texts[self.document])


def find_nearest(
    shards: Sequence[IndexedShard], tokens: np.ndarray, texts: np.ndarray, count: int
) -> list[Nearby]:
    """The nearest documents among some texts, best first, each text once.

    How telling a token is, all documents of the shards say.

    Args:
        tokens: of the text to look for.
        texts: shape (texts,), uint64, sorted: the documents to look among.

    Returns:
        Fewer than `count`, or none, where no others share a telling token.
    """
    if not shards:
        return []
    terms, weights = _telling_terms(shards, tokens)
    documents = sum(len(one.index.texts) for one in shards)
    length = sum(one.index.tokens for one in shards) / max(1, documents)
    best = (
        near
        for one in shards
        for near in _best(one, _scores(one, terms, weights, length), texts, count)
    )
    found: dict[int, Nearby] = {}
    for near in sorted(best, key=lambda near: -near.score):
        found.setdefault(near.text, near)
    return list(islice(found.values(), count))


def _telling_terms(
    shards: Sequence[IndexedShard], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that are looked for and the weight of each, two arrays of one length."""
    terms = np.unique(tokens)
    total = sum(len(one.index.texts) for one in shards)
    frequency = sum(one.index.offsets[terms + 1] - one.index.offsets[terms] for one in shards)
    weights = np.log1p((total - frequency + 0.5) / (frequency + 0.5))
    is_telling = (frequency > 0) & ((frequency <= COMMON_SHARE * total) | (frequency == 1))
    terms, weights = terms[is_telling], weights[is_telling]
    rarest = np.argsort(-weights, kind="stable")[:MOST_TERMS]
    return terms[rarest], weights[rarest]


def _scores(
    shard: IndexedShard, terms: np.ndarray, weights: np.ndarray, length: float
) -> np.ndarray:
    """Shape (documents,): BM25 of each document of a shard; `length` is the mean of all."""
    index = shard.index
    first = index.offsets[terms]
    counts = index.offsets[terms + 1] - first
    places = spans(first, counts)
    documents, times = index.documents[places], index.counts[places].astype(np.float64)
    size = K1 * (1 - B + B * index.lengths[documents] / length)
    gains = np.repeat(weights, counts) * times * (K1 + 1) / (times + size)
    return np.bincount(documents, gains, len(index.texts))


def _best(shard: IndexedShard, scores: np.ndarray, wanted: np.ndarray, count: int) -> list[Nearby]:
    """The documents of a shard with the highest scores above 0, those of wanted texts, each once.

    So of a shard no more is held than may be shown, however many documents share a token.
    """
    documents = np.flatnonzero(scores)
    order = documents[np.argsort(-scores[documents], kind="stable")]
    found: dict[int, Nearby] = {}
    for one in _among(order, shard.index.texts, wanted):
        near = Nearby(shard, one, float(scores[one]))
        found.setdefault(near.text, near)
        if len(found) == count:
            break
    return list(found.values())


def _among(order: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> Iterator[int]:
    """The places of values that are among the wanted ones, which are sorted, in an order.

    Few are asked for, so they are looked up block by block.
    """
    for first in range(0, len(order) if len(wanted) else 0, _BLOCK):
        block = order[first : first + _BLOCK]
        places = np.minimum(np.searchsorted(wanted, values[block]), len(wanted) - 1)
        yield from block[wanted[places] == values[block]].tolist()
