"""The order of the data: every row once an epoch, from anywhere, under any workers and stops."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from artifacts.shards.shard_set import ShardSet
from recipes.data.reader import (
    BatchSplit,
    DataOrder,
    StepInput,
    global_rows,
    read_ahead,
    read_steps,
)
from tests.waiting import wait_until


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


BATCH = 4
SEED = 7


def reader(
    train: ShardSet, share: BatchSplit | None = None, samples_seen: int = 0
) -> Iterator[StepInput]:
    order = DataOrder(SEED, len(train))
    return read_steps(train, order, share or BatchSplit(BATCH, BATCH), samples_seen)


def rows_of(steps: list[StepInput]) -> list[int]:
    return [row for step in steps for row in step.rows.tolist()]


def test_a_run_goes_on_from_its_samples_under_other_workers(train_split: ShardSet) -> None:
    seen: list[int] = []
    for workers, steps in ((1, 5), (2, 9), (4, 3), (1, 8)):
        shares = [BatchSplit(BATCH, 2, rank, workers) for rank in range(workers)]
        readers = [reader(train_split, share, len(seen)) for share in shares]
        for _ in range(steps):
            parts = [next(part) for part in readers]
            for batch, rows in ((b, p.rows) for p in parts for b in p.batches[:1]):
                assert len(batch.tokens) <= 2
                assert batch.tokens[0].tolist() == train_split[rows[0]][0].tolist()
            seen += rows_of(parts)

    assert seen == DataOrder(SEED, len(train_split)).rows(0, 25 * BATCH).tolist()


def test_while_a_step_is_trained_on_the_next_one_is_read(train_split: ShardSet) -> None:
    read: list[StepInput] = []

    def noted() -> Iterator[StepInput]:
        for step in reader(train_split):
            read.append(step)
            yield step

    ahead = read_ahead(noted())
    first = next(ahead)
    wait_until(lambda: len(read) == 2)
    given = [first, *(next(ahead) for _ in range(9))]
    assert given == read[:10]
    assert rows_of(given) == DataOrder(SEED, len(train_split)).rows(0, 10 * BATCH).tolist()
