"""Reading a corpus folder into Spark, and writing one from its tasks."""

import itertools
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from artifacts.errors import UserError

WRITTEN_SCHEMA = "name string, documents long, bytes long"


def read_corpus(spark: SparkSession, url: str, columns: list[str], asset: str) -> DataFrame:
    """A corpus folder's Parquet files as a table of `columns`.

    Raises:
        UserError: the folder holds no Parquet file, or one of the columns is missing.
    """
    filesystem, path = fsspec.core.url_to_fs(url)
    files = sorted(filesystem.glob(f"{path}/part-*.parquet"))
    if not files:
        raise UserError(
            f"{url} holds no part-*.parquet files, so there is no `{asset}` to read. Make it with: "
            f'dagster asset materialize --select "*{asset}"'
        )
    for file in files:
        _refuse_missing_columns(filesystem, file, columns, asset)
    types = ", ".join(f"{column} {'long' if column == 'bytes' else 'string'}" for column in columns)
    # With the schema given, Spark starts no job of its own to find it out.
    reader = spark.read.schema(types)
    return reader.parquet(*[filesystem.unstrip_protocol(file) for file in files])


def _refuse_missing_columns(
    filesystem: fsspec.AbstractFileSystem, file: str, columns: list[str], asset: str
) -> None:
    try:
        with filesystem.open(file, "rb") as handle:
            found = pq.read_schema(handle).names
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file} is not a readable Parquet file ({error}). Delete its folder and materialize "
            f"`{asset}` again."
        ) from error
    missing = [column for column in columns if column not in found]
    if missing:
        raise UserError(
            f"{file} of the `{asset}` has no column {missing[0]!r}; its columns are "
            f"{', '.join(found)}."
        )


def write_parts(table: DataFrame, url: str, schema: pa.Schema) -> list[dict[str, Any]]:
    """Write one `part-NNNNN.parquet` a non-empty partition; `name`, `documents`, `bytes` of each.

    A task that is tried again writes the same name again, so no attempt leaves anything behind.
    `table` must have the columns of `schema`, a `bytes` column among them.
    """

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        batches = (batch for batch in batches if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return
        name = f"part-{TaskContext.get().partitionId():05d}.parquet"
        filesystem, folder = fsspec.core.url_to_fs(url)
        filesystem.makedirs(folder, exist_ok=True)
        documents = size = 0
        with (
            filesystem.open(f"{folder}/{name}", "wb") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for batch in itertools.chain([first], batches):
                part = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
                writer.write_table(part)
                documents += part.num_rows
                size += sum(part["bytes"].to_pylist())
        yield pa.RecordBatch.from_pydict(
            {"name": [name], "documents": [documents], "bytes": [size]}
        )

    return [row.asDict() for row in table.mapInArrow(write, WRITTEN_SCHEMA).collect()]
