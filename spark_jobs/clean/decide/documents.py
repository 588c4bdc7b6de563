"""The small columns of prepared documents: all that is needed of them to decide."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.clean.splits import codes_of
from spark_jobs.runtime.parquet import Part

FORGOTTEN = "forgotten"
"""Reason of what is left out since somebody asked for it; never shown with its text."""

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("text_hash", pa.string()),
        ("characters", pa.int64()),
        ("bytes", pa.int64()),
        ("fault", pa.string()),
        ("repaired", pa.bool_()),
        ("past", pa.bool_()),
        ("recorded_split", pa.int8()),
        ("recorded_slice", pa.int32()),
    ]
)
"""A document as it was prepared (`prepare.prepared_schema`). `past` says whether it has left the
sources; of such a one, the code of the split and the slice that the record has of it, else 0."""


class Forgotten(BaseModel):
    """Documents that are left out as if the sources did not hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """By their `text_hash`, whatever id they come back under."""


@dataclass(frozen=True)
class DocumentPart:
    """A prepared part over which is decided."""

    prepared: PreparedPart
    record: Part | None = None
    """Of texts that have left the sources: the record's rows that were prepared."""

    def read(self, forgotten: Forgotten) -> pa.Table:
        """The part's documents, as rows of `DOCUMENT_SCHEMA`."""
        names = [name for name in DOCUMENT_SCHEMA.names if "record" not in name and name != "past"]
        documents = self.prepared.read(names)
        count = documents.num_rows
        split, slices = np.zeros((2, count), np.int64)
        if self.record:
            recorded = self.record.read(["split", "slice"])
            split, slices = codes_of(recorded["split"]), recorded["slice"].to_numpy()
        columns = {name: documents[name] for name in names} | {
            "fault": _faults(documents, forgotten, self.record is not None),
            "past": pa.array(np.full(count, self.record is not None)),
            "recorded_split": pa.array(split, pa.int8()),
            "recorded_slice": pa.array(slices.astype(np.int32)),
        }
        return pa.table(columns, DOCUMENT_SCHEMA)

    def read_rows(self, column: str, rows: pa.Array) -> pa.Array:
        """A column of some of the part's rows."""
        return self.prepared.read([column])[column].take(rows).combine_chunks()


def _faults(documents: pa.Table, forgotten: Forgotten, is_past: bool) -> pa.ChunkedArray:
    # A text that was once in a split stays on record, whatever the settings now say of it.
    nothing = pa.chunked_array([pa.nulls(documents.num_rows, pa.string())])
    is_forgotten = pc.or_(
        pc.is_in(documents["id"], pa.array(forgotten.ids, pa.string())),
        pc.is_in(documents["text_hash"], pa.array(forgotten.texts, pa.string())),
    )
    return pc.if_else(is_forgotten, FORGOTTEN, nothing if is_past else documents["fault"])
