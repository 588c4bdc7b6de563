"""The endpoint comes back whatever ends a part of it, and leaves nothing behind."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from artifacts.leases import process_started
from serving import endpoint as process
from serving import logs
from serving.logs import append, before
from serving.state import StateFolder
from tests.serving.conftest import HEAD, Client, served, start
from tests.serving.test_admission import PROMISED_SECONDS
from tests.waiting import wait_until

SILENCE = 10.0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Client]:
    """An endpoint whose parts are killed and stopped; each test leaves it serving.

    How long they may be silent was changed while it ran.
    """
    folder = tmp_path_factory.mktemp("kept") / "endpoint"
    with served(folder, tiny_model_folder, engine_timeout=1_000.0) as client:
        start(folder, tiny_model_folder, engine_timeout=SILENCE)
        yield client


def log_of(client: Client, event: str) -> list[dict[str, object]]:
    path = client.state_folder / "endpoint.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def healthy(client: Client) -> bool:
    try:
        return httpx.get(f"{client.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.fault(
    "endpoint",
    "API server hangs or is killed",
    sees="connections wait; `/health` is 503 until an engine is ready",
    then="restarted by its supervisor; one line in the log",
)
def test_an_api_server_that_stands_still_is_replaced_and_who_waits_is_answered(
    kept: Client,
) -> None:
    still, (engine,) = kept.api_server(), kept.engine_pids()
    still.suspend()
    wait_until(lambda: process_started(still.pid) is None)
    # Nobody listens just now, and the connection is taken all the same.
    with kept.connect() as waiting:
        waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert waiting.recv(4096).startswith(b"HTTP/1.1 503 "), "no engine is there yet: the truth"
    wait_until(lambda: healthy(kept))

    assert kept.complete(max_tokens=2).status_code == 200
    assert process_started(engine) is None
    status = StateFolder(kept.state_folder).running
    assert status is not None and status.pid == kept.pid
    assert len(log_of(kept, "api_server_stands_still")) == 1
    (told,) = log_of(kept, "api_server_ended")
    assert told["status"] == -9


def test_a_state_that_cannot_be_read_for_a_moment_ends_no_endpoint(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with served(tmp_path, tiny_model_folder) as client:
        good = StateFolder(tmp_path).good.path
        away = good.rename(tmp_path / "away")
        good.mkdir()
        client.api_server().kill()
        said = tmp_path / "endpoint.log"
        wait_until(lambda: said.read_text().count("api_server_ended") > 1)
        good.rmdir()
        away.rename(good)
        wait_until(lambda: healthy(client))


@pytest.mark.fault(
    "endpoint",
    "supervisor killed",
    sees="the endpoint is down",
    then="API server and engines end with it, even stopped ones",
)
def test_a_killed_supervisor_takes_all_with_it_even_what_stands_still(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    client = start(tmp_path / "endpoint", tiny_model_folder)
    parts = [client.api_server(), *map(psutil.Process, client.engine_pids())]
    for part in parts:
        part.suspend()
    psutil.Process(client.pid).kill()
    wait_until(lambda: not any(process_started(part.pid) for part in parts))
    assert StateFolder(client.state_folder).running is None


@pytest.mark.fault(
    "endpoint",
    "store removed while the endpoint runs",
    sees="the endpoint is down",
    then="its processes have ended",
)
@pytest.mark.soak
def test_an_endpoint_whose_store_was_removed_ends(tmp_path: Path, tiny_model_folder: Path) -> None:
    model = shutil.copytree(tiny_model_folder, tmp_path / "store" / "model")
    client = start(tmp_path / "store" / "endpoint", model)
    shutil.rmtree(tmp_path / "store")
    wait_until(lambda: process_started(client.pid) is None)


@pytest.mark.fault(
    "endpoint",
    "broken chunked body",
    sees="400 or a closed connection",
    then="does not count as a failure of the version",
)
@pytest.mark.parametrize(
    "body",
    [b'5\r\n{"pro\r\nzz\r\n', b"-1\r\n", b"5\r\nab"],
    ids=["no number", "negative", "cut"],
)
def test_a_broken_chunked_body_is_the_clients_fault_and_no_traceback(
    kept: Client, body: bytes
) -> None:
    with kept.connect() as broken:
        broken.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        broken.shutdown(socket.SHUT_WR)
        broken.recv(4096)
    assert kept.complete(max_tokens=1).status_code == 200
    assert "Traceback" not in (kept.state_folder / "endpoint.log").read_text()
    assert 'status="500"' not in kept.http.get("/metrics").text


def test_a_log_is_bounded_and_comes_back_where_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 1_000)
    path = tmp_path / "log"
    for number in range(100):
        append(path, b"%050d\n" % number)
    sizes = [path.stat().st_size, before(path).stat().st_size]
    assert max(sizes) < 1_100 and path.read_bytes().endswith(b"99\n")
    path.unlink()
    append(path, b"again\n")
    assert path.read_bytes() == b"again\n"
    append(tmp_path / "no folder" / "log", b"lost, and nothing else happens\n")


def test_what_comes_in_thousands_is_told_once_in_a_while(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = logs.Tally("refused")
    for tick in range(3_000):
        monkeypatch.setattr(logs, "monotonic", lambda now=tick / 100: now)
        tally.add(most=4)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["count"] for line in lines] == [1, 1_000, 1_000]


@pytest.mark.fault(
    "endpoint",
    "engine killed",
    sees="`/health` is 503 within 5 s",
    then="restarted; one line in the log",
)
def test_status_and_health_tell_the_truth_within_seconds(kept: Client) -> None:
    wait_until(lambda: healthy(kept))
    (pid,) = kept.engine_pids()
    kept.kill_engine()
    wait_until(lambda: not healthy(kept), PROMISED_SECONDS)
    wait_until(lambda: healthy(kept))
    assert kept.engine_pids() != [pid]
    assert log_of(kept, "engine_ended")[-1]["status"] == -9


@pytest.mark.fault(
    "endpoint",
    "the endpoint's folder removed while it runs",
    sees="a line in its log",
    then="its state is written again; `llm-assets stop` finds it",
)
def test_an_endpoint_whose_folder_was_removed_can_be_stopped(kept: Client) -> None:
    # Under another name first, as it is written to all the time.
    shutil.rmtree(kept.state_folder.rename(kept.state_folder.with_name("removed")))
    wait_until(lambda: StateFolder(kept.state_folder).running is not None)
    assert kept.complete(max_tokens=1).status_code == 200
    assert process.stop(kept.state_folder)
    assert process_started(kept.pid) is None
