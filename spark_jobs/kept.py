"""What a run keeps for the next one, under names that follow from all that decides its content."""

from collections.abc import Callable, Iterable
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.identity import hash_json
from spark_jobs.parquet import read_table, write_table


def name_kept(folder: str, ending: str, **decided_by: Any) -> str:
    """Where something is kept: another name for another content.

    Args:
        decided_by: all that decides the content, as values that JSON can hold.
    """
    return f"{folder}/{hash_json(decided_by)}.{ending}"


def is_kept(url: str) -> bool:
    """Whether it is there."""
    filesystem, path = fsspec.core.url_to_fs(url)
    return bool(filesystem.exists(path))


def list_kept(folder: str) -> set[str]:
    """The names of all files in a folder."""
    filesystem, path = fsspec.core.url_to_fs(folder)
    filesystem.invalidate_cache()
    names = {file.rpartition("/")[2] for file in filesystem.find(path)}
    # Tasks add files that this listing, were it remembered, would say are not there.
    filesystem.invalidate_cache()
    return names


def kept_rows(
    url: str | None,
    ids: pa.ChunkedArray,
    make: Callable[[np.ndarray], pa.Table],
    compression: str = "zstd",
) -> pa.Table:
    """A row for each document, of which those that `url` keeps are not made again.

    Args:
        url: None keeps nothing.
        ids: of the documents, each once.
        make: places in `ids` to the rows of these documents, in that order.

    Returns:
        What `make` gives, in the order of `ids`; at `url` with the column `id`.
    """
    every = np.arange(len(ids))
    if url is None:
        return make(every)

    def make_with_ids(places: np.ndarray) -> pa.Table:
        return make(places).append_column("id", ids.take(pa.array(places)))

    is_new = not is_kept(url)
    known = make_with_ids(every) if is_new else read_table(url)
    places = pc.index_in(ids, known["id"])
    missing = np.flatnonzero(np.asarray(pc.is_null(places)))
    if len(missing):
        known = pa.concat_tables([known, make_with_ids(missing)])
        places = pc.index_in(ids, known["id"])
    is_in_order = np.array_equal(places, every)
    table = known.slice(0, len(ids)) if is_in_order else known.take(places)
    if is_new or len(missing):
        write_table(url, table, compression)
    return table.drop_columns("id")


def copy_file(url: str, target: str) -> None:
    """Copy a file within one file system; it appears under its name only when it is whole."""
    filesystem, path = fsspec.core.url_to_fs(url)
    copy = fsspec.core.url_to_fs(target)[1]
    folder, _, name = copy.rpartition("/")
    filesystem.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/.{name}.tmp"
    filesystem.cp_file(path, temporary)
    filesystem.mv(temporary, copy)


def remove_others(folder: str, kept: Iterable[str]) -> None:
    """Remove every file of a folder but the ones to keep."""
    filesystem, path = fsspec.core.url_to_fs(folder)
    wanted = {fsspec.core.url_to_fs(url)[1] for url in kept}
    for file in set(filesystem.find(path)) - wanted:
        filesystem.rm(file)
