"""When a run trained on what: `trained.parquet`, one record for each stretch of text and step.

`recipes.data.seen` says what a whole lineage has seen; this says of one run which stretch of which
text was in which step, and in which row. Steps whose gradient was not used, and those after the
weights that were exported, taught the model nothing and are not in it. Texts are known by the hash
that `seen` knows them by, so the record holds when the shards are gone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.numbers.arrays import run_starts, spans
from artifacts.shards.shard_set import ShardSet
from artifacts.shards.texts import text_numbers
from artifacts.storage import files
from recipes.data.seen import stretches_of

TRAINED_NAME = "trained.parquet"
TRAINED_SCHEMA = pa.schema(
    [
        ("text", pa.uint64()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("step", pa.int32()),
        ("row", pa.int64()),
    ]
)
"""Ordered by `text`, then `step`: the stretch's first token in its text, the first one past it, the
optimizer step counted from 1, and the row's number among those of the run, replayed rows last."""
_RECORDS_IN_GROUP = 8_192


def record_trained(
    shards: ShardSet,
    rows: np.ndarray,
    steps: np.ndarray,
    path: str,
    masked: Sequence[str] = (),
) -> None:
    """Write the record of a run.

    Args:
        shards: the splits that the run took rows from.
        rows: shape (samples,), row numbers in these shards.
        steps: shape (samples,), the step that trained on each.
        path: a local file.
        masked: texts that were masked in these rows, by their `text_hash`.
    """
    columns = [np.concatenate(parts) for parts in zip(*_by_shard(shards, rows, steps), strict=True)]
    order = np.lexsort((columns[4], columns[1], columns[3], columns[0]))
    order = order[~np.isin(columns[0][order], text_numbers(masked))]
    table = pa.table([column[order] for column in columns], names=TRAINED_SCHEMA.names)
    pq.write_table(
        table.cast(TRAINED_SCHEMA), path, row_group_size=_RECORDS_IN_GROUP, compression="zstd"
    )


def _by_shard(
    shards: ShardSet, rows: np.ndarray, steps: np.ndarray
) -> Iterator[tuple[np.ndarray, ...]]:
    numbers, first = np.searchsorted(shards.ends, rows, side="right"), 0
    for place, shard in enumerate(shards.shards):
        chosen = numbers == place
        local = rows[chosen] - first
        counts = shard.row_offsets[local + 1] - shard.row_offsets[local]
        of_samples = (np.repeat(part[chosen], counts) for part in (steps, rows))
        yield (*stretches_of(shard, local), *of_samples)
        first += shard.entry.rows


def read_trained(url: str, texts: Sequence[int] | np.ndarray) -> pa.Table:
    """The records of some texts, of `TRAINED_SCHEMA`; parts of the file without one are not read.

    Args:
        url: of `trained.parquet`.
        texts: as `artifacts.shards.texts` numbers them.
    """
    wanted = np.unique(np.asarray(texts, np.uint64))
    with files.open_file(url) as file:
        parquet = pq.ParquetFile(file)
        groups = [
            number
            for number in range(parquet.num_row_groups)
            if _may_hold(parquet.metadata.row_group(number).column(0).statistics, wanted)
        ]
        table = parquet.read_row_groups(groups)
    return records_of(table, wanted)


def open_trained(url: str) -> pa.Table:
    """All records of a run, of `TRAINED_SCHEMA`: 28 bytes each, for who asks for many texts."""
    with files.open_file(url) as file:
        return pq.ParquetFile(file).read().combine_chunks()


def records_of(table: pa.Table, texts: Sequence[int] | np.ndarray) -> pa.Table:
    """The records of some texts, out of records in the order of the file."""
    ordered, wanted = table["text"].to_numpy(), np.unique(np.asarray(texts, np.uint64))
    first = np.searchsorted(ordered, wanted)
    return table.take(spans(first, np.searchsorted(ordered, wanted, side="right") - first))


def texts_of(table: pa.Table) -> np.ndarray:
    """The texts of such records, each once, in order: uint64."""
    # They are ordered already, and sorting millions of them is most of what a trace would take.
    texts = table["text"].to_numpy()
    return np.asarray(texts[run_starts(texts)])


def _may_hold(statistics: pq.Statistics, wanted: np.ndarray) -> bool:
    first = np.searchsorted(wanted, np.uint64(statistics.min))
    return bool(first < len(wanted) and wanted[first] <= np.uint64(statistics.max))
