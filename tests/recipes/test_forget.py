"""Texts masked in place: what is forgotten teaches nothing, and nothing else changes."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from artifacts import checkpoints
from artifacts.errors import UserError
from artifacts.shards.shard_set import MaskedShardSet, ShardSet, text_numbers
from recipes.data.records import SEEN_NAME, TRAINED_NAME, LineageRecord, read_trained
from recipes.spec import TrainingSpec
from tests.recipes.conftest import SpecMaker, kill_at, train_here

STEPS = 18


@pytest.fixture(scope="module")
def first(make_spec: SpecMaker) -> TrainingSpec:
    """A finished run that kept some of its checkpoints."""
    spec = make_spec("first", steps=STEPS, checkpointing={"permanent_every_steps": 6})
    train_here(spec)
    return spec


@pytest.fixture(scope="module")
def late(first: TrainingSpec) -> tuple[str, int]:
    """A text that the run was trained on late for the first time, and at which step."""
    shards = ShardSet(first.shards_folder, first.shards, "train")
    texts = [text for s in shards.shards for text in s.documents()["text_hash"].to_pylist()]
    steps = {text: steps_of(first, text) for text in texts}
    return next((text, found[0]) for text, found in steps.items() if found and 8 < found[0] <= 12)


def steps_of(spec: TrainingSpec, text: str) -> list[int]:
    found = read_trained(f"{spec.run_folder}/{TRAINED_NAME}", text_numbers([text]))
    return sorted(found["step"].to_pylist())


def without(spec: TrainingSpec, text: str, name: str, **changes: object) -> TrainingSpec:
    """The same run in folders of its own, with a text masked."""
    folder = Path(spec.run_folder).parent.parent / name
    update = {
        "run_id": name,
        "run_folder": str(folder / "run"),
        "export_folder": str(folder / "model"),
        "masked": (text,),
        "order_inputs": spec.inputs,
        "inputs": spec.inputs | {"masked": name.split("-")[0]},
    }
    return spec.model_copy(update=update | changes)


def weights(spec: TrainingSpec) -> bytes:
    return (Path(spec.export_folder) / "model.safetensors").read_bytes()


def begin_late(spec: TrainingSpec, before: TrainingSpec, step: int) -> None:
    """Begin where the earlier run stood before it met the text."""
    taken = checkpoints.adopt(before.run_folder, spec.run_folder, step, spec.content())
    assert taken == 6


def test_masked_rows_keep_their_places(first: TrainingSpec, late: tuple[str, int]) -> None:
    plain = ShardSet(first.shards_folder, first.shards, "train")
    masked = MaskedShardSet(first.shards_folder, first.shards, [late[0]], "train")
    every = np.arange(len(plain))
    before, after = plain.read(every), masked.read(every)
    changed = np.flatnonzero((before.tokens != after.tokens).any(axis=1))
    trained = pq.read_table(f"{first.run_folder}/{TRAINED_NAME}")
    assert 0 < len(changed) < 10 and len(trained)
    assert set(after.tokens[before.tokens != after.tokens]) == {first.shards.end_token_id}
    lengths = [int(rows.segments["length"].sum()) for rows in (before, after)]
    listed = [row for s in plain.shards for row in s.documents().to_pylist()]
    (size,) = (row["tokens"] for row in listed if row["text_hash"] == late[0])
    assert lengths[0] - lengths[1] == size


def test_forgetting_late_is_to_the_bit_as_never_having_read_it(
    first: TrainingSpec, late: tuple[str, int]
) -> None:
    text, step = late
    scratch = without(first, text, "same-scratch")
    train_here(scratch)
    assert weights(scratch) != weights(first)

    again = without(first, text, "same-late")
    begin_late(again, first, step)
    kill_at(again, step + 2)
    train_here(again)

    assert weights(again) == weights(scratch)
    assert steps_of(again, text) == [] != steps_of(first, text)
    seen = LineageRecord.read(f"{again.run_folder}/{SEEN_NAME}")
    assert not np.isin(seen.texts, text_numbers([text])).any()


def test_a_checkpoint_is_adopted_once_and_none_that_is_too_late(
    first: TrainingSpec, late: tuple[str, int]
) -> None:
    spec = without(first, late[0], "adopted-once")
    assert checkpoints.adopt(first.run_folder, spec.run_folder, 6, spec.content()) is None
    # Copying one was interrupted.
    Path(checkpoints.step_url(spec.run_folder, 6)).mkdir(parents=True)
    begin_late(spec, first, late[1])
    # Killed before it trained, it goes on from the same.
    assert checkpoints.adopt(first.run_folder, spec.run_folder, 99, spec.content()) == 6


def test_forgotten_validation_text_is_no_perfect_score(make_spec: SpecMaker) -> None:
    spec = make_spec("nothing to validate on", steps=2)
    shards = ShardSet(spec.shards_folder, spec.shards, "validation")
    texts = [text for s in shards.shards for text in s.documents()["text_hash"].to_pylist()]
    with pytest.raises(UserError, match=r"validation rows .* forgotten.*tokenized_shards"):
        erased = spec.shards.model_copy(update={"erased": texts})
        train_here(spec.model_copy(update={"shards": erased}))
    # Once more without what was forgotten, a run is made by the old shards, and nothing is said.
    again = make_spec("once more", steps=2).model_copy(update={"masked": tuple(texts)})
    assert train_here(again).steps == 2
