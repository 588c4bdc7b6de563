"""The reader in `StatefulDataLoader`: one order under any processes, workers and stops."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.reader import BatchSplit, DataOrder, StepInput, TrainingData, load, read_ahead
from tests.waiting import wait_until

BATCH = 4
SEED = 7


@pytest.fixture
def train(shards_folder: Path, shards: ShardStats) -> ShardSet:
    return ShardSet(shards_folder, shards, "train")


def data(
    train: ShardSet, share: BatchSplit | None = None, samples_seen: int = 0, seed: int = SEED
) -> TrainingData:
    order = DataOrder(seed, len(train))
    return TrainingData(train, order, share or BatchSplit(BATCH, BATCH), "manual", samples_seen)


def rows_of(steps: list[StepInput]) -> list[int]:
    return [row for step in steps for row in step.rows.tolist()]


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_reader_processes_and_stops_change_no_row_and_no_token(
    train: ShardSet, processes: int
) -> None:
    expected = DataOrder(SEED, len(train)).rows(0, 40 * BATCH).tolist()
    loader = load(data(train), processes)
    steps = iter(loader)
    before = [next(steps) for _ in range(17)]
    state = loader.state_dict()

    resumed = load(data(train), processes)
    resumed.load_state_dict(state)
    later = iter(resumed)
    after = [next(later) for _ in range(23)]

    assert rows_of(before + after) == expected
    for step in (before[-1], after[0]):
        (batch,) = step.batches
        assert batch.tokens.tolist() == [train[row][0].tolist() for row in step.rows]


def test_a_run_goes_on_from_its_samples_under_other_workers_and_processes(train: ShardSet) -> None:
    seen: list[int] = []
    for workers, processes, steps in ((1, 0, 5), (2, 2, 9), (4, 0, 3), (1, 1, 8)):
        shares = [BatchSplit(BATCH, 2, rank, workers) for rank in range(workers)]
        readers = [iter(load(data(train, share, len(seen)), processes)) for share in shares]
        for _ in range(steps):
            parts = [next(reader) for reader in readers]
            assert all(len(batch.tokens) <= 2 for part in parts for batch in part.batches)
            seen += rows_of(parts)

    assert seen == DataOrder(SEED, len(train)).rows(0, 25 * BATCH).tolist()


def test_a_state_names_where_reading_stands_and_whose_it_is(train: ShardSet) -> None:
    reader = iter(data(train))
    for _ in range(3):
        next(reader)
    state = reader.state_dict()

    assert state == {"seed": SEED, "samples_seen": 3 * BATCH, "manifest": "manual"}
    with pytest.raises(UserError, match=r"seed 7, this run has 8"):
        iter(data(train, seed=8)).load_state_dict(state)
    with pytest.raises(UserError, match=r"manifest 'others', this run has 'manual'"):
        iter(data(train)).load_state_dict(state | {"manifest": "others"})


def test_while_a_step_is_trained_on_the_next_one_is_read(train: ShardSet) -> None:
    read: list[StepInput] = []

    def noted() -> Iterator[StepInput]:
        for step in load(data(train)):
            read.append(step)
            yield step

    ahead = read_ahead(noted())
    first = next(ahead)
    wait_until(lambda: len(read) == 2)
    given = [first, *(next(ahead) for _ in range(9))]
    assert given == read[:10]
    assert rows_of(given) == DataOrder(SEED, len(train)).rows(0, 10 * BATCH).tolist()
