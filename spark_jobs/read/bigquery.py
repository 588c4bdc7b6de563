"""Reads documents from BigQuery, by way of Parquet files that it exports to Cloud Storage.

Export instead of reading rows through the API: Google's machines write in parallel, and the very
bytes that were read stay for later reference.
"""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.storage import files
from artifacts.store.identity import hash_json
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.find import find_files
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.opened import Chunks, OpenedSource, file_chunks, group
from spark_jobs.read.settings import BigQuery, Files
from spark_jobs.read.source_file import RemoteFile

BATCH_DOCUMENTS = 1_000
JOB_SECONDS = 3_600.0
PLAN_SECONDS = 20.0
"""Time for a dry run, after which a network counts as gone: by itself, the client tries for ten
minutes."""
EXPORTED_NAME = "exported.json"
CUT_LIST = 50
"""If a query reads so many tables, BigQuery's list of them may be incomplete
(`JobStatistics2.referencedTables`); a longer list was not cut."""
ROWS_ELSEWHERE = {"VIEW": "a view", "EXTERNAL": "an external table"}
"""Types of tables whose time of modification is that of their definition, not of their rows."""


def fingerprint_bigquery(source: BigQuery) -> str:
    """A hash that changes when the source's rows do.

    With a watermark, it covers the number of rows, the highest watermark and the columns' types;
    without one, the etag, the rows and the time of modification of each table that is read.

    Raises:
        UserError: as `plan_query`; or the query would cost too much, or without a watermark nothing
            would tell of new rows.
    """
    plan = plan_query(source)
    if source.watermark_column:
        # As text: a watermark may be of any type, and its hash is that of JSON.
        highest = f"CAST(MAX(`{source.watermark_column}`) AS STRING)"
        statement = f"SELECT COUNT(*) AS documents, {highest} AS watermark FROM {source.origin}"
        (row,) = _run(source, statement)
        # A watermark says nothing of a column that is another one by now, under the old name.
        types = [field.field_type for field in plan.schema]
        state = {"documents": row["documents"], "watermark": row["watermark"], "types": types}
    else:
        state = _tables(source, plan)
    origin = {"table": source.table, "query": source.query}
    columns = {"id": source.id_column, "text": source.text_column}
    return hash_json({"origin": origin, "columns": columns, "state": state})


def plan_query(source: BigQuery) -> Any:
    """What a query for the source's columns would read, by a dry run, which costs nothing.

    Raises:
        UserError: the table, a column or a right is missing, or the text column holds no text.
    """
    from google.cloud.bigquery import DEFAULT_RETRY, QueryJobConfig

    named = {"id": source.id_column, "text": source.text_column}
    named |= {"watermark": source.watermark_column} if source.watermark_column else {}
    columns = ", ".join(f"`{column}` AS {name}" for name, column in named.items())
    statement = f"SELECT {columns} FROM {source.origin}"
    with _client(source) as client:
        plan = client.query(
            statement,
            job_config=QueryJobConfig(dry_run=True),
            retry=DEFAULT_RETRY.with_timeout(PLAN_SECONDS),
            timeout=PLAN_SECONDS,
            job_retry=None,
        )
    text = plan.schema[1]
    kind = f"ARRAY<{text.field_type}>" if text.mode == "REPEATED" else text.field_type
    if kind != "STRING":
        raise UserError(
            f"Source `{source.name}`: the column `{source.text_column}` is {kind}, no text. Name "
            "another one in `text_column`, or make it a STRING in `query`."
        )
    return plan


def _tables(source: BigQuery, plan: Any) -> dict[str, Any]:
    """Etag, rows and time of modification of each table that is read."""
    names = list(plan.referenced_tables) if source.query else [source.table]
    if len(names) in (0, CUT_LIST):
        why = f"{CUT_LIST}, and there may be more" if names else "none, as of `EXTERNAL_QUERY`"
        raise UserError(
            f"Of the tables that the query of source `{source.name}` reads, BigQuery lists {why}: "
            "new rows would go unnoticed. Name a column of the query that grows with them in "
            "`watermark_column`, such as `ingested_at`."
        )
    with _client(source) as client:
        tables = [client.get_table(name) for name in names]
    for table in tables:
        if kind := ROWS_ELSEWHERE.get(table.table_type):
            raise UserError(
                f"Source `{source.name}` reads {table.reference}, which is {kind}: when it was "
                "modified says nothing of its rows, so new ones would go unnoticed. Name a column "
                "that grows with them in `watermark_column`, such as `ingested_at`."
            )
    return {
        str(table.reference): {
            "etag": table.etag,
            "modified": table.modified.isoformat() if table.modified else None,
            "rows": table.num_rows,
        }
        for table in tables
    }


def export_folder(source: BigQuery, fingerprint: str) -> str:
    """Where the files of one state of the source lie."""
    return f"{source.export.rstrip('/')}/{source.name}-{fingerprint}"


def open_bigquery(source: BigQuery, report: Callable[[str], None]) -> OpenedSource:
    """The source's rows as they are now; cutting them into chunks exports them, unless all files of
    this state's export are there. Raises UserError as `fingerprint_bigquery`."""
    fingerprint = fingerprint_bigquery(source)
    return OpenedSource(
        {source.name: fingerprint}, partial(cut_export, source, fingerprint, report)
    )


def cut_export(source: BigQuery, fingerprint: str, report: Callable[[str], None] = print) -> Chunks:
    """One state of the source, some megabytes of exported files a chunk, in the files' order;
    raises UserError where the export is empty, and from reading SourceChanged."""
    files = find_files(_exported(source, fingerprint, report)).files
    listed = [file for file in files if isinstance(file, RemoteFile)]
    chunks = group(listed, lambda file: (file.name, file.size))
    return file_chunks(chunks, partial(read_exported, source, report=report))


