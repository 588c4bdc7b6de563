"""One user unit of systemd that keeps the services' supervisor running, from login or boot on."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from artifacts.errors import UserError
from artifacts.storage import files

UNIT = """\
[Unit]
Description=llm-assets in {folder}

[Service]
WorkingDirectory={folder}
ExecStart={command}
{environment}
Restart=always
RestartSec=5
# The endpoint goes on; whatever else is left is ended by the next start, or by `llm-assets down`.
KillMode=process
TimeoutStopSec=120

[Install]
WantedBy=default.target
"""
OF_THE_UNIT = ("LLM_ASSETS_CONFIG", "DAGSTER_HOME", "PATH")
"""Variables that are written into it; all others are handed to systemd's memory, secrets too."""
NOT_PASSED = ("_", "PWD", "OLDPWD", "SHLVL")


def is_there() -> bool:
    """Whether this user's systemd answers."""
    if shutil.which("systemctl") is None:
        return False
    return _systemctl("show-environment").returncode == 0


def install(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write the unit of a folder, switch it on and start it.

    Raises:
        UserError: systemd refuses it.
    """
    files.write(_unit_path(folder), unit(folder, command, environment).encode())
    passed = sorted(set(environment) - {*OF_THE_UNIT, *NOT_PASSED})
    for arguments in (
        ("import-environment", *passed),
        ("daemon-reload",),
        ("enable", "--now", _unit_path(folder).name),
    ):
        done = _systemctl(*arguments)
        if done.returncode:
            raise UserError(f"systemctl --user {arguments[0]} failed: {done.stderr.strip()}")


def unit(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The unit's content; no secret is in it."""
    variables = [
        f"Environment={_quoted(f'{name}={environment[name]}')}"
        for name in OF_THE_UNIT
        if name in environment
    ]
    return UNIT.format(
        folder=_escaped(str(folder)),
        command=" ".join(map(_quoted, command)),
        environment="\n".join(variables),
    )


def remove(folder: Path) -> bool:
    """Switch the unit of a folder off and remove it; whether there was one."""
    path = _unit_path(folder)
    if not path.exists():
        return False
    _systemctl("disable", "--now", path.name)
    path.unlink(missing_ok=True)
    _systemctl("daemon-reload")
    return True


def _unit_path(folder: Path) -> Path:
    # Two projects may have folders of the same name.
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "systemd" / "user" / f"llm-assets-{digest}.service"


def _systemctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True)


def _quoted(text: str) -> str:
    within = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escaped(within)}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
