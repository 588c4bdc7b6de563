"""What numpy has, but slowly, gives what numpy gives; and the memoryless shuffle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.numbers import lower_bounds, permute, sorted_unique, spans


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 8)))
def test_different_values_come_once_and_in_order(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    assert np.array_equal(sorted_unique(array), np.unique(array))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9))))
def test_stretches_are_counted_out_one_after_another(stretches: list[tuple[int, int]]) -> None:
    first, counts = np.array(stretches, np.int64).reshape(-1, 2).T
    expected = [n for begin, count in stretches for n in range(begin, begin + count)]
    assert spans(first, counts).tolist() == expected


@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 31)), st.data())
def test_a_lower_bound_is_found_within_its_bounds(
    values: list[int], wanted: list[int], data: st.DataObject
) -> None:
    ordered = np.sort(np.array(values, np.uint64))
    place = st.integers(0, len(values))
    bounds = [sorted((data.draw(place), data.draw(place))) for _ in wanted]
    first, last = np.array(bounds, np.int64).reshape(-1, 2).T
    found = lower_bounds(ordered, np.array(wanted, np.uint64), first, last)
    expected = [
        begin + int(np.searchsorted(ordered[begin:end], np.uint64(value)))
        for (begin, end), value in zip(bounds, wanted, strict=True)
    ]
    assert found.tolist() == expected


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
