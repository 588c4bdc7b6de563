"""BigQuery: the emulator in an environment of its own, where it has been made.

Make it with `python -m venv .venv-bigquery` and, in it, `pip install bqemulator==1.4.0 numpy
duckdb==1.5.5 duckdb-extension-spatial duckdb-extension-avro`.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.stand_ins.processes import REPOSITORY

EMULATOR_VARIABLE = "BIGQUERY_EMULATOR"
START_SECONDS = 60.0


def find_emulator() -> Path | None:
    """The emulator, named by BIGQUERY_EMULATOR or in `.venv-bigquery`; None without it."""
    path = Path(
        os.environ.get(EMULATOR_VARIABLE) or REPOSITORY / ".venv-bigquery" / "bin" / "bqemulator"
    )
    return path if path.exists() else None


@contextmanager
def running_bigquery(command: Path, project: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Start the emulator; yields the URL of its REST API."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(listener.getsockname()[1])
    home = Path(tempfile.mkdtemp(prefix="bigquery-"))
    _install_extensions(command.parents[1], home)
    process = subprocess.Popen(
        [
            *(str(command), "start", "--project", project, "--log-level", "error"),
            *("--rest-port", str(ports[0]), "--grpc-port", str(ports[1])),
        ],
        env=os.environ | dict(environment) | {"HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        _wait(process, f"{url}/bigquery/v2/projects/{project}/datasets")
        yield url
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _install_extensions(environment: Path, home: Path) -> None:
    """Put DuckDB's extensions, which came as Python packages, where it would download them to."""
    for path in environment.glob("lib/python*/site-packages/duckdb_extension_*/extensions/v*/*"):
        folder = home / ".duckdb" / "extensions" / path.parent.name / "linux_amd64"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the BigQuery emulator did not start")
