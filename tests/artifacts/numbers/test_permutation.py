"""The memoryless shuffle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.numbers import permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_every_element_comes_exactly_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


@given(size=st.integers(1, 10**12), key=st.integers(0, 2**63), data=st.data())
def test_an_element_does_not_depend_on_those_asked_with_it(
    size: int, key: int, data: st.DataObject
) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permute(indices, size, key)
    assert [int(permute(indices[n : n + 1], size, key)[0]) for n in range(len(indices))] == list(
        together
    )


def test_another_key_is_another_order_and_no_order_is_the_identity() -> None:
    orders = [permute(np.arange(1000), 1000, key) for key in range(5)]
    assert len({order.tobytes() for order in orders}) == 5
    for order in orders:
        # A random order keeps one element in place on average.
        assert (order == np.arange(1000)).sum() < 10
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


def test_an_index_outside_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range\(10\)"):
        permute(np.array([10]), 10, key=0)
