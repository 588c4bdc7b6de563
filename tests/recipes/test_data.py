"""The order of the data, and what a batch of packed rows looks like."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import DamagedArtifact
from artifacts.shards import ShardSet, ShardStats
from recipes.batch import IGNORED, PADDING_SEGMENT
from recipes.data import global_rows, read_batch, worker_share


@settings(deadline=None)
@given(
    rows=st.integers(1, 300),
    workers=st.sampled_from([1, 2, 4]),
    stops=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_any_stops_and_any_workers_see_each_row_once_an_epoch(
    rows: int, workers: int, stops: list[int], seed: int
) -> None:
    batch = 4
    seen: list[int] = []
    for steps in stops:
        for _ in range(steps):
            chosen = global_rows(len(seen), batch, rows, seed)
            for rank in range(workers):
                seen.extend(worker_share(chosen, rank, workers))
    unbroken = global_rows(0, len(seen), rows, seed)
    assert seen == unbroken.tolist()
    for start in range(0, len(seen) - rows + 1, rows):
        assert sorted(seen[start : start + rows]) == list(range(rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = np.split(global_rows(0, 200, 100, seed=1), 2)
    other = global_rows(0, 100, 100, seed=2)
    assert first.tolist() != second.tolist()
    assert first.tolist() != other.tolist()


@pytest.fixture
def train(shards_folder: Path, shards: ShardStats) -> ShardSet:
    return ShardSet(shards_folder, shards, "train")


def test_targets_never_leave_a_segment_and_positions_restart_in_each(train: ShardSet) -> None:
    batch = read_batch(train, np.arange(len(train)))
    for place in range(len(train)):
        tokens, records = train[place]
        covered = np.zeros(len(tokens), bool)
        for start, length, _, _ in records:
            end = start + length
            covered[start:end] = True
            assert batch.positions[place, start:end].tolist() == list(range(length))
            assert batch.targets[place, start : end - 1].tolist() == list(tokens[start + 1 : end])
            assert batch.targets[place, end - 1] == IGNORED
        assert (batch.targets[place][~covered] == IGNORED).all()
        assert (batch.segments[place][~covered] == PADDING_SEGMENT).all()


def test_a_token_outside_the_vocabulary_is_refused_with_its_row(
    shards_folder: Path, shards: ShardStats
) -> None:
    smaller = shards.model_copy(update={"vocab_size": 50})
    with pytest.raises(DamagedArtifact, match=r"Row \d+ of the train split holds token \d+"):
        read_batch(ShardSet(shards_folder, smaller, "train"), np.arange(3))
