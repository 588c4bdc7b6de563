"""When a text was trained on is on record, and the record says what the audit of rows says."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.shards.shard_set import ShardSet, text_numbers
from recipes.data.reader import DataOrder, RowPlan
from recipes.data.records import (
    TRAINED_NAME,
    LineageRecord,
    add_rows,
    look_up,
    read_trained,
    record_trained,
)
from recipes.settings import OrderSettings
from recipes.spec import TrainingSpec
from tests.recipes.conftest import rows_trained_on

Lesson = tuple[int, int, int, int]
"""Text, place of its token, step and row."""


def recorded(url: str, texts: np.ndarray) -> Counter[Lesson]:
    """Every token on record, as often as it is."""
    return Counter(
        (line["text"], place, line["step"], line["row"])
        for line in read_trained(url, texts).to_pylist()
        for place in range(line["start"], line["end"])
    )


def audited(shards: ShardSet, steps: dict[int, list[int]], texts: np.ndarray) -> Counter[Lesson]:
    """The same, told from the rows of each step alone."""
    firsts = [0, *shards.ends.tolist()]
    numbers = [text_numbers(shard.documents()["text_hash"].to_pylist()) for shard in shards.shards]
    return Counter(
        (int(text), int(segment["offset"]) + n, step, row)
        for step, rows in steps.items()
        for row in rows
        for segment in shards[row][1]
        for text in [numbers[np.searchsorted(firsts, row, side="right") - 1][segment["document"]]]
        if text in texts
        for n in range(segment["length"])
    )


def all_texts(shards: ShardSet) -> np.ndarray:
    return np.concatenate(
        [text_numbers(shard.documents()["text_hash"].to_pylist()) for shard in shards.shards]
    )


def test_a_run_records_at_which_step_it_trained_on_each_text(
    unbroken: TrainingSpec, train_split: ShardSet
) -> None:
    url, audit = f"{unbroken.run_folder}/{TRAINED_NAME}", rows_trained_on(unbroken)
    for texts in (all_texts(train_split), all_texts(train_split)[3:5]):
        assert recorded(url, texts) == audited(train_split, audit, texts) != Counter()
    held_out = ShardSet(unbroken.shards_folder, unbroken.shards, "held_out")
    assert read_trained(url, all_texts(held_out)).num_rows == 0


@settings(max_examples=25)
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 5), st.integers(0, 99)), min_size=1, max_size=4
    ),
    share=st.sampled_from([0.0, 0.25, 0.5]),
    few=st.integers(1, 9),
)
def test_of_any_lineage_the_record_says_what_the_audit_says(
    train_split: ShardSet,
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[tuple[int, int, int]],
    share: float,
    few: int,
) -> None:
    shards, seen = train_split, LineageRecord.none()
    texts, folder = all_texts(shards), tmp_path_factory.mktemp("lineage")
    for number, (steps, batch, seed) in enumerate(runs):
        plan = (
            RowPlan.of(look_up(shards, seen), OrderSettings(seen_share=share)) if number else None
        )
        rows = DataOrder(seed, len(shards), plan=plan).rows(0, steps * batch)
        audit = {step + 1: part.tolist() for step, part in enumerate(np.split(rows, steps))}
        url = str(folder / f"{number}.parquet")
        record_trained(shards, rows, np.repeat(np.arange(steps), batch) + 1, url)

        assert recorded(url, texts[:few]) == audited(shards, audit, texts[:few])
        seen = add_rows(seen, shards, rows)
