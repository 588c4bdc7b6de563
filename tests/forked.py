"""Commands and programs as real processes, forked from one that has imported what they need.

Most of what a command of this project takes is imports. What is started here has a process of its
own like any other, with its own environment, folder, output and signals, but shares the imports
with all others of the test session.
"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

# Not `llm_assets.definitions`, which reads the pipeline file.
IMPORTED = [
    "tests.uncollected",
    "tests.dagster_imported",
    "llm_assets.assets.corpus",
    "llm_assets.assets.evaluation",
    "llm_assets.assets.exam",
    "llm_assets.assets.model",
    "llm_assets.assets.serving",
    "llm_assets.assets.verdict",
    "llm_assets.cli.pipeline.run",
    "llm_assets.platform",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pandas",
    "recipes.training.trainer",
    "tests.forked",
    "transformers.models.llama.modeling_llama",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTED)


@dataclass(frozen=True)
class Surroundings:
    """Where a process runs, and the files that it prints to."""

    folder: Path
    environment: dict[str, str]
    output: Path
    error: Path | None = None
    """`output` where there is none."""


class ForkedProcess:
    """The leader of a process group, with the part of `subprocess.Popen` that tests need."""

    def __init__(
        self, program: Callable[[], object], command: Sequence[str], surroundings: Surroundings
    ) -> None:
        self._process = _context.Process(target=_run, args=(program, command, surroundings))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.output = surroundings.output

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the process runs on after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that was printed, once the process has ended."""
        self.wait(timeout)
        return self.output.read_text(), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_command(command: Sequence[str], surroundings: Surroundings) -> ForkedProcess:
    """Start an installed command, such as `dagster`."""
    return ForkedProcess(_installed_command, command, surroundings)


def run_command(
    command: Sequence[str], folder: Path, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run an installed command to its end."""
    with tempfile.TemporaryDirectory() as kept:
        output, error = Path(kept, "stdout"), Path(kept, "stderr")
        process = start_command(command, Surroundings(folder, environment, output, error))
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, code, output.read_text(), error.read_text())


def _installed_command() -> object:
    (command,) = entry_points(group="console_scripts", name=sys.argv[0])
    return command.load()()


def _run(program: Callable[[], object], command: Sequence[str], surroundings: Surroundings) -> None:
    os.setsid()
    # Looking for garbage among what was imported before the fork would copy all its pages.
    gc.freeze()
    gc.enable()
    for number, path in enumerate((surroundings.output, surroundings.error), start=1):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(path or surroundings.output, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    sys.argv = list(command)
    sys.exit(program())
