"""Programs that are kept running, by a real supervisord: killed, ended, left behind."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from llm_assets import services
from llm_assets.cli.main import commands
from llm_assets.config import CONFIG_VARIABLE
from llm_assets.services import ServiceState, find_leftovers
from tests.stand_ins.processes import free_port
from tests.waiting import wait_until

SECRET = "postgresql://dagster:hunter2@127.0.0.1/dagster"
LEAVES_A_CHILD = "sleep 600 & echo started; exec sleep 600"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of services; what runs there is ended afterwards."""
    folder = (
        tmp_path / "deeper than 100% of a socket #1 ;path, as projects lie" / ".llm_assets" / "s"
    )
    folder.parent.mkdir(parents=True)
    monkeypatch.chdir(folder.parent.parent)
    yield folder
    services.stop(folder)


def _the(state: Path, name: str) -> ServiceState:
    return next(one for one in services.read_states(state) or [] if one.name == name)


def _start(state: Path, script: str) -> ServiceState:
    command = ["/bin/sh", "-c", script]
    services.start(state, {"shell": command}, os.environ | {"POSTGRES": SECRET})
    wait_until(lambda: _the(state, "shell").pid > 0)
    return _the(state, "shell")


def test_a_killed_service_comes_back_and_the_end_leaves_nothing(state: Path) -> None:
    first = _start(state, f"{LEAVES_A_CHILD} # that is ;ended")
    wait_until(lambda: (state / "shell.log").read_text() == "started\n")
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: _the(state, "shell").pid not in (0, first.pid))
    # The supervisor, the service, and a child of each of its lives.
    wait_until(lambda: len(find_leftovers(state)) == 4)
    assert services.stop(state)
    assert services.read_states(state) is None and not find_leftovers(state)
    assert not services.stop(state)


def test_a_copied_project_has_no_services_of_its_own_and_ends_none(state: Path) -> None:
    _start(state, "exec sleep 600")
    copy = state.with_name("copy")
    subprocess.run(["cp", "-a", state, copy], check=True)
    assert services.read_states(copy) is None
    assert not services.stop(copy)
    services.start(copy, {"other": ["/bin/sh", "-c", "exec sleep 600"]}, dict(os.environ))
    assert services.stop(copy)
    assert _the(state, "shell").pid > 0
    moved = state.with_name("moved")
    state.rename(moved)
    assert services.read_states(moved) is not None
    moved.rename(state)


def test_what_a_killed_supervisor_left_is_found_and_ended(state: Path) -> None:
    first = _start(state, LEAVES_A_CHILD)
    (supervisor,) = [pid for pid in find_leftovers(state) if os.getsid(pid) == pid]
    os.kill(supervisor, signal.SIGKILL)
    assert first.pid in find_leftovers(state)
    assert services.stop(state)
    assert not find_leftovers(state)


def test_another_session_that_has_the_number_of_the_services_is_left_alone(state: Path) -> None:
    _start(state, "exec sleep 600")
    assert services.stop(state)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        (state / "session").write_text(str(other.pid))
        assert services.read_states(state) is None and not find_leftovers(state)
        assert not services.stop(state) and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_is_found_while_one_program_replaces_another(state: Path) -> None:
    again = state.parent / "again"
    again.write_text('#!/bin/sh\nexec /bin/sh "$0"\n')
    first = _start(state, f"exec /bin/sh '{again}'")
    assert all(first.pid in find_leftovers(state) for _ in range(200))


def test_what_has_a_session_of_its_own_stays_as_the_endpoint_does(state: Path) -> None:
    _start(state, f"setsid sleep 600 & echo $! > '{state}/other'; exec sleep 600")
    wait_until(lambda: (state / "other").exists() and (state / "other").read_text().strip() != "")
    other = int((state / "other").read_text())
    services.stop(state)
    os.kill(other, signal.SIGKILL)  # It was there.


