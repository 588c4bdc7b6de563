"""What models were trained on is known token by token, and the next run goes by it."""

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.shards.format import ShardEntry, ShardStats
from artifacts.shards.shard_set import ShardSet, text_numbers
from recipes.data.reader import DataOrder, RowPlan
from recipes.data.records import (
    SEEN_NAME,
    TRAINED_NAME,
    LineageRecord,
    RowCounts,
    add_rows,
    look_up,
    read_trained,
    record_seen,
    record_trained,
)
from recipes.sections import OrderSettings
from recipes.settings import training_settings
from recipes.spec import TrainingSpec, total_steps
from tests.recipes.conftest import SpecMaker, rows_trained_on, train_here
from tests.tiny import tiny_shards, tiny_texts

STRETCHES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 12)), max_size=12
)


@given(batches=st.lists(STRETCHES, max_size=4), asked=STRETCHES)
def test_every_token_is_counted_as_often_as_it_was_seen(
    batches: list[list[tuple[int, int, int]]], asked: list[tuple[int, int, int]]
) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    seen = LineageRecord.none()
    for batch in batches:
        seen = seen.plus(*columns(batch))
        counts.update((text, start + n) for text, start, length in batch for n in range(length))

    recorded = Counter(
        {
            (int(text), place): int(times)
            for text, start, end, times in zip(
                seen.texts, seen.starts, seen.ends, seen.times, strict=True
            )
            for place in range(start, end)
        }
    )
    assert recorded == counts
    bounds = list(zip(seen.texts, seen.starts, seen.ends, seen.times, strict=True))
    for (text, _, end, times), (text_after, start, _, times_after) in itertools.pairwise(bounds):
        assert (text, end, times) != (text_after, start, times_after), "one stretch cut in two"
    assert seen.tokens(*columns(asked)).tolist() == [
        sum((text, start + n) in counts for n in range(length)) for text, start, length in asked
    ]


