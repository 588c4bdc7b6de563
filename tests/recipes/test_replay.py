"""Training with replayed rows: their share is kept, counted, and the same after a stop."""

from pathlib import Path

import pytest

from artifacts.errors import UserError
from recipes.data.reader import DataOrder
from recipes.spec import TrainingSpec, read_metrics, read_result, total_steps
from tests.recipes.conftest import SpecMaker, rows_trained_on, settings_of, stop_here, train_here

STEPS = 30
STOPPED_AT = 7


def with_replay(make_spec: SpecMaker, name: str, share: float) -> TrainingSpec:
    """A run whose second train shard is general text to replay."""
    settings = {"replay_share": share, "steps": STEPS, "audit_rows": True}
    saving, validation = {"every_steps": 5}, {"every_steps": STOPPED_AT}
    spec = make_spec(name, checkpointing=saving, validation=validation, **settings)
    shards = spec.shards.model_copy(deep=True)
    next(shard for shard in shards.shards if shard.name == "train-00001").split = "replay"
    return spec.model_copy(update={"shards": shards})


def test_the_share_is_kept_and_counted_through_an_interruption(make_spec: SpecMaker) -> None:
    spec = with_replay(make_spec, "replay", 0.3)
    stop_here(spec, STOPPED_AT)
    train_here(spec)

    order = DataOrder.of(spec)
    seen = rows_trained_on(spec)
    rows = [row for step in sorted(seen) for row in seen[step]]
    assert rows == order.rows(0, STEPS * 4).tolist()
    replayed = sum(row >= order.train_rows for row in rows)
    result = read_result(Path(spec.run_folder))
    assert result and replayed == result.samples_replayed == 0.3 * STEPS * 4
    assert read_metrics(Path(spec.run_folder))[-1]["samples_replayed"] == replayed


def test_a_share_of_text_that_is_not_there_is_refused(make_spec: SpecMaker) -> None:
    spec = make_spec("no_replay", replay_share=0.2)

    with pytest.raises(UserError, match=r"no rows to replay.*clean_corpus.split.sources"):
        train_here(spec)


def test_budgets_count_replayed_rows_as_tokens_but_not_as_passes(make_spec: SpecMaker) -> None:
    spec = with_replay(make_spec, "budget", 0.5)
    shards = spec.shards
    sizes = {
        split: [shard for shard in shards.shards if shard.split == split]
        for split in ("train", "replay")
    }
    (train_shard,), (replay_shard,) = sizes["train"], sizes["replay"]

    epoch = settings_of(epochs=1, replay_share=0.5, global_batch_size=2)
    assert total_steps(epoch, shards) == train_shard.rows
    tokens = train_shard.tokens / train_shard.rows + replay_shard.tokens / replay_shard.rows
    budget = settings_of(tokens=1_000, replay_share=0.5, global_batch_size=2)
    assert total_steps(budget, shards) == -(-1_000 // tokens)
