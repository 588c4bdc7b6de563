"""What numpy has not, or only slowly, and a random order by arithmetic alone."""

import numpy as np


def run_starts(ordered: np.ndarray) -> np.ndarray:
    """Shape (n,): whether each value of an array of shape (n,) differs from the one before it."""
    starts = np.ones(len(ordered), bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return starts


def sorted_unique(values: np.ndarray) -> np.ndarray:
    """The different values of an array of shape (n,), in order.

    `numpy.unique` fills a hash table with integers since 2.3: ten times as slow for a million.
    """
    ordered = np.sort(values)
    return ordered[run_starts(ordered)]


def ends_of(counts: np.ndarray) -> np.ndarray:
    """Offsets of stretches of shape (n,) that lie one after another: shape (n + 1,)."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def spans(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The indices `first[n] … first[n] + counts[n] - 1` of every stretch, one after another."""
    offsets = ends_of(counts)
    return np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)


def lower_bounds(
    ordered: np.ndarray, wanted: np.ndarray, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """Shape (n,): where in `ordered[first[n]:last[n]]` each wanted value would be inserted.

    `numpy.searchsorted` looks for all of them in the whole, which touches more of a mapped file.
    """
    first, last = first.copy(), last.copy()
    # All binary searches side by side; those are left whose range is not empty yet.
    while len(wide := np.flatnonzero(first < last)):
        middle = (first[wide] + last[wide]) // 2
        below = ordered[middle] < wanted[wide]
        first[wide] = np.where(below, middle + 1, first[wide])
        last[wide] = np.where(below, last[wide], middle)
    return first


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 by the golden ratio: its multiples lie far from each other."""
ROUNDS = 6


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), which spreads every bit."""
    # Products are to wrap around at 2**64, of which numpy does not warn where they are arrays.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Positions that a keyed pseudo-random permutation of `range(size)` gives to `indices`; raises
    ValueError where one is outside.

    A balanced Feistel network over the next even power of two, with cycle walking back into the
    range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Any element is found
    without those before it, so an order of any length can be entered anywhere.
    Indices are of any shape, and another key is another order.
    """
    values = np.asarray(indices, np.uint64)
    if size < 1 or (values.size and int(values.max()) >= size):
        raise ValueError(f"indices must lie in range({size})")
    # Two halves of equal size, rounded up, so that together they hold every index.
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.uint64(key & 0xFFFFFFFFFFFFFFFF) + np.arange(1, ROUNDS + 1, dtype=np.uint64)
    keys = mix(keys * GOLDEN)
    result = _encrypt(values, half_bits, keys)
    # The network permutes at most four times `size` numbers, so few steps lead back into the range.
    while (outside := result >= size).any():
        result[outside] = _encrypt(result[outside], half_bits, keys)
    return result.astype(np.int64)


def _encrypt(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix((right + key) * GOLDEN) & mask)
    return (left << shift) | right
