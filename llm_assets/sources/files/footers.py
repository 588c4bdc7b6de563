"""What the footers of Parquet files that are pinned say."""

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.storage import files
from llm_assets.sources.files.source_file import StoredFile
from llm_assets.sources.settings import Files

MOST_GROUP_BYTES = 512 * 1024 * 1024
"""Most text in a row group, which one task of Spark holds in memory several times."""


def read_row_groups(source: Files, file: StoredFile, url: str) -> tuple[list[int], int]:
    """Rows of each row group, and the bytes of text in all of them.

    Raises:
        UserError: the file is not Parquet, lacks a column, or has a row group that is too large.
    """
    try:
        with files.open_file(url) as opened:
            metadata = pq.ParquetFile(opened).metadata
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file.shown} is not a readable Parquet file ({error}). Write it again, or take it "
            "out of the source."
        ) from error
    _check_columns(source, file, metadata.schema.to_arrow_schema())
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return rows, _text_bytes(source, file, metadata)


def _check_columns(source: Files, file: StoredFile, schema: pa.Schema) -> None:
    for column in source.columns:
        if column not in schema.names:
            raise UserError(
                f"{file.shown} has no column {column!r}; its columns are "
                f"{', '.join(schema.names) or 'none'}. Name the columns in the source's settings."
            )
        kind = schema.field(column).type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not is_text and not (column == source.id_column and pa.types.is_integer(kind)):
            raise UserError(
                f"{file.shown}: the column {column!r} is {kind}, where text is read as it lies. "
                "Name another column, or have the source copied: `pin: false`."
            )


def _text_bytes(source: Files, file: StoredFile, metadata: pq.FileMetaData) -> int:
    """Bytes of the text as it lies unpacked."""
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(n) for n in range(group.num_columns))
        size = sum(
            column.total_uncompressed_size
            for column in columns
            if column.path_in_schema == source.text_column
        )
        if size > MOST_GROUP_BYTES:
            raise UserError(
                f"{file.shown}: row group {number} has {size / 1e6:,.0f} MB of text, more than the "
                f"{MOST_GROUP_BYTES / 1e6:,.0f} MB that one task can read. Write smaller row "
                "groups, or have the source copied: `pin: false`."
            )
        total += size
    return total
