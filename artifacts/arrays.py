"""What numpy has, but slowly."""

import numpy as np


def sorted_unique(values: np.ndarray) -> np.ndarray:
    """The different values of an array of shape (n,), in order.

    `numpy.unique` fills a hash table with integers since 2.3: ten times as slow for a million.
    """
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]
