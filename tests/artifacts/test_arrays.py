"""What numpy has, but slowly, gives what numpy gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from artifacts.arrays import sorted_unique


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 8)))
def test_different_values_come_once_and_in_order(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    assert np.array_equal(sorted_unique(array), np.unique(array))