def columns(stretches: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    texts, starts, lengths = np.array(stretches, np.int64).reshape(-1, 3).T
    return texts.astype(np.uint64), starts, starts + lengths


def grow(spec: TrainingSpec, folder: Path, documents: int, number: int) -> TrainingSpec:
    """The spec on shards that new documents have come to, in a slice of their own."""
    shutil.copytree(spec.shards_folder, folder)
    texts = tiny_texts(documents, seed=100 + number)
    stats = tiny_shards(folder / "new", Path(spec.base_model_folder), texts, shards_per_split=1)
    (entry,) = [shard for shard in stats.shards if shard.split == "train"]
    name = f"train-{10 + number:05d}"
    for file in (folder / "new").glob(f"{entry.name}.*"):
        file.rename(folder / f"{name}{file.name.removeprefix(entry.name)}")
    documents_file = folder / f"{name}.documents.parquet"
    table = pq.read_table(documents_file)
    hashes = pa.array([f"slice {number}, {one}" for one in table["text_hash"].to_pylist()])
    table = table.set_column(5, "text_hash", hashes)
    table = table.set_column(6, "slice", pa.array([number] * len(table), pa.int64()))
    pq.write_table(table, documents_file)
    entries = [*spec.shards.shards, entry.model_copy(update={"name": name})]
    shards = spec.shards.model_copy(update={"shards": entries})
    return spec.model_copy(update={"shards_folder": str(folder), "shards": shards})


def test_weekly_runs_take_new_text_first_and_share_no_more_tokens_than_the_settings_say(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    steps, shares = 12, 0.25
    order = {"new_first": True, "seen_share": shares}
    first = make_spec("week-1", steps=steps, audit_rows=True, order=order)
    results = [train_here(first)]
    specs = [first]
    for week in (2, 3):
        spec = make_spec(f"week-{week}", steps=steps, audit_rows=True, order=order)
        spec = spec.model_copy(
            update={
                "shards_folder": specs[-1].shards_folder,
                "shards": specs[-1].shards,
                "seen": f"{specs[-1].run_folder}/{SEEN_NAME}",
                "inputs": {"base_model": "tiny", "tokenized_shards": f"week {week}"},
            }
        )
        specs.append(grow(spec, tmp_path / str(week), 4, week))
        results.append(train_here(specs[-1]))

    for spec, result, before in zip(specs[1:], results[1:], results, strict=False):
        shards = ShardSet(spec.shards_folder, spec.shards, "train")
        rows = look_up(shards, LineageRecord.read(str(spec.seen)))
        chosen = DataOrder.of(spec, rows).rows(0, steps * 4)
        most = shares * len(chosen) * spec.shards.sequence_length
        assert 0 < rows.seen[chosen].sum() == result.tokens_seen_before <= most
        newest = np.flatnonzero(rows.slices == rows.slices.max())
        fresh = chosen[rows.seen[chosen] == 0]
        assert set(fresh[: len(newest)].tolist()) == set(newest.tolist())
        assert before.coverage < result.coverage < 1
    assert results[0].tokens_seen_before == 0


def test_weeks_do_not_repeat_each_other_by_accident(
    make_spec: SpecMaker, train_split: ShardSet
) -> None:
    spec, rows = make_spec("accident", steps=2), len(train_split)
    other = spec.model_copy(update={"inputs": {"tokenized_shards": "another week"}})

    ours, theirs = (set(DataOrder.of(one).rows(0, 100).tolist()) for one in (spec, other))

    assert abs(len(ours & theirs) - 100 * 100 / rows) < 25


def test_all_rows_come_once_all_new_text_is_known(train_split: ShardSet) -> None:
    shards = train_split
    half = np.arange(0, len(shards), 2)
    seen = add_rows(LineageRecord.none(), shards, half)
    plan = RowPlan.of(look_up(shards, seen), OrderSettings(seen_share=0.5))
    order = DataOrder(seed=3, train_rows=len(shards), plan=plan)

    fresh = sum(map(len, plan.fresh))
    rows = order.rows(0, 2 * fresh)
    is_fresh = np.isin(rows, np.concatenate(plan.fresh))
    assert is_fresh.sum() == fresh == len(set(rows[is_fresh].tolist()))
    assert set(order.rows(0, 4 * len(shards)).tolist()) == set(range(len(shards)))
    pieces = [order.rows(first, 7) for first in range(0, 700, 7)]
    assert np.concatenate(pieces).tolist() == order.rows(0, 700).tolist()


def test_rows_of_which_little_was_seen_are_still_new() -> None:
    """As after an early document was edited: every later row overlaps two of the rows before."""
    tokens = np.full(4, 100)
    rows = RowCounts(tokens, np.array([0, 49, 50, 100]), np.zeros(4, np.int64))
    plan = RowPlan.of(rows, OrderSettings())
    assert np.concatenate(plan.fresh).tolist() == [0, 1] and plan.seen.tolist() == [2, 3]
    before = RowPlan.of(rows, OrderSettings(), row_order=1)
    assert np.concatenate(before.fresh).tolist() == [0], "as a run of an earlier release had it"


def test_a_pass_is_over_all_rows_where_none_is_new_and_each_pass_over_the_new_ones() -> None:
    tokens, slices = np.full(1000, 10), np.zeros(1000, np.int64)
    known = RowPlan.of(RowCounts(tokens, tokens, slices), OrderSettings(seen_share=0.25))
    order = DataOrder(seed=3, train_rows=1000, plan=known)
    assert sorted(order.rows(0, 1000).tolist()) == list(range(1000))

    seen = np.where(np.arange(1000) < 100, 0, 10)
    rows = RowCounts(tokens, seen, slices)
    order = DataOrder(3, 1000, plan=RowPlan.of(rows, OrderSettings(seen_share=0.25), passes=2))
    read = np.bincount(order.rows(0, math.ceil(2 * 100 / 0.75)), minlength=1000)
    assert read[:100].tolist() == [2] * 100


def test_coverage_counts_each_text_once_however_many_copies_the_shards_hold(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    """As those of a source with a weight of 10, such as `study`."""
    folder = tmp_path / "copies"
    spec = grow(make_spec("copies", steps=1), folder, 4, 2)
    *others, few = [one for one in spec.shards.shards if one.split == "train"]
    copies = [few.model_copy(update={"name": f"{few.name}-{number}"}) for number in range(9)]
    for copy in copies:
        for file in [*folder.glob(f"{few.name}.*")]:
            shutil.copy(file, folder / f"{copy.name}{file.name.removeprefix(few.name)}")
    stats = spec.shards.model_copy(update={"shards": [*others, few, *copies]})
    shards, nothing = ShardSet(folder, stats, "train"), LineageRecord.none()
    known, own = look_up(shards, nothing), sum(one.rows for one in others)
    of_others, all_tokens = (sum(one.tokens for one in part) for part in (others, [*others, few]))

    def coverage(rows: np.ndarray, masked: Sequence[str] = ()) -> float:
        return record_seen(shards, known, nothing, rows, str(tmp_path / SEEN_NAME), masked)[0]

    copied = np.arange(own, len(shards))
    assert (
        coverage(copied) == coverage(copied[: few.rows]) == pytest.approx(few.tokens / all_tokens)
    )
    assert coverage(np.arange(own)) == pytest.approx(of_others / all_tokens)
    assert 0 < coverage(np.arange(own // 2)) < 0.8 * of_others / all_tokens
    assert coverage(np.arange(own + few.rows)) == coverage(np.arange(len(shards))) == 1
    gone = pq.read_table(folder / f"{few.name}.documents.parquet")["text_hash"].to_pylist()
    assert coverage(np.arange(own), gone) == 1, "what is masked is not left to read"


def test_workers_look_up_a_part_each_and_together_all(train_split: ShardSet) -> None:
    seen = add_rows(LineageRecord.none(), train_split, np.arange(0, len(train_split), 3))
    whole = look_up(train_split, seen)
    parts = [look_up(train_split, seen, rank, 2) for rank in range(2)]
    assert all((part.tokens == 0).any() for part in parts)
    for column, of_parts in zip(whole, zip(*parts, strict=True), strict=True):
        assert (sum(of_parts) == column).all()


def test_an_epoch_of_a_model_that_goes_on_is_one_over_what_it_has_not_seen() -> None:
    entry = ShardEntry(name="train-0", split="train", rows=1000, tokens=64_000, documents=1)
    stats = ShardStats.model_construct(shards=[entry])
    settings = training_settings({"budget": {"epochs": 1}, "order": {"seen_share": 0.25}})
    assert total_steps(settings, stats) == total_steps(settings, stats, 1000) == 250
    assert total_steps(settings, stats, 30) == 10, "30 new rows, and 10 that were seen"
    assert total_steps(settings, stats, 0) == 250, "nothing is new: a pass over all"


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