def read_exported(
    source: BigQuery, exported: RemoteFile, report: Callable[[str], None] = lambda line: None
) -> Iterator[Document | Fault]:
    """The documents of an exported file, in whichever process reads it."""
    report(f"Reading {source.name}, {exported.name}")
    try:
        with files.open_file(exported.path) as handle:
            batches = pq.ParquetFile(handle).iter_batches(BATCH_DOCUMENTS)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield _document(row, f"{exported.path}, row {number}", source)
        # After reading, so that a change in the meantime is noticed.
        if exported.state() != exported.listed_state:
            raise SourceChanged(f"{exported.path} changed while it was read")
    except FileNotFoundError as error:
        raise SourceChanged(f"{exported.path} was removed while it was read") from error


def _document(row: dict[str, Any], place: str, source: BigQuery) -> Document | Fault:
    if row["id"] is None:
        return Fault("no_id", f"{place}: no id under {source.id_column!r}.")
    return Document(id=row["id"], text=row["text"] or "", source=source.name, place=place)


def _exported(source: BigQuery, fingerprint: str, report: Callable[[str], None]) -> Files:
    """One state of the source as a source of files.

    Each export has a folder of its own, since BigQuery deletes nothing of an earlier one, and a job
    that was given up may still write. `exported.json`, written last, says which files count.
    """
    folder = export_folder(source, fingerprint)
    done = files.find(f"{folder}/{EXPORTED_NAME}")
    names: list[str] = json.loads(done) if done else []
    # A rule of the bucket, or a person, may have removed some since.
    if not names or not set(names) <= set(_list_export(folder, names[0].partition("/")[0])):
        # To a new folder within this one, which the files' names begin with.
        report(f"Exporting {source.table or 'the query'} to {folder}")
        attempt = uuid.uuid4().hex[:12]
        _run(source, export_statement(source, f"{folder}/{attempt}"))
        names = _list_export(folder, attempt)
        # Written last: without it, no file of this attempt counts.
        files.write(f"{folder}/{EXPORTED_NAME}", json.dumps(names).encode())
    if not names:
        raise UserError(f"{folder} holds no exported Parquet files. Delete it and ask again.")
    path = f"{folder}/{names[0].partition('/')[0]}"
    return Files(type="files", name=source.name, path=path)


def _list_export(folder: str, attempt: str) -> list[str]:
    return [f"{attempt}/{name}" for name in files.list_names(f"{folder}/{attempt}")]


def export_statement(source: BigQuery, folder: str) -> str:
    """The EXPORT DATA statement: id and text as Parquet.

    Unordered: BigQuery would sort on one worker, which a large table exceeds.
    """
    # With an asterisk, in whose place BigQuery numbers files: a single one may have 1 GB at most.
    return (
        f"EXPORT DATA OPTIONS (uri = '{folder}/part-*.parquet', format = 'PARQUET') AS "
        f"SELECT CAST(`{source.id_column}` AS STRING) AS id, `{source.text_column}` AS text "
        f"FROM {source.origin}"
    )


@contextmanager
def _client(source: BigQuery) -> Iterator[Any]:
    """A client of BigQuery; what Google refuses becomes a UserError."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.bigquery import Client

    try:
        yield Client(project=source.project, location=source.location)
    except GoogleAPICallError as error:
        raise UserError(_explain(source, error)) from error
    except RetryError as error:
        raise UserError(
            f"BigQuery does not answer for source `{source.name}`: {error.cause}\nIs there a "
            "network, and may this machine reach bigquery.googleapis.com?"
        ) from error
    except GoogleAuthError as error:
        raise UserError(
            f"BigQuery cannot be asked for source `{source.name}`: {error}\nSign in with: gcloud "
            "auth application-default login"
        ) from error


def _run(source: BigQuery, statement: str) -> list[Any]:
    """The rows of a statement; a job that nobody waits for any more is cancelled."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.bigquery import QueryJobConfig

    # BigQuery bills by binary gigabytes.
    config = QueryJobConfig(maximum_bytes_billed=round(source.maximum_gigabytes_billed * 2**30))
    with _client(source) as client:
        job = client.query(statement, job_config=config)
        try:
            return list(job.result(timeout=JOB_SECONDS))
        except GoogleAPICallError:
            raise  # The job has ended by itself.
        except BaseException as error:
            # Ctrl-C among them: nobody waits for the job any more, and it costs.
            job.cancel()
            if not isinstance(error, TimeoutError):
                raise
            raise UserError(
                f"BigQuery did not finish job {job.job_id} of `{source.name}` within "
                f"{JOB_SECONDS / 60:g} minutes, and it was cancelled. Read less with `query`, or "
                f"give project {source.project} more slots, and ask again."
            ) from error


def _explain(source: BigQuery, error: Any) -> str:
    text = f"BigQuery refused to read {source.table or 'the query'} of `{source.name}`: "
    text += str(error.message)
    if "bytesBilled" in text or "bytes billed" in text.lower():
        return (
            f"{text}\nThe limit: `maximum_gigabytes_billed: {source.maximum_gigabytes_billed:g}`; "
            "raise it if that is what you want to pay for."
        )
    if error.code == 403:
        return (
            f"{text}\nAsk for roles/bigquery.jobUser on project {source.project} and "
            "roles/bigquery.dataViewer on the dataset."
        )
    if error.code == 404:
        return f"{text}\nCheck `table` and `location: {source.location}`."
    if error.code == 400:
        return f"{text}\nCheck `id_column`, `text_column` and `watermark_column`, or `query`."
    return text
