"""What numpy has, but slowly, gives what numpy gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from artifacts.numbers import lower_bounds, sorted_unique, spans


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
