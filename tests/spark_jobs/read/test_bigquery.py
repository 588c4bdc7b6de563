"""The BigQuery source, against the emulator."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from artifacts.errors import UserError
from artifacts.storage import files
from spark_jobs.read import bigquery
from spark_jobs.read.bigquery import (
    cut_export,
    export_folder,
    export_statement,
    fingerprint_bigquery,
    plan_query,
)
from spark_jobs.read.document import Document
from spark_jobs.read.settings import BigQuery, RawCorpusSettings
from spark_jobs.read.snapshot import listed_chunk, write_snapshot
from tests.stand_ins.bigquery import HOST_VARIABLE, Slowness, add_rows, fill_table, running_bigquery
from tests.stand_ins.google import BUCKET, PROJECT, LocalGoogle
from tests.stand_ins.processes import free_port

if TYPE_CHECKING:
    from google.cloud.bigquery import Client

TABLE = f"{PROJECT}.corpus.texts"


def settings(**changes: object) -> BigQuery:
    content = {"type": "bigquery", "table": TABLE, "project": PROJECT, "export": f"gs://{BUCKET}/x"}
    return BigQuery.model_validate(content | changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"table": "texts"}, "table"),
        ({"table": "a.b.c` WHERE 1=1; DROP TABLE x --"}, "table"),
        ({"id_column": "id` , secret"}, "id_column"),
        ({"text_column": "text; x"}, "text_column"),
        ({"watermark_column": "a b"}, "watermark_column"),
        ({"table": None}, "either"),
        ({"query": "SELECT 1"}, "either"),
        ({"table": None, "query": "DELETE FROM a.b"}, "SELECT"),
        ({"table": None, "query": "/* a */ DELETE FROM a.b /* c */ SELECT 1"}, "SELECT"),
        ({"table": None, "query": "/* a */" * 100 + "DELETE FROM a.b"}, "SELECT"),
        ({"table": None, "query": "SELECT 1; DROP TABLE a.b"}, "SELECT"),
        ({"export": "/local/folder"}, "export"),
        ({"export": "gs://bucket/x', format = 'CSV"}, "export"),
        ({"export": "gs://bucket/x\\"}, "export"),
        ({"maximum_gigabytes_billed": 0}, "maximum_gigabytes_billed"),
    ],
)
def test_wrong_identifiers_and_statements_are_refused(changes: dict, fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        settings(**changes)


def test_export_is_one_statement_that_sorts_nothing() -> None:
    source = settings(table=None, query="SELECT id, body AS text FROM `a.b.c`;")
    statement = export_statement(source, "gs://b/folder")
    assert statement.startswith("EXPORT DATA OPTIONS (uri = 'gs://b/folder/part-*.parquet'")
    assert statement.endswith("FROM (SELECT id, body AS text FROM `a.b.c`\n)")
    source = settings(table=None, query="SELECT id, text FROM `a.b.c` # the newest")
    parts = [line.partition("#")[0] for line in export_statement(source, "gs://b").splitlines()]
    assert "".join(parts).endswith("FROM (SELECT id, text FROM `a.b.c` )"), "without the comment"
    begins_with_comments = "-- of the\n# team /*\n/* all\nof it */ SELECT id, text FROM `a.b.c`"
    assert settings(table=None, query=begins_with_comments).query == begins_with_comments


@pytest.fixture(scope="module")
def slowness() -> Slowness:
    return Slowness()


@pytest.fixture(scope="module")
def client(started_google: LocalGoogle, slowness: Slowness) -> Iterator["Client"]:
    """A client of a running emulator, whose exports land in the local storage."""
    with running_bigquery(PROJECT, started_google.mount, slowness) as made:
        yield made


def documents_of(source: BigQuery, state: str) -> list[Document]:
    """What one state of the source holds, read by the process that cut it and as a task reads."""
    chunks = cut_export(source, state)
    documents = [one for _, one in chunks.read([0])]
    assert chunks.files is not None
    by_task = listed_chunk(source, chunks.files[0])
    assert by_task.keys == chunks.keys
    assert [one for _, one in by_task.read([0])] == documents
    return documents


def test_rows_are_exported_once_and_change_is_noticed(client: "Client") -> None:
    fill_table(client, TABLE, {"b": "second", "a": "first"})
    source = settings(watermark_column="ingested_at")
    before = fingerprint_bigquery(source)
    assert fingerprint_bigquery(source) == before
    batch = documents_of(source, before)
    assert sorted((d.id, d.text, d.source) for d in batch) == [
        ("a", "first", "bigquery"),
        ("b", "second", "bigquery"),
    ]
    add_rows(client, TABLE, {"c": "third"}, ingested_at=2)
    assert fingerprint_bigquery(source) != before
    assert len(documents_of(source, before)) == 2


def test_rows_without_an_id_are_set_aside_and_named(client: "Client", tmp_path: Path) -> None:
    fill_table(client, TABLE, {"a": "first", "b": "second"})
    client.query(f"INSERT INTO `{TABLE}` (id, text, ingested_at) VALUES (NULL, 'x', 1)").result()
    source = settings(export=f"gs://{BUCKET}/no-id")
    with pytest.raises(
        UserError, match=r"part-\d+\.parquet, row \d: no id under 'id'\.\n.*raise `m"
    ):
        write_snapshot(RawCorpusSettings(sources=[source]), tmp_path / "strict")
    lenient = RawCorpusSettings(sources=[source.model_copy(update={"maximum_faulty_share": 0.5})])
    stats = write_snapshot(lenient, tmp_path / "raw")
    assert stats["documents"] == 2 and stats["dropped"] == {"no_id": 1}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ALTER TABLE `{}` RENAME COLUMN text TO body", "(?s)text.*Check `id_column`, `text_col"),
        ("ALTER TABLE `{}` DROP COLUMN text", "(?s)text.*Check `id_column`, `text_column`"),
        (
            "CREATE OR REPLACE TABLE `{0}` AS SELECT * REPLACE (LENGTH(text) AS text) FROM `{0}`",
            "`text` is INTEGER, no text. Name another one in `text_column`",
        ),
        (
            "CREATE OR REPLACE TABLE `{0}` AS SELECT * REPLACE ([text] AS text) FROM `{0}`",
            "`text` is ARRAY<STRING>, no text",
        ),
    ],
    ids=["renamed", "dropped", "numbers", "lists"],
)
def test_a_text_column_that_is_gone_or_no_text_is_told_though_no_row_is_new(
    client: "Client", change: str, told: str
) -> None:
    fill_table(client, TABLE, {"a": "first"})
    client.query(change.format(TABLE)).result()
    with pytest.raises(UserError, match=told):
        fingerprint_bigquery(settings(watermark_column="ingested_at"))


def test_a_service_that_cannot_be_reached_is_told_within_seconds(
    client: "Client", monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, the client tries for ten minutes, in which `check` says nothing."""
    monkeypatch.setenv(HOST_VARIABLE, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("spark_jobs.read.bigquery.PLAN_SECONDS", 2.0)
    with pytest.raises(UserError, match=r"does not answer for source `bigquery`: .*\nIs there a"):
        plan_query(settings())


def test_files_of_an_export_that_was_given_up_are_not_read(client: "Client") -> None:
    fill_table(client, TABLE, {"a": "first"})
    source = settings(watermark_column="ingested_at", export=f"gs://{BUCKET}/given-up")
    state = fingerprint_bigquery(source)
    folder = export_folder(source, state)
    # BigQuery wrote a part, and then its job was given up.
    files.write(f"{folder}/part-000000000007.parquet", b"half a file")
    files.write(f"{folder}/before/part-000000000007.parquet", b"half a file")
    assert [d.id for d in documents_of(source, state)] == ["a"]


def test_an_export_of_which_files_were_removed_is_made_again(client: "Client") -> None:
    fill_table(client, TABLE, {"a": "first"})
    source = settings(watermark_column="ingested_at", export=f"gs://{BUCKET}/removed")
    state = fingerprint_bigquery(source)
    assert [d.id for d in documents_of(source, state)] == ["a"]
    exported = f"{export_folder(source, state)}/{bigquery.EXPORTED_NAME}"
    names = json.loads(files.read(exported))
    # Of two parts the bucket's lifecycle has removed one.
    second = f"{names[0].partition('/')[0]}/part-000000000001.parquet"
    files.write(exported, json.dumps([*names, second]).encode())

    assert [d.id for d in documents_of(source, state)] == ["a"]

    now = json.loads(files.read(exported))
    assert second not in now and not set(now) & set(names)


def test_job_that_takes_too_long_is_cancelled_and_told(
    client: "Client", slowness: Slowness, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_table(client, TABLE, {"a": "first"})
    monkeypatch.setattr(bigquery, "JOB_SECONDS", 0.6)
    monkeypatch.setattr(slowness, "is_on", True)
    with pytest.raises(UserError, match=r"within 0.01 minutes, and it was cancelled"):
        fingerprint_bigquery(settings(watermark_column="ingested_at"))
    assert len(slowness.cancelled) == 1


def test_missing_table_is_told_with_its_setting(client: "Client") -> None:
    with pytest.raises(UserError, match="location: US"):
        fingerprint_bigquery(settings(table=f"{PROJECT}.corpus.nothing"))


VIEW = f"{PROJECT}.corpus.view"
EDIT = f"UPDATE `{TABLE}` SET text = 'edited' WHERE id = 'a'"
ADD = f"INSERT INTO `{TABLE}` (id, text, ingested_at) VALUES ('b', 'second', 2)"
RETYPE = f"CREATE OR REPLACE TABLE `{TABLE}` AS SELECT * REPLACE (1 AS id) FROM `{TABLE}`"


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ({}, EDIT),
        ({"table": None, "query": f"SELECT id, text FROM `{TABLE}`"}, ADD),
        ({"table": VIEW, "watermark_column": "ingested_at"}, ADD),
        ({"watermark_column": "ingested_at"}, RETYPE),
    ],
    ids=["edited in place", "rows of a query", "rows of a view", "another type of ids"],
)
def test_changes_are_noticed(client: "Client", source: dict, change: str) -> None:
    fill_table(client, TABLE, {"a": "first"})
    client.query(f"CREATE OR REPLACE VIEW `{VIEW}` AS SELECT * FROM `{TABLE}`").result()
    before = fingerprint_bigquery(settings(**source))
    assert fingerprint_bigquery(settings(**source)) == before

    client.query(change).result()

    assert fingerprint_bigquery(settings(**source)) != before