def test_an_address_at_which_nothing_listens_is_not_told(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(state, "exec sleep 600")
    folder = state.parent.parent
    source = "{type: files, path: text}"
    (folder / "dagster.yaml").touch()
    (folder / services.WORKSPACE).touch()
    (folder / "manual.yaml").write_text(
        f"{{name: manual, raw_corpus: {{sources: [{source}]}}, base_model: {{folder: model}}}}"
    )
    monkeypatch.setattr(services, "STATE_FOLDER", state.relative_to(folder))
    monkeypatch.setenv(CONFIG_VARIABLE, "manual.yaml")
    told = CliRunner().invoke(commands, ["up", "--port", "3100"])
    assert told.exit_code == 0 and "are already running" in told.stdout
    assert "http://" not in told.stdout and str(state / "supervisord.conf") in told.stdout


def test_secrets_that_are_not_set_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from cron, whose environment is all but empty."""
    manual = {
        "name": "manual",
        "raw_corpus": {"sources": [{"type": "files", "path": "text"}]},
        "base_model": {"folder": "model"},
        "endpoint": {"token_variable": "NO_TOKEN"},
        "notifications": {"webhook_variable": "NO_HOOK"},
    }
    (tmp_path / "manual.yaml").write_text(json.dumps(manual))
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_VARIABLE, "manual.yaml")
    told = CliRunner().invoke(commands, ["up"])
    assert told.exit_code == 1 and "NO_TOKEN, which is not set" in str(told.exception) + told.output
    assert not (tmp_path / services.STATE_FOLDER).exists()
    monkeypatch.setattr(services, "bring_up", lambda *_: None)
    with monkeypatch.context() as running:
        running.setattr(services, "read_states", lambda _: [])
        told = CliRunner().invoke(commands, ["up"])
        assert told.exit_code == 0 and "not set" not in told.stderr, "they have them"
    monkeypatch.setenv("NO_TOKEN", "secret")
    told = CliRunner().invoke(commands, ["up"])
    assert told.exit_code == 0 and "NO_HOOK, which is not set here" in told.stderr


def test_a_module_that_an_earlier_release_had_is_refused_before_no_run_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{type: files, path: text}"
    (tmp_path / "manual.yaml").write_text(
        f"{{name: manual, raw_corpus: {{sources: [{source}]}}, base_model: {{folder: model}}}}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_VARIABLE, "manual.yaml")
    monkeypatch.setattr(services, "bring_up", lambda *_: None)
    for module, code in (("llm_assets.automation.run_launcher", 1), ("gone.away", 1), ("json", 0)):
        section = {"module": module, "class": "WatchfulRunLauncher"}
        (tmp_path / "dagster.yaml").write_text(json.dumps({"run_launcher": section}))
        told = CliRunner().invoke(commands, ["up"])
        assert told.exit_code == code, module
        assert not code or f"`run_launcher` names {module}" in str(told.exception) + told.output


def test_of_two_that_start_the_services_at_once_one_waits_and_finds_them(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = state.parent.parent
    (folder / services.WORKSPACE).touch()
    monkeypatch.setattr(services, "STATE_FOLDER", state.relative_to(folder))
    monkeypatch.setattr(services, "_commands", lambda *ports: {"shell": ["sleep", "600"]})
    monkeypatch.setattr(services, "_answers", lambda port: True)
    ports, said = (free_port(), free_port()), list[str]()
    starts = [
        threading.Thread(
            target=services.bring_up, args=(folder, Path("manual.yaml"), *ports, said.append)
        )
        for _ in range(2)
    ]
    for one in starts:
        one.start()
    for one in starts:
        one.join()
    assert sum("are already running" in line for line in said) == 1, said
    assert sum(line.startswith("board: http://") for line in said) == 1, said


def test_no_secret_is_in_a_file_or_a_command_line(state: Path) -> None:
    _start(state, "exec sleep 600")
    for path in state.iterdir():
        if path.is_file():
            assert "hunter2" not in path.read_text(), path
    for pid in find_leftovers(state):
        assert b"hunter2" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert (state / "control").is_socket()
    assert state.stat().st_mode & 0o077 == 0, "its owner alone may enter"


def test_services_are_found_after_temporary_files_were_cleared_away(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(state.parent / "temporary"))
    Path(tempfile.gettempdir()).mkdir()
    first = _start(state, "exec sleep 600")
    shutil.rmtree(tempfile.gettempdir())
    assert _the(state, "shell").pid == first.pid


def test_services_that_an_earlier_release_started_are_found_and_ended(state: Path) -> None:
    """Its socket was among the temporary files, and the state folder had a link to it."""
    _start(state, "exec sleep 600")
    temporary = state.parent / "temporary"
    temporary.mkdir()
    (state / "control").rename(temporary / "control")
    (state / "control").symlink_to(temporary / "control")
    assert _the(state, "shell").pid > 0
    assert services.stop(state) and not find_leftovers(state)
    assert _start(state, "exec sleep 600").pid > 0
