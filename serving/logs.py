"""The log: lines of JSON, on standard error or in a file of a bounded size."""

import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

MAX_BYTES = 16 * 1024 * 1024
"""Of one file; when it is full, it takes the place of the one before."""
MOST_LOGS = 5
"""Of engines that have ended, for whoever looks for their last words."""
TALLY_SECONDS = 10.0


_path: Path | None = None


def log_to(path: Path) -> None:
    """Have this process's log go to a file, not to standard error."""
    global _path
    _path = path


def log(name: str, **fields: Any) -> None:
    """Write one line of JSON to the log; a full disk must not stop the server."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"at": at, "event": name} | fields)
    if _path is not None:
        append(_path, f"{line}\n".encode())
        return
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class LogHandler(logging.Handler):
    """What libraries log, as lines of the same log."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"of": record.name, "text": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = traceback.format_exception(*record.exc_info)
        log(record.levelname.lower(), **fields)


class Tally:
    """Logs something that may come in thousands: its first, then how many came in a while."""

    def __init__(self, name: str) -> None:
        # The clock may begin at 0 with the machine; the first one is logged then, too.
        self._name, self._said_at = name, -TALLY_SECONDS
        self._unsaid = 0

    def add(self, **fields: Any) -> None:
        """Count one; `fields` are those of the one that is logged."""
        self._unsaid += 1
        now = monotonic()
        if now - self._said_at >= TALLY_SECONDS:
            log(self._name, count=self._unsaid, **fields)
            self._said_at, self._unsaid = now, 0


def append(path: Path, content: bytes) -> None:
    """Add to a log; where that cannot be, as on a full disk, the content is lost."""
    with suppress(OSError):
        make_room(path)
        # Opened for each line: another process of this endpoint may have moved the full file away.
        with path.open("ab", buffering=0) as file:
            # Unbuffered, this is one write at the file's end, so that lines of the supervisor and
            # of the API server do not mix.
            file.write(content)


def make_room(path: Path, is_open: bool = False) -> None:
    """Begin a log again where it is full; what was written stays beside it, once.

    Args:
        is_open: whether a program goes on writing at its end: it stays the same file then, and a
            line that comes meanwhile may be lost.
    """
    with suppress(OSError):
        if path.stat().st_size < MAX_BYTES:
            return
        if not is_open:
            os.replace(path, before(path))
            return
        # Where there is no room for a copy, there is even less for more of the log.
        with suppress(OSError):
            shutil.copyfile(path, before(path))
        os.truncate(path, 0)


def remove_oldest(logs: Iterable[Path]) -> None:
    """Delete all but the newest of some logs, with what came before them."""
    with suppress(OSError):
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[:-MOST_LOGS]:
            before(path).unlink(missing_ok=True)
            path.unlink()


def before(path: Path) -> Path:
    """Where the full log lies that came before this one."""
    return path.with_name(f"{path.name}.before")


def tail(path: Path, count: int = 15) -> str:
    """The last lines; empty where somebody removed it."""
    with suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    return ""