@pytest.mark.parametrize(
    ("tables", "listed"),
    [(0, "lists none, as of `EXTERNAL_QUERY`"), (60, "lists 50, and there may be more")],
)
def test_a_query_whose_tables_are_not_all_listed_needs_a_watermark(
    client: "Client", tables: int, listed: str
) -> None:
    names = [f"{PROJECT}.corpus.texts_{number}" for number in range(tables)]
    for name in names:
        client.query(f"CREATE OR REPLACE TABLE `{name}` AS SELECT 'x' AS id, 'y' AS text").result()
    one = "SELECT 'a' AS id, 'b' AS text"
    query = " UNION ALL ".join([one, *(f"SELECT id, text FROM `{name}`" for name in names)])

    with pytest.raises(UserError, match=f"`bigquery` reads, BigQuery {listed}.*watermark_column"):
        fingerprint_bigquery(settings(table=None, query=query))

    counted = f"SELECT *, 1 AS ingested_at FROM ({query})"
    fingerprint_bigquery(settings(table=None, query=counted, watermark_column="ingested_at"))


def test_a_view_is_refused_without_a_watermark(client: "Client") -> None:
    fill_table(client, TABLE, {"a": "first"})
    client.query(f"CREATE OR REPLACE VIEW `{VIEW}` AS SELECT * FROM `{TABLE}`").result()
    with pytest.raises(UserError, match=r"corpus\.view, which is a view.*`watermark_column`"):
        fingerprint_bigquery(settings(table=VIEW))
