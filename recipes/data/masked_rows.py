"""Batches of text of which some tokens are hidden, to be told from those around them."""

from dataclasses import replace

import numpy as np
import torch

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch
from recipes.data.packed_rows import read_batch

HIDDEN = -1
"""Stands for the mask token, whose id the model knows."""
MASKED_SHARE, SHOWN_AS_MASK, SHOWN_AS_ANY = 0.15, 0.8, 0.1
"""Of all tokens, those to be told; of those, shown as the mask token, and as a random one (Devlin
et al., "BERT", 2019)."""
MASK_SEED = 0x2B7E151628AED2A6


def read_masked(shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None) -> Batch:
    """Read rows and hide some of their tokens, which are the targets at their own places.

    Args:
        samples: of the run, by which the tokens are drawn, so that a row that is read again shows
            others; the row numbers where absent.

    Raises:
        DamagedArtifact: a token id lies outside the shards' vocabulary.
    """
    batch = read_batch(shards, rows)
    drawn = [
        hide(tokens, shards.stats, int(sample))
        for tokens, sample in zip(
            batch.tokens.numpy(), rows if samples is None else samples, strict=True
        )
    ]
    shown, targets = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
    padding = batch.segments == PADDING_SEGMENT
    return replace(batch, tokens=shown, targets=targets.masked_fill(padding, IGNORED))


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


def lay_out(texts: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """A batch of texts as `hide` gives them, one each row, as wide as the longest."""
    lengths = np.array([len(shown) for shown, _ in texts])
    shape = (len(texts), int(lengths.max()))
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    for number, (shown, wanted) in enumerate(texts):
        tokens[number, : len(shown)], targets[number, : len(shown)] = shown, wanted
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    segments = np.where(positions < lengths[:, None], 0, PADDING_SEGMENT)
    return Batch(*map(torch.from_numpy, (tokens, targets, positions, segments)))


def one_text_each_row(batch: Batch) -> Batch:
    """The same texts in the same order, each in a row of its own; as it is where it holds none."""
    is_text = batch.segments != PADDING_SEGMENT
    if not is_text.any():
        return batch
    places = batch.positions[is_text].long()
    rows = (places == 0).cumsum(0) - 1
    shape = (int(rows[-1]) + 1, int(places.max()) + 1)

    def moved(values: torch.Tensor, elsewhere: int) -> torch.Tensor:
        found = values.new_full(shape, elsewhere)
        found[rows, places] = values[is_text]
        return found

    return Batch(
        moved(batch.tokens, 0),
        moved(batch.targets, IGNORED),
        moved(batch.positions, 0),
        moved(torch.zeros_like(batch.segments), PADDING_SEGMENT),
    )
