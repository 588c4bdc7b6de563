"""The BigQuery source, against the emulator where it is installed."""

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from artifacts.errors import UserError
from llm_assets.sources.bigquery import export_statement, fingerprint_bigquery, read_bigquery
from llm_assets.sources.bigquery_settings import BigQuery
from tests.stand_ins.bigquery import find_emulator, running_bigquery
from tests.stand_ins.fixtures import started_google  # noqa: F401
from tests.stand_ins.google import BUCKET, PROJECT, LocalGoogle

TABLE = f"{PROJECT}.corpus.texts"
COMMAND = find_emulator()
needs_emulator = pytest.mark.skipif(COMMAND is None, reason="no BigQuery emulator installed")


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
        ({"table": None, "query": "SELECT 1; DROP TABLE a.b"}, "SELECT"),
        ({"export": "/local/folder"}, "export"),
        ({"maximum_gigabytes_billed": 0}, "maximum_gigabytes_billed"),
    ],
)
def test_wrong_identifiers_and_statements_are_refused(changes: dict, fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        settings(**changes)


def test_export_is_one_ordered_statement() -> None:
    source = settings(table=None, query="SELECT id, body AS text FROM `a.b.c`;")
    statement = export_statement(source, "gs://b/folder")
    assert statement.startswith("EXPORT DATA OPTIONS (uri = 'gs://b/folder/part-*.parquet'")
    assert statement.endswith("FROM (SELECT id, body AS text FROM `a.b.c`) ORDER BY id")


@pytest.fixture
def client(started_google: LocalGoogle) -> Iterator[object]:  # noqa: F811
    """A client of a running emulator, whose exports go through the mount to the local storage."""
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.bigquery import Client, QueryJob

    class ExportingClient(Client):
        def query(self, *arguments: object, **keywords: object) -> QueryJob:
            job = super().query(*arguments, **keywords)
            job.result()
            started_google.mount.push()
            return job

    assert COMMAND is not None
    exports = {"BQEMU_GCS_LOCAL_ROOT": str(started_google.mount.folder)}
    with running_bigquery(COMMAND, PROJECT, exports) as url:
        yield ExportingClient(
            project=PROJECT,
            credentials=AnonymousCredentials(),
            client_options=ClientOptions(api_endpoint=url),
        )


def insert(client, *rows: tuple[str, str, int]) -> None:
    values = ", ".join(f"('{i}', '{text}', {at})" for i, text, at in rows)
    client.query(f"INSERT INTO `{TABLE}` (id, text, ingested_at) VALUES {values}").result()


@needs_emulator
def test_rows_are_exported_once_and_change_is_noticed(client) -> None:
    from google.cloud.bigquery import Dataset

    client.create_dataset(Dataset(f"{PROJECT}.corpus"), exists_ok=True)
    client.query(f"CREATE TABLE `{TABLE}` (id STRING, text STRING, ingested_at INT64)").result()
    insert(client, ("b", "second", 2), ("a", "first", 1))
    source = settings(watermark_column="ingested_at")
    before = fingerprint_bigquery(source, client)
    assert fingerprint_bigquery(source, client) == before
    (batch,) = read_bigquery(source, before, client=client)
    assert [(d.id, d.text, d.source) for d in batch] == [
        ("a", "first", "bigquery"),
        ("b", "second", "bigquery"),
    ]
    insert(client, ("c", "third", 3))
    assert fingerprint_bigquery(source, client) != before
    (pinned,) = read_bigquery(source, before, client=client)
    assert len(pinned) == 2


@needs_emulator
def test_missing_table_is_told_with_its_setting(client) -> None:
    with pytest.raises(UserError, match="location: US"):
        fingerprint_bigquery(settings(table=f"{PROJECT}.corpus.nothing"), client)
