"""A shuffle that needs no memory: the n-th element of a random order, by arithmetic alone."""

import numpy as np

ROUNDS = 6


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Positions that a keyed pseudo-random permutation of `range(size)` gives to `indices`.

    A balanced Feistel network over the next even power of two, with cycle walking back into the
    range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Any element is found
    without those before it, so an order of any length can be entered anywhere.

    Args:
        indices: integers in `range(size)`, any shape.
        size: how many elements are permuted.
        key: another key is another order.

    Raises:
        ValueError: an index is outside the range.
    """
    values = np.asarray(indices, np.uint64)
    if size < 1 or (values.size and int(values.max()) >= size):
        raise ValueError(f"indices must lie in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _mix(np.uint64(key & 0xFFFFFFFFFFFFFFFF) + np.arange(1, ROUNDS + 1, dtype=np.uint64))
    result = _encrypt(values, half_bits, keys)
    while (outside := result >= size).any():
        result[outside] = _encrypt(result[outside], half_bits, keys)
    return result.astype(np.int64)


def _encrypt(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
