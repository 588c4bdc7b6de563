"""The order of the data: every row once an epoch, replayed ones at their share, from anywhere."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.reader import DataOrder, global_rows


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = np.split(global_rows(0, 200, 100, seed=1), 2)
    other = global_rows(0, 100, 100, seed=2)
    assert first.tolist() != second.tolist()
    assert first.tolist() != other.tolist()


ORDERS = st.builds(
    DataOrder,
    seed=st.integers(0, 2**31),
    train_rows=st.integers(1, 200),
    replay_rows=st.integers(1, 50),
    replay_share=st.integers(0, 99).map(lambda percent: percent / 100),
)


@given(order=ORDERS, first=st.integers(0, 10**12), window=st.integers(1, 500))
def test_every_window_of_samples_has_the_share_of_replayed_rows_within_one(
    order: DataOrder, first: int, window: int
) -> None:
    rows = order.rows(first, window)

    replayed = int((rows >= order.train_rows).sum())
    assert abs(replayed - window * order.replay_share) <= 1
    assert replayed == order.replayed(first + window) - order.replayed(first)
    assert rows.min() >= 0 and rows.max() < order.train_rows + order.replay_rows


@given(order=ORDERS, first=st.integers(0, 1_000), pieces=st.lists(st.integers(1, 60), min_size=1))
def test_an_order_with_replay_can_be_entered_anywhere(
    order: DataOrder, first: int, pieces: list[int]
) -> None:
    whole = order.rows(first, sum(pieces))

    in_pieces = []
    for piece in pieces:
        in_pieces.extend(order.rows(first + len(in_pieces), piece).tolist())
    assert in_pieces == whole.tolist()


@given(order=ORDERS)
def test_both_kinds_of_rows_are_seen_once_before_any_is_seen_again(order: DataOrder) -> None:
    rows = order.rows(0, 400)

    train = rows[rows < order.train_rows]
    replayed = rows[rows >= order.train_rows] - order.train_rows
    for seen, count in ((train, order.train_rows), (replayed, order.replay_rows)):
        for start in range(0, len(seen) - count + 1, count):
            assert sorted(seen[start : start + count].tolist()) == list(range(count))
