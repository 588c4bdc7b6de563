"""Faults of processes and disks, each in one line; those of stored things are in `tests.damage`.

with small_disk(folder, megabytes=2) as disk: ...      then disk.grow(50), disk.read_only()
with stopped(process): ...
environment |= killed_at("artifacts.store.store:commit")
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.needs import NEEDS

FAULT_VARIABLE = "TEST_FAULT_AT"
HOOK_FOLDER = Path(__file__).parent / "faults_hook"


@dataclass(frozen=True)
class Disk:
    """A file system of its own, of a size that can be changed."""

    folder: Path

    def grow(self, megabytes: float) -> None:
        """Let it hold so much in all."""
        self._remount(f"size={int(megabytes * 1024)}k")

    def leave(self, kilobytes: int) -> None:
        """Let it hold so much more than it does."""
        usage = os.statvfs(self.folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        self.grow((used + kilobytes * 1024) / 2**20)

    def read_only(self) -> None:
        """Refuse every change, as a file system does after an error of the disk."""
        self._remount("ro")

    def _remount(self, option: str) -> None:
        _mount("-o", f"remount,{option}", str(self.folder))


@contextmanager
def small_disk(folder: Path, megabytes: float = 64) -> Iterator[Disk]:
    """A disk in memory, mounted at a folder; the test is skipped where nothing may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k,mode=700", "tmpfs", str(folder))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(NEEDS["the right to mount a disk in memory"].reason)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def stopped(pid: int) -> Iterator[psutil.Process]:
    """A process that stands still while the block runs."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def killed_at(point: str, call: int = 1) -> dict[str, str]:
    """The environment in which Python ends by SIGKILL when it calls a function.

    Args:
        point: `module:function` or `module:Class.method`.
        call: at which of the process's calls, from 1.
    """
    return _fault_at("killed", point, call)


def hung_at(point: str, call: int = 1) -> dict[str, str]:
    """The environment in which a function, as of `killed_at`, does not return for a day."""
    return _fault_at("hung", point, call)


def _fault_at(how: str, point: str, call: int) -> dict[str, str]:
    path = [str(HOOK_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FAULT_VARIABLE: f"{how}:{point}:{call}", "PYTHONPATH": os.pathsep.join(path)}


def run_killed_at(point: str, *command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a Python program that is killed at a point; fails where it was never reached."""
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ | killed_at(point),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGKILL, f"{point} was never reached: {ended.stderr}"
    return ended
