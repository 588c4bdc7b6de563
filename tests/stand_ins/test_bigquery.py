"""The BigQuery emulator as the tests start it."""

import socket

import pytest

from tests.stand_ins import bigquery
from tests.stand_ins.google import PROJECT, LocalGoogle
from tests.stand_ins.processes import free_port


@pytest.mark.soak
def test_emulator_whose_port_was_taken_meanwhile_is_started_on_another(
    google: LocalGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(bigquery, "free_port", lambda: next(ports, None) or free_port())
        with bigquery.running_bigquery(PROJECT, google.mount) as client:
            assert [row[0] for row in client.query("SELECT 1").result()] == [1]
