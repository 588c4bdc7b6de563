"""What a batch of packed rows looks like."""

from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import DamagedArtifact
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, PADDING_SEGMENT, read_batch


def test_targets_never_leave_a_segment_and_positions_restart_in_each(train_split: ShardSet) -> None:
    batch = read_batch(train_split, np.arange(len(train_split)))
    for place in range(len(train_split)):
        tokens, records = train_split[place]
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
    with pytest.raises(DamagedArtifact, match=r"Row \d+ of the shard train-\d+ holds token \d+"):
        read_batch(ShardSet(shards_folder, smaller, "train"), np.arange(3))
