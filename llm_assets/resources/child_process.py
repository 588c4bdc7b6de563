"""Runs a program in a child process whose logs and figures stream into the Dagster run."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dagster import (
    AssetExecutionContext,
    PipesTempFileContextInjector,
    PipesTempFileMessageReader,
    open_pipes_session,
)

from artifacts.errors import UserError

INTERRUPTED = 75
"""A program's exit code for: stopped with its state saved, start me again (EX_TEMPFAIL)."""

TERMINATION_SECONDS = 60
LOG_TAIL_LINES = 25


def run_child(
    context: AssetExecutionContext, command: Sequence[str], log_path: Path, restarts: int = 0
) -> None:
    """Run a command to its end; start it again up to `restarts` times while it exits with 75.

    Its standard output and error go to `log_path`; what it reports through Dagster Pipes goes into
    the run. When the run is cancelled for whatever reason, the child is asked to stop (SIGTERM),
    given a minute to save its state, and then ended.

    Raises:
        UserError: the child failed, or ended without its closing message; the end of its log is in
            the message.
    """
    for attempt in range(restarts + 1):
        code, closed = _run_once(context, command, log_path)
        if code == INTERRUPTED and attempt < restarts:
            context.log.info(f"Interrupted with its state saved; starting again ({attempt + 1})")
            continue
        break
    if code != 0:
        raise UserError(
            f"`{' '.join(command[:6])} ...` ended with exit code {code}. The end of its log "
            f"({log_path}):\n{_tail(log_path)}"
        )
    if not closed:
        raise UserError(
            f"`{' '.join(command[:6])} ...` exited without its closing message, so it cannot be "
            f"taken as done. Its log: {log_path}"
        )


def _run_once(
    context: AssetExecutionContext, command: Sequence[str], log_path: Path
) -> tuple[int, bool]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        log_path.open("ab") as log,
        open_pipes_session(
            context=context,
            context_injector=PipesTempFileContextInjector(),
            message_reader=PipesTempFileMessageReader(),
        ) as session,
    ):
        environment = os.environ | session.get_bootstrap_env_vars()
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            code = child.wait()
        except BaseException:
            _terminate(child)
            raise
    return code, session.message_handler.received_closed_message


def _terminate(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(timeout=TERMINATION_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
