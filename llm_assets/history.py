"""What runs, read from Dagster's history without Dagster, whose import alone takes 0.7 s.

The table of runs and these columns have been the same since Dagster 0.8; a test writes it by the
Dagster that is pinned.
"""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.yaml_files import read_yaml

RUNNING = ("QUEUED", "STARTING", "STARTED")
DATABASE = "history/runs.db"
ASKED = "SELECT run_id, status FROM runs WHERE status IN (?, ?, ?) ORDER BY id DESC"


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that waits or is under way."""

    run_id: str
    status: str

    def __str__(self) -> str:
        return f"run {self.run_id[:8]} ({self.status.lower()})"


def sqlite_folder(home: Path) -> Path | None:
    """Dagster's folder of databases, relative to where its programs run, as dagster.yaml has it.

    None where the history is in another database, or Dagster takes the path from the environment.
    """
    storage: Any = (read_yaml(home / "dagster.yaml") or {}).get("storage") or {}
    base = storage.get("sqlite", {}).get("base_dir")
    return Path(base) if isinstance(base, str) else None


def unfinished_runs(folder: Path) -> list[UnfinishedRun]:
    """The runs of the history that a folder's dagster.yaml names; none where there is none."""
    home = Path(os.environ.get("DAGSTER_HOME") or folder)
    if not (home / "dagster.yaml").exists():
        return []
    base = sqlite_folder(home)
    if base is None:
        return _by_dagster(home)
    database = folder / base / DATABASE
    if not database.exists():
        return []
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute(ASKED, RUNNING).fetchall()
    finally:
        connection.close()
    return [UnfinishedRun(*row) for row in rows]


def _by_dagster(home: Path) -> list[UnfinishedRun]:
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    chosen = RunsFilter(statuses=[DagsterRunStatus(status) for status in RUNNING])
    with DagsterInstance.from_config(str(home)) as instance:
        return [UnfinishedRun(run.run_id, run.status.value) for run in instance.get_runs(chosen)]
