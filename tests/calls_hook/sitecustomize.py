"""Read by Python at its start where this folder is on PYTHONPATH: see `tests.test_walks`.

Writes down when the functions of TEST_CALLS are called, in every process and thread.
"""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

NAMES = {tuple(name.split(":")) for name in os.environ.get("TEST_CALLS", "").split()}
ROOT = os.environ.get("TEST_CALLS_ROOT", "")
MOST = 500
"""Calls of one function that one process writes down."""
_wanted: dict[Any, str | None] = {}
_counts: dict[str, int] = {}


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event != "call":
        return
    code = frame.f_code
    if code not in _wanted:
        path = code.co_filename.removeprefix(ROOT)
        is_wanted = (path, code.co_qualname) in NAMES
        _wanted[code] = f"{path}:{code.co_qualname}" if is_wanted else None
    name = _wanted[code]
    if name is not None and _counts.get(name, 0) < MOST:
        _counts[name] = _counts.get(name, 0) + 1
        with open(os.environ["TEST_CALLS_FILE"], "a") as file:
            file.write(f"{time.time_ns()} {name}\n")


if NAMES:
    sys.setprofile(_note)
    threading.setprofile(_note)
