"""Batches of text of which some tokens are hidden, to be told from those around them."""

from dataclasses import dataclass

import numpy as np
import torch

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, ExampleBatch
from recipes.data.packed_rows import check_vocabulary

HIDDEN = -1
"""Stands for the mask token, whose id the model knows."""
MASKED_SHARE, SHOWN_AS_MASK, SHOWN_AS_ANY = 0.15, 0.8, 0.1
"""Of all tokens, those to be told; of those, shown as the mask token, and as a random one (Devlin
et al., "BERT", 2019)."""
MASK_SEED = 0x2B7E151628AED2A6


@dataclass(frozen=True)
class MaskedBatch(ExampleBatch):
    """Texts, one each row, and the tokens to be told at their places, `IGNORED` elsewhere."""

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int(self.is_input.sum())


def read_masked(
    shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None
) -> MaskedBatch:
    """Read rows, hide some of their tokens and lay each text of a row into a row of its own.

    Args:
        samples: of the run, by which the tokens are drawn, so that a row that is read again shows
            others; the row numbers where absent.

    Raises:
        DamagedArtifact: a token id lies outside the shards' vocabulary.
    """
    stored = shards.read(rows)
    check_vocabulary(shards, rows, stored.tokens)
    texts = []
    for number, sample in enumerate(rows if samples is None else samples):
        hidden, targets = hide(stored.tokens[number], shards.stats, int(sample))
        first, last = stored.row_offsets[number : number + 2]
        for segment in stored.segments[first:last]:
            place = slice(segment["start"], segment["start"] + segment["length"])
            texts.append((hidden[place], targets[place]))
    return lay_out(texts)


def hide(tokens: np.ndarray, stats: ShardStats, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """What is shown of some tokens and what is to be told, both int64; at least one is.

    Tokens that begin and end texts always stay.
    """
    tokens = tokens.astype(np.int64)
    draw, how, other = np.random.default_rng((MASK_SEED, sample)).random((3, len(tokens)))
    ends = [token for token in (stats.start_token_id, stats.end_token_id) if token is not None]
    draw[np.isin(tokens, ends)] = np.inf
    chosen = draw < max(MASKED_SHARE, np.nextafter(draw.min(), 1))
    shown = tokens.copy()
    shown[chosen & (how < SHOWN_AS_MASK)] = HIDDEN
    at_random = chosen & (how >= SHOWN_AS_MASK) & (how < SHOWN_AS_MASK + SHOWN_AS_ANY)
    shown[at_random] = (other[at_random] * stats.vocab_size).astype(np.int64)
    return shown, np.where(chosen, tokens, IGNORED)


def lay_out(texts: list[tuple[np.ndarray, np.ndarray]]) -> MaskedBatch:
    """A batch of texts as `hide` gives them, as wide as the longest."""
    shape = (len(texts), max(len(shown) for shown, _ in texts))
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    lengths = np.array([len(shown) for shown, _ in texts])
    for number, (shown, wanted) in enumerate(texts):
        tokens[number, : len(shown)], targets[number, : len(shown)] = shown, wanted
    is_input = np.arange(shape[1]) < lengths[:, None]
    return MaskedBatch(*map(torch.from_numpy, (tokens, is_input, targets)))
