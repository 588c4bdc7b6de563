"""The reader: one order under any workers and stops."""

from collections.abc import Iterator

from artifacts.shards.shard_set import ShardSet
from recipes.data.reader import BatchSplit, DataOrder, StepInput, read_ahead, read_steps
from tests.waiting import wait_until

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
