"""Stands for a job: does what its arguments say and reports it.

On Dataproc it uses the shipped Pipes writer, elsewhere this project's.

Usage: report.py [--count FILE] [STEP...]. The steps: `log:TEXT`, `materialize`, `sleep:SECONDS`,
`stamp:FILE` (write the time), `wait:FILE` (until it is there), `exit:STATUS`, `die:STATUS` (without
a closing message), `raise:TEXT`, and, where FILE counts the starts, `fail-until:N:STATUS` (exit so
before start N), `die-until:N:STATUS`, `lose-until:N` (a worker of others) and `hang-until:N` (sleep
until killed).
"""

import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from dagster_pipes import (
    PipesCliArgsParamsLoader,
    PipesContext,
    PipesGCSMessageWriter,
    open_dagster_pipes,
)
from google.cloud import storage

from artifacts.errors import UserError
from artifacts.program.entry import FLUSH_SECONDS, open_session
from artifacts.reasons import LOST_WORKER

HOURS = 3600.0
LOOK_SECONDS = 0.1


def _count_start(path: str) -> int:
    with Path(path).open("a") as file:
        file.write("start\n")
    return len(Path(path).read_text().splitlines())


def _do(step: str, start: int, pipes: PipesContext) -> None:
    verb, _, value = step.partition(":")
    if verb == "log":
        pipes.log.info(f"{value} (start {start})")
    elif verb == "materialize":
        pipes.report_asset_materialization(metadata={"start": start})
    elif verb == "stamp":
        Path(value).write_text(str(time.time()))
    elif verb == "wait":
        while not Path(value).exists():
            time.sleep(LOOK_SECONDS)
    elif verb == "sleep":
        time.sleep(float(value))
    elif verb == "exit":
        sys.exit(int(value))
    elif verb == "die":
        time.sleep(2 * FLUSH_SECONDS)
        os._exit(int(value))
    elif verb == "raise":
        raise ValueError(value)
    elif verb == "fail-until":
        number, status = value.split(":")
        if start < int(number):
            sys.exit(int(status))
    elif verb == "die-until":
        number, status = value.split(":")
        if start < int(number):
            _do(f"die:{status}", start, pipes)
    elif verb == "lose-until" and start < int(value):
        raise UserError(LOST_WORKER)
    elif verb == "hang-until" and start < int(value):
        time.sleep(HOURS)


def _open_pipes() -> AbstractContextManager[PipesContext]:
    if not PipesCliArgsParamsLoader().is_dagster_pipes_process():
        return open_session()
    writer = PipesGCSMessageWriter(storage.Client(), interval=0)
    return open_dagster_pipes(params_loader=PipesCliArgsParamsLoader(), message_writer=writer)


def main() -> None:
    arguments = sys.argv[1:]
    start = 1
    if arguments[:1] == ["--count"]:
        start = _count_start(arguments[1])
        arguments = arguments[2:]
    with _open_pipes() as pipes:
        for step in arguments:
            if step.startswith("--dagster-pipes"):
                break
            _do(step, start, pipes)


if __name__ == "__main__":
    main()
