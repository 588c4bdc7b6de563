"""Starting, moving and stopping an endpoint that outlives its caller."""

import errno
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.leases import process_started
from serving import endpoint as process
from serving.logs import before
from serving.rollout import RolloutFailed
from serving.settings import RolloutSettings
from serving.state import Phase, StateFolder
from tests.serving.conftest import SETTINGS, Client, served, start
from tests.waiting import wait_until


def test_same_version_again_changes_nothing(client: Client, tiny_model_folder: Path) -> None:
    """Also where it would take over in another way, such as after a person's decision."""
    pids = client.engine_pids()
    for rollout in (SETTINGS.rollout, RolloutSettings(steps=())):
        again = start(client.state_folder, tiny_model_folder, rollout=rollout)
        assert not again.endpoint.changed
        assert again.pid == client.pid
        assert client.engine_pids() == pids


@pytest.mark.fault(
    "endpoint", "port taken", sees="the port and the setting", then="nothing is started"
)
def test_taken_port_is_named_with_its_settings_key(
    tmp_path: Path, tiny_model_folder: Path, taken_port: int
) -> None:
    told = rf"port {taken_port} \(Address already in use\)\. .*endpoint\.port"
    with pytest.raises(UserError, match=told):
        start(tmp_path, tiny_model_folder, port=taken_port)


