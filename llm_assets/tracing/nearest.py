"""The trained texts nearest to an answer, by BM25 over the model's own tokens.

For a long text, only the most telling tokens are searched, those in the fewest documents, as in
Lucene's MoreLikeThis: the others are in so many documents that they decide little and cost most.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from artifacts.numbers import spans
from llm_assets.tracing.training_text import IndexedShard, TrainingText

K1, B = 1.5, 0.75
"""Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009)."""
COMMON_SHARE = 0.2
"""A token in more than this share of the documents says nothing about any of them."""
MOST_TERMS = 32
"""Different tokens of a text that are looked for."""
_BLOCK = 1_024
"""Documents that are looked up at a time, to see whether they were trained on."""


def find_nearest(text: TrainingText, tokens: np.ndarray, count: int) -> dict[int, float]:
    """The trained texts nearest to these tokens, best first, with their scores.

    How telling a token is depends on all documents of the shards.

    Returns:
        Texts as `artifacts.shards.shard_set` numbers them: fewer than `count`, or none, where no
        others share a telling token. Scores are those of BM25, comparable within one search.
    """
    shards = text.shards
    terms, weights = _telling_terms(shards, tokens)
    documents = sum(len(shard.index.texts) for shard in shards)
    length = sum(shard.index.tokens for shard in shards) / max(1, documents)
    best = [
        near
        for shard in shards
        for near in _best(shard, _scores(shard, terms, weights, length), text.texts, count)
    ]
    scores: dict[int, float] = {}
    for number, score in sorted(best, key=lambda near: -near[1]):
        scores.setdefault(number, score)
    return dict(islice(scores.items(), count))


def _telling_terms(
    shards: Sequence[IndexedShard], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to search for and the weight of each: two arrays of the same length."""
    terms = np.unique(tokens)
    total = sum(len(shard.index.texts) for shard in shards)
    frequency = sum(shard.index.offsets[terms + 1] - shard.index.offsets[terms] for shard in shards)
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


def _best(
    shard: IndexedShard, scores: np.ndarray, trained_texts: np.ndarray, count: int
) -> list[tuple[int, float]]:
    """The trained texts of a shard with the highest scores above 0, each once, with these scores.

    No more of them are kept than can be shown, however many documents share a token.
    """
    documents = np.flatnonzero(scores)
    order = documents[np.argsort(-scores[documents], kind="stable")]
    score_of: dict[int, float] = {}
    # `count` is small, so usually the first blocks suffice. `trained_texts` is sorted.
    for first in range(0, len(order) if len(trained_texts) else 0, _BLOCK):
        block = order[first : first + _BLOCK]
        texts = shard.index.texts[block]
        places = np.minimum(np.searchsorted(trained_texts, texts), len(trained_texts) - 1)
        is_wanted = trained_texts[places] == texts
        for text, place in zip(texts[is_wanted].tolist(), block[is_wanted].tolist(), strict=True):
            score_of.setdefault(text, float(scores[place]))
        if len(score_of) >= count:
            break
    return list(islice(score_of.items(), count))
