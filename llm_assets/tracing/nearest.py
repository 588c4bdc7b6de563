"""The documents nearest to a text by BM25, over the model's own tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_assets.tracing.indexed import IndexedShard

K1, B = 1.5, 0.75
"""Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009)."""
COMMON_SHARE = 0.2
"""A token that this share of the documents has says nothing about any of them."""


@dataclass(frozen=True)
class Nearby:
    """A document and how near it is."""

    shard: IndexedShard
    document: int
    """Its number in the shard."""
    score: float
    """Of BM25; comparable within one search."""


def find_nearest(
    shards: Sequence[IndexedShard], tokens: np.ndarray, texts: np.ndarray, count: int
) -> list[Nearby]:
    """The nearest documents among some texts, best first; none where no telling token is shared.

    Args:
        tokens: of the text to look for.
        texts: shape (texts,), uint64, sorted: the documents to look among.
    """
    chosen = [_is_among(one.index.texts, texts) for one in shards]
    total = sum(int(mask.sum()) for mask in chosen)
    if not total:
        return []
    length = sum(int(s.index.lengths[m].sum()) for s, m in zip(shards, chosen, strict=True)) / total
    terms = np.unique(tokens)
    frequency = np.zeros(len(terms))
    scores = []
    for shard, mask in zip(shards, chosen, strict=True):
        frequency += [mask[_documents(shard, term)[0]].sum() for term in terms.tolist()]
    weights = np.log1p((total - frequency + 0.5) / (frequency + 0.5))
    weights[(frequency == 0) | ((frequency > COMMON_SHARE * total) & (frequency > 1))] = 0
    for shard, mask in zip(shards, chosen, strict=True):
        of_shard = np.zeros(len(mask), np.float32)
        for term, weight in zip(terms.tolist(), weights.tolist(), strict=True):
            if weight:
                documents, counts = _documents(shard, term)
                size = K1 * (1 - B + B * shard.index.lengths[documents] / length)
                of_shard[documents] += weight * counts * (K1 + 1) / (counts + size)
        scores.append(np.where(mask, of_shard, 0))
    best = [
        Nearby(shard, int(number), float(of_shard[number]))
        for shard, of_shard in zip(shards, scores, strict=True)
        for number in _best(of_shard, count)
    ]
    return sorted(best, key=lambda one: -one.score)[:count]


def _is_among(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Shape of the values: whether each is one of the ordered ones.

    `numpy.isin` would sort both.
    """
    places = np.minimum(np.searchsorted(ordered, values), max(len(ordered) - 1, 0))
    return np.asarray(ordered[places] == values) if len(ordered) else np.zeros(len(values), bool)


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """The numbers of the highest scores above 0, best first, of equal ones the first."""
    least = np.partition(scores, -count)[-count] if len(scores) > count else 0
    found = np.flatnonzero((scores >= least) & (scores > 0))
    return found[np.argsort(-scores[found], kind="stable")[:count]]


def _documents(shard: IndexedShard, term: int) -> tuple[np.ndarray, np.ndarray]:
    first, last = shard.index.offsets[term : term + 2]
    return shard.index.documents[first:last], shard.index.counts[first:last].astype(np.float32)
