"""What numpy has not, or only slowly."""

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
    while len(wide := np.flatnonzero(first < last)):
        middle = (first[wide] + last[wide]) // 2
        below = ordered[middle] < wanted[wide]
        first[wide] = np.where(below, middle + 1, first[wide])
        last[wide] = np.where(below, last[wide], middle)
    return first
