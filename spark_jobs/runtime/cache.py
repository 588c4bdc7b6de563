"""Rows of documents that later runs need not make again."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.cache import read_cached, write_cached


def cached_rows(
    folder: str | None, key: str, ids: pa.ChunkedArray, make: Callable[[np.ndarray], pa.Table]
) -> pa.Table:
    """A row for each document, of which those that the cache holds are not made again.

    Args:
        folder: None keeps nothing.
        key: of `artifacts.cache.cache_key`; together with a document's id it decides its row.
        ids: of the documents, each once.
        make: places in `ids` to the rows of these documents, in that order.

    Returns:
        What `make` gives, in the order of `ids`. The cache keeps the rows of other documents, too.
    """
    if folder is None:
        return make(np.arange(len(ids)))
    entry = read_cached(folder, key)
    known = pa.ipc.open_stream(entry).read_all() if entry else None
    if known is not None and known["id"].equals(ids):
        return known.drop_columns("id")
    is_known = np.zeros(len(ids), bool)
    if known is not None:
        is_known = np.asarray(pc.is_in(ids, known["id"]))
    if known is None or not is_known.all():
        missing = np.flatnonzero(~is_known)
        made = make(missing).append_column("id", ids.take(pa.array(missing)))
        known = made if known is None else pa.concat_tables([known, made])
        write_cached(folder, key, to_stream(known))
    return known.take(pc.index_in(ids, known["id"])).drop_columns("id")


def to_stream(table: pa.Table) -> bytes:
    """A table as an Arrow stream, whose columns are read where they lie."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()
