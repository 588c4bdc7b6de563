"""One temporary folder for each program; what killed ones left is removed by whoever comes next.

Spark, torch, Dagster Pipes and multiprocessing put folders under the temporary folder, and remove
them where they end well. After kill -9 nobody would know whose they are.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from artifacts.leases.holder import describe_holder, is_gone

PREFIX = "llm-assets-"
HOLDER_NAME = "holder.json"
LAST = -101
"""When the folder is removed, as multiprocessing counts: after the folder of its own, at -100."""


def use_own_temporary_folder() -> None:
    """Have this process, and what it starts, use a temporary folder of its own.

    It lies in the usual one (`TMPDIR`), and is removed when the process ends. Where it was killed,
    the next process that calls this removes it. Where none can be made, as on a full disk, all
    stays as it is.
    """
    tempfile.tempdir = None
    # Whoever needs a temporary file names the fault.
    with suppress(OSError):
        place = Path(tempfile.gettempdir())
        holder = _holder(place)
        if holder == describe_holder():
            return
        if holder is not None:
            # Of who started this process, and may end before it.
            place = place.parent
        _remove_abandoned(place)
        own = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        # Does nothing in a process that was forked from this one.
        Finalize(None, shutil.rmtree, (own,), {"ignore_errors": True}, LAST)
        Path(own, HOLDER_NAME).write_text(describe_holder())
        os.environ["TMPDIR"] = tempfile.tempdir = own


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*"):
        if is_gone(_holder(folder) or ""):
            shutil.rmtree(folder, ignore_errors=True)


def _holder(folder: Path) -> str | None:
    """Whose folder it is; None of one that is no program's, or another user's."""
    path = folder / HOLDER_NAME
    try:
        return path.read_text() if path.stat().st_uid == os.geteuid() else None
    except OSError:
        return None
