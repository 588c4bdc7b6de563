"""Programs of `recipes` in child processes, for a Dagster run or for a command."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from dagster import (
    AssetExecutionContext,
    PipesTempFileContextInjector,
    PipesTempFileMessageReader,
    open_pipes_session,
)

from artifacts.errors import LOST_WORKER, UserError, free_space, shown, why_killed
from artifacts.program.entry import ERROR_MESSAGE, INTERRUPTED
from artifacts.program.lifetime import Child, how_it_ended

TERMINATION_SECONDS = 60
LOG_TAIL_LINES = 25
_LAST_CHARACTERS = 1_000


def run_child(
    context: AssetExecutionContext, command: Sequence[str], log_path: Path, restarts: int = 0
) -> None:
    """Run a command to its end; start it again up to `restarts` times.

    That is where it exits with 75, or a worker of it ended without a word, such as one that was
    killed; a program that fails by a fault of its input says so in its closing message.

    Its standard output and error go to `log_path`; what it reports through Dagster Pipes goes into
    the run. When the run is cancelled for whatever reason, the child is asked to stop (SIGTERM),
    given a minute to save its state, and then ended.

    Raises:
        UserError: the child failed, or ended without its closing message. The message has the
            reason that the program gave, or else the end of its log.
    """
    for attempt in range(restarts + 1):
        code, closed, reason = _run_once(context, command, log_path)
        died = code != 0 and (not closed or reason == LOST_WORKER)
        if attempt == restarts or not (died or code == INTERRUPTED):
            break
        ended = "was interrupted, its state saved" if code == INTERRUPTED else _end(code)
        context.log.warning(
            f"The program {ended}; starting it again, {attempt + 1} of at most {restarts} times"
        )
    if reason and reason != LOST_WORKER:
        raise UserError(f"{reason}\n(From `{' '.join(command[:6])} ...`; its log: {log_path})")
    if code != 0:
        raise UserError(
            (f"{reason}\n" if reason else "")
            + f"`{' '.join(command[:6])} ...` {_end(code)}. The end of its log ({log_path}):\n"
            f"{_tail(log_path)}"
        )
    if not closed:
        raise UserError(
            f"`{' '.join(command[:6])} ...` exited without its closing message, so it cannot be "
            f"taken as done. Its log: {log_path}"
        )


def _run_once(
    context: AssetExecutionContext, command: Sequence[str], log_path: Path
) -> tuple[int, bool, str | None]:
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
        child = Child(command, environment=environment, output=log)
        try:
            code = child.wait()
        finally:
            # However this run ends, its child ends with it.
            child.end(TERMINATION_SECONDS)
    assert code is not None, "it was waited for without a limit"
    reasons = [m[ERROR_MESSAGE] for m in session.get_custom_messages() if ERROR_MESSAGE in m]
    return code, session.message_handler.received_closed_message, next(iter(reasons), None)


def _end(code: int) -> str:
    """How a program ended, in words, and what to do where it was killed."""
    if -code != signal.SIGKILL:
        return how_it_ended(code)
    why = why_killed(
        "Lower `checkpoint.placement.device_batch_size` or `tokenized_shards.sequence_length`, or "
        "set `checkpoint.placement.activation_checkpointing`."
    )
    return f"was killed (SIGKILL), {why} Training goes on from its newest checkpoint"


def _tail(path: Path) -> str:
    lines = shown(path.read_text(errors="replace")).splitlines()
    if not lines:
        return f"(it is empty; {free_space(str(path))})"
    return "\n".join(lines[-LOG_TAIL_LINES:])
