"""Starting, moving and stopping an endpoint that outlives its caller."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.errors import UserError
from serving import process
from tests.serving.conftest import SETTINGS, Client, start


@pytest.fixture
def state_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "endpoint"
    process.stop(tmp_path / "endpoint")


def test_same_version_again_changes_nothing(client: Client, tiny_model_folder: Path) -> None:
    pids = client.engine_pids()
    again = start(client.state_folder, tiny_model_folder)
    assert not again.endpoint.changed
    assert again.endpoint.pid == client.endpoint.pid
    assert client.engine_pids() == pids


def test_another_version_takes_over_without_a_failed_request(
    state_folder: Path, tiny_model_folder: Path, other_model_folder: Path
) -> None:
    client = start(state_folder, tiny_model_folder, "1")
    before = client.complete(max_tokens=8).json()["choices"][0]["text"]
    answers: list[tuple[int, str]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answer = client.complete(max_tokens=8)
            answers.append((answer.status_code, answer.headers.get("x-model-version", "")))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    moved = start(state_folder, other_model_folder, "2")
    over.set()
    for thread in threads:
        thread.join()
    assert moved.endpoint.url == client.endpoint.url
    assert {status for status, _ in answers} == {200}
    assert {version for _, version in answers} == {"1", "2"}
    after = client.complete(max_tokens=8)
    assert after.headers["x-model-version"] == "2"
    assert after.json()["choices"][0]["text"] != before
    assert len(client.engine_pids()) == 1

    (state_folder.parent / "empty").mkdir()
    with pytest.raises(process.RolloutFailed, match=r"(?s)Version 3 is not served.*Version 2"):
        start(state_folder, state_folder.parent / "empty", "3")
    assert client.complete(max_tokens=1).headers["x-model-version"] == "2"

    client.kill_engine()
    assert client.complete(max_tokens=8).json() | {"id": "", "created": 0} == after.json() | {
        "id": "",
        "created": 0,
    }


def test_taken_port_is_named_with_its_settings_key(tmp_path: Path, tiny_model_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port}.*endpoint\.port"):
            start(tmp_path, tiny_model_folder, port=port)


def test_model_that_cannot_be_loaded_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        start(tmp_path / "endpoint", tmp_path / "model")
    assert process.status(tmp_path / "endpoint") is None


def test_address_beyond_loopback_needs_a_token(tmp_path: Path, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="token_variable"):
        start(tmp_path, tiny_model_folder, host="0.0.0.0")


def test_stop_ends_only_a_process_that_is_ours(client: Client, tmp_path: Path) -> None:
    from serving.state import StateFolder

    status = process.status(client.state_folder)
    assert status is not None
    StateFolder(tmp_path).write_status(status.model_copy(update={"process_started": 1.0}))
    assert not process.stop(tmp_path)
    assert client.complete(max_tokens=1).status_code == 200
    assert SETTINGS.port == 0