def test_a_server_waits_for_no_disk_to_say_how_it_is(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushing takes a busy disk seconds, in which it would answer nobody."""
    there, state = StateFolder(client.state_folder), StateFolder(tmp_path / "endpoint")
    status, good = there.status.read(), there.good.read()
    assert status is not None and good is not None

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "flushed")

    monkeypatch.setattr("os.fsync", fail)
    state.status.write(status)
    assert state.status.read() == status
    with pytest.raises(OSError, match="flushed"):
        state.good.write(good)


@pytest.mark.fault(
    "endpoint", "first model cannot be loaded", sees="the reason", then="the endpoint exits"
)
def test_model_that_cannot_be_loaded_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        start(tmp_path / "endpoint", tmp_path / "model")
    assert StateFolder(tmp_path / "endpoint").running is None


@pytest.mark.fault(
    "endpoint",
    "address beyond loopback without a token",
    sees="the setting",
    then="nothing is started",
)
def test_address_beyond_loopback_needs_a_token(tmp_path: Path, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="token_variable"):
        start(tmp_path, tiny_model_folder, host="0.0.0.0")


@pytest.mark.fault(
    "endpoint",
    "token changed while the endpoint runs",
    sees="that the endpoint restarts",
    then="the new token is valid and the old one is not; an unset variable changes nothing",
)
def test_a_changed_token_is_the_one_that_counts(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status_with(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return guarded.http.get("/v1/models", headers=headers).status_code

    def start_again() -> Client:
        return start(tmp_path, tiny_model_folder, token_variable="ENDPOINT_TOKEN")

    monkeypatch.setenv("ENDPOINT_TOKEN", "correct-horse")
    with served(tmp_path, tiny_model_folder) as open_to_all:
        first = guarded = start_again()
        assert first.pid != open_to_all.pid and process_started(open_to_all.pid) is None
        assert first.complete(max_tokens=1).status_code == 401
        assert status_with("correct-horse") == 200
        monkeypatch.setenv("ENDPOINT_TOKEN", "battery-staple")
        guarded = start_again()
        assert (status_with("battery-staple"), status_with("correct-horse")) == (200, 401)
        assert guarded.pid != first.pid and start_again().pid == guarded.pid
        monkeypatch.delenv("ENDPOINT_TOKEN")
        assert start_again().pid == guarded.pid
        with pytest.raises(UserError, match="ENDPOINT_TOKEN, which is not set"):
            start(tmp_path, tiny_model_folder, token_variable="ENDPOINT_TOKEN", max_connections=9)
        assert status_with("battery-staple") == 200


@pytest.mark.fault(
    "endpoint",
    "an upgrade while the endpoint runs",
    sees="that the endpoint restarts, when a version is next to be served",
    then="API server and engines are of one release; a signal of the earlier one ends nothing",
)
def test_an_endpoint_of_another_release_is_started_again(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, tiny_model_folder) as earlier:
        os.kill(earlier.pid, signal.SIGHUP)
        assert start(tmp_path, tiny_model_folder).pid == earlier.pid
        (tmp_path / "broken").mkdir()
        with monkeypatch.context() as upgraded:
            upgraded.setattr(process, "code_hash", lambda: "of another release")
            later = start(tmp_path, tiny_model_folder)
            with pytest.raises(RolloutFailed, match=r"(?s)no config\.json.*Version 1 still is"):
                start(tmp_path, tmp_path / "broken", "2")
        assert later.pid != earlier.pid and process_started(earlier.pid) is None
        last = start(tmp_path, tiny_model_folder)
        assert last.pid != later.pid and last.complete(max_tokens=1).status_code == 200


def test_an_endpoint_that_is_stopped_while_it_is_started_again_stays_stopped(
    tmp_path: Path,
    tiny_model_folder: Path,
    other_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(tmp_path, tiny_model_folder) as earlier, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(process, "code_hash", lambda: "of another release")
        moving = pool.submit(start, tmp_path, other_model_folder, "2")
        wait_until(lambda: (found := StateFolder(tmp_path).running) and found.pid != earlier.pid)
        assert process.stop(tmp_path)
        with pytest.raises(RolloutFailed, match="was stopped before it served version 1"):
            moving.result()
    assert StateFolder(tmp_path).running is None


def test_an_endpoint_that_is_stopped_before_it_shows_a_sign_of_life_is_not_left_running(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(start, tmp_path, tiny_model_folder)
        wait_until(lambda: StateFolder(tmp_path).desired.path.exists(), poll_seconds=0.001)
        assert not process.stop(tmp_path)
        with pytest.raises(RolloutFailed, match="was stopped"):
            starting.result()
    assert StateFolder(tmp_path).running is None and StateFolder(tmp_path).stopped_path.exists()


@pytest.mark.fault(
    "endpoint",
    "stopped on a disk that became read-only",
    sees="that nothing can be written",
    then="its processes have ended",
)
def test_an_endpoint_is_stopped_though_its_disk_takes_nothing(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with served(tmp_path, tiny_model_folder) as client, monkeypatch.context() as broken:
        broken.setattr(Path, "touch", refuse)
        with pytest.raises(OSError, match="Read-only"):
            process.stop(tmp_path)
        assert process_started(client.pid) is None


def test_an_address_that_cannot_be_had_does_not_cost_the_endpoint_that_runs(
    tmp_path: Path, tiny_model_folder: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, tiny_model_folder) as client:
        with pytest.raises(UserError, match="Address already in use"):
            start(tmp_path, tiny_model_folder, port=taken_port)
        monkeypatch.setenv("ENDPOINT_TOKEN", "battery-staple")
        with pytest.raises(UserError, match=r"Set `endpoint\.host` to an address of this"):
            elsewhere = {"host": "192.0.2.1", "token_variable": "ENDPOINT_TOKEN"}
            start(tmp_path, tiny_model_folder, **elsewhere)
        assert process_started(client.pid) is not None
        assert client.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("token", ["two\nlines", "battery-staple\n", "schlüssel"])
@pytest.mark.fault(
    "endpoint",
    "token that no header can hold",
    sees="the variable and what is wrong, not the token",
    then="nothing is started",
)
def test_token_that_no_client_could_send_is_refused(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("ENDPOINT_TOKEN", token)
    with pytest.raises(UserError, match=r"ENDPOINT_TOKEN .*cannot be sent in a header") as raised:
        start(tmp_path, tiny_model_folder, token_variable="ENDPOINT_TOKEN")
    assert token.strip() not in str(raised.value)


def test_an_address_of_ipv6_is_told_as_clients_take_it(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with served(tmp_path, tiny_model_folder, host="::1") as client:
        assert client.url.startswith("http://[::1]:")
        assert client.complete(max_tokens=1).status_code == 200


def test_an_endpoint_goes_on_by_what_the_release_before_accepted_and_can_be_stopped(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    accepted = ("*", "https://page.example/path")
    with served(tmp_path, tiny_model_folder) as client:
        state = StateFolder(tmp_path)
        for file in (state.good, state.desired):
            fields = json.loads(file.path.read_text())
            fields["settings"]["allowed_origins"] = accepted
            file.path.write_text(json.dumps(fields))
        earlier = client.api_server()
        earlier.kill()

        def serves_again() -> bool:
            found = state.running
            is_another = found is not None and found.api_server_pid != earlier.pid
            return is_another and found.phase == "serving"

        wait_until(serves_again)
        assert state.running and state.running.settings.allowed_origins == accepted
        assert client.complete(max_tokens=1).status_code == 200
        assert process.stop(tmp_path)
    assert process_started(client.pid) is None


@pytest.mark.parametrize("phase", ["stopped", "serving"])
def test_an_endpoint_that_ended_begins_with_what_is_wanted_then(
    tmp_path: Path, tiny_model_folder: Path, phase: Phase
) -> None:
    """What served before is not loaded first, whether somebody stopped it or the power failed: it
    may have been rejected since. That it was stopped automation is told, also where nothing ran."""
    stopped = StateFolder(tmp_path).stopped_path
    assert not process.stop(tmp_path) and stopped.exists()
    with served(tmp_path, tiny_model_folder, "1"):
        assert not stopped.exists()
    assert stopped.exists()
    status = StateFolder(tmp_path).status.read()
    assert status is not None and status.phase == "stopped"
    StateFolder(tmp_path).status.write(status.model_copy(update={"phase": phase}))
    with served(tmp_path, tiny_model_folder, "2"):
        pass
    assert StateFolder(tmp_path).log_path.read_text().count("loading version 1") == 1


@pytest.mark.fault(
    "endpoint",
    "process ID reused by another process",
    sees="nothing",
    then="the other process is left alone",
)
def test_stop_ends_only_a_process_that_is_ours(client: Client, tmp_path: Path) -> None:
    status = StateFolder(client.state_folder).running
    assert status is not None
    own = {"folder": tmp_path}
    for others in ({}, own | {"process_started": "1"}, own | {"process_started": None}):
        StateFolder(tmp_path).status.write(status.model_copy(update=others))
        assert StateFolder(tmp_path).running is None and not process.stop(tmp_path), others
    assert StateFolder(client.state_folder).running == status
    assert client.complete(max_tokens=1).status_code == 200
    assert SETTINGS.port == 0


def test_logs_of_engines_that_ended_long_ago_are_deleted(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    ended = [tmp_path / f"engine-{number}.log" for number in range(2, 9)]
    for age, path in enumerate(reversed(ended)):
        for one in (path, before(path)):
            one.write_text("its last words")
        os.utime(path, (age, age))
    with served(tmp_path, tiny_model_folder):
        kept = {*ended[:5], tmp_path / "engine-1.log"}
        assert set(tmp_path.glob("engine-*.log")) == kept
        assert set(tmp_path.glob("*.before")) == set(map(before, ended[:5]))
