"""Dagster's launcher of local runs, which also notices that a run's process has died.

Otherwise a run that was going when the machine lost its power counts as running for ever, and all
runs that need the same pool wait for it. `dagster.yaml` names this class.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dagster import DagsterEventType, DagsterRun
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus
from dagster._core.launcher.default_run_launcher import DefaultRunLauncher
from dagster._serdes import ConfigurableClassData

from artifacts.leases.holder import process_started

STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
PROGRAMS = ("dagster", "multiprocessing")
"""One of these is in the command line of a process that runs a run."""


class WatchfulRunLauncher(DefaultRunLauncher):
    """Launches runs on this machine; `run_monitoring` then ends those whose process is gone."""

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        return cls(inst_data=inst_data)

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Whether the run's process is there; unknown where it has not said which it is."""
        events = self._instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT)
        pids = [int(found[1]) for event in events if (found := STARTED.search(event.message))]
        if not pids or _is_there(pids[-1]):
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"its process {pids[-1]} has ended")


def _is_there(pid: int) -> bool:
    if process_started(pid) is None:
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(program in command for program in PROGRAMS)
