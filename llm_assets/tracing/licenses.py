"""The licenses of documents, out of the snapshot that they came from."""

import fnmatch
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.storage import files
from artifacts.store.store import Artifact

_READERS = 16
"""Files whose footers are read at a time: in a bucket each takes some 20 ms, whatever its size."""


def find_licenses(raw_corpus: Artifact, documents: Mapping[str, str]) -> dict[str, str]:
    """The licenses of those documents that have one there.

    Read are the footers of the files, several at a time, and of a group of rows only its ids and
    licenses, where its least and greatest id and source let it hold one of the documents. Sources
    give their documents in the order of their ids where they have one, so that is about one group
    for each document.

    Args:
        documents: id to source.
    """
    wanted = {"id": sorted(documents), "source": sorted(set(documents.values()))}
    names = sorted(fnmatch.filter(files.list_names(raw_corpus.url), "part-*.parquet"))
    found: dict[str, str] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        urls = [f"{raw_corpus.url}/{name}" for name in names]
        for licenses in readers.map(partial(_licenses_in, wanted=wanted), urls):
            found |= licenses
    return found


def _licenses_in(file: str, wanted: Mapping[str, list[str]]) -> dict[str, str]:
    with files.open_file(file) as handle:
        parquet = pq.ParquetFile(handle)
        if "license" not in parquet.schema_arrow.names:
            return {}
        groups = list(_groups_with(parquet.metadata, wanted))
        table = parquet.read_row_groups(groups, columns=["id", "license"])
    table = table.filter(pc.is_in(table["id"], pa.array(wanted["id"], pa.string()))).drop_null()
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _groups_with(metadata: pq.FileMetaData, wanted: Mapping[str, list[str]]) -> Iterator[int]:
    """The row groups that, by their statistics, may hold one of the values of each column."""
    places = {metadata.schema.column(place).path: place for place in range(metadata.num_columns)}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if all(
            _may_hold(group.column(places[name]).statistics, values)
            for name, values in wanted.items()
            if name in places
        ):
            yield number


def _may_hold(statistics: pq.Statistics | None, wanted: list[str]) -> bool:
    if statistics is None or not statistics.has_min_max:
        return True
    place = bisect_left(wanted, statistics.min)
    return place < len(wanted) and wanted[place] <= statistics.max
