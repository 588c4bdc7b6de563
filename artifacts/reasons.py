"""Says in one message why something failed that nobody foresaw where it happened."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from artifacts.errors import UserError
from artifacts.shown import shown

GIB = 2**30
UNSET_VARIABLE = re.compile(r'attempted to fetch the environment variable "(\w+)" which is not set')
"""In what Dagster says."""
HISTORY = ".llm_assets/dagster"
"""Where `dagster.yaml` puts Dagster's history."""


def reason_of(error: BaseException, place: str = ".") -> str | None:
    """The reason behind an error, with what to do about it; None where it is not known.

    Args:
        place: a folder on the disk that was written to, for errors that name no file.
    """
    for one in chain(error):
        if isinstance(one, UserError):
            return str(one)
        found = _of_system(one, place) or _of_memory(one) or _of_spark(one) or _of_history(one)
        if found:
            return found
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, what caused that."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def free_space(path: str) -> str:
    """`1.2 GB free of 50.0 GB` where the path is, or would be."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return f"{usage.free / 1e9:,.1f} GB free of {usage.total / 1e9:,.1f} GB"


def memory_limit() -> int:
    """Bytes of memory that processes here may have: the control group's limit, or the machine's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        stated = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(stated)) if stated.isdigit() else machine


def _of_system(error: BaseException, place: str) -> str | None:
    if not isinstance(error, OSError):
        return None
    path = shown(str(error.filename or place))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"No space left on the disk while writing {path}: {free_space(path)}. Nothing finished "
            "is lost: free some space, or set `store` to another disk, and run the same again."
        )
    if error.errno == errno.EFBIG:
        return f"{path} may not grow further: the limit on file size (`ulimit -f`) is too low."
    if error.errno == errno.EROFS:
        return f"{path} is on a file system that is mounted read-only. Set `store` to another one."
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{path}: this user (uid {os.geteuid()}) lacks the right to it. Give the right, or "
            "set `store` or the source's `path` to a folder that is yours."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Too many open files: raise the limit, for example with `ulimit -n 65536`."
    if error.errno == errno.EIO:
        return f"{path} could not be read or written: the disk reports an error (EIO)."
    return None


def _of_memory(error: BaseException) -> str | None:
    text = str(error)
    out_of_memory = isinstance(error, MemoryError) or "java.lang.OutOfMemoryError" in text
    if not out_of_memory and type(error).__name__ != "OutOfMemoryError":
        return None
    java = "java.lang" in text
    setting = "raise `spark.driver_memory`" if java else "lower `spark.partitions` (corpus stages)"
    whose = "Spark's Java process ran" if java else "This process ran"
    return (
        f"{whose} out of memory; the limit here is {memory_limit() / GIB:,.1f} GiB. "
        f"For less need of it, {setting} or `checkpoint.placement.device_batch_size` (training)."
    )


def _of_spark(error: BaseException) -> str | None:
    text = f"{type(error).__name__}: {error}"
    if "org.apache.spark" in text and "No space left on device" in text:
        return (
            "No space left on a disk that Spark writes to: that of its shuffles "
            f"(`SPARK_LOCAL_DIRS`, else {tempfile.gettempdir()}) or the store's. Nothing finished "
            "is lost: free some space, or set `SPARK_LOCAL_DIRS` to a folder on another disk, and "
            "run the same again."
        )
    if "Python worker exited unexpectedly" in text or "Python worker failed to connect" in text:
        return (
            "A Python worker of Spark was ended, most likely because memory ran out (the limit "
            f"here is {memory_limit() / GIB:,.1f} GiB). Lower `spark.partitions`, how many work at "
            "a time, and run the same again: what is finished is not done twice."
        )
    if "Py4JNetworkError" in text or "Answer from Java side is empty" in text:
        return (
            "Spark's Java process was ended from outside, most likely because memory ran out (the "
            f"limit here is {memory_limit() / GIB:,.1f} GiB). Lower `spark.driver_memory` or "
            "`spark.partitions`, and run the same again: what is finished is not done twice."
        )
    return None


def _of_history(error: BaseException) -> str | None:
    text = str(error)
    if "database is locked" in text:
        return (
            "Dagster's history is locked by another process, so nothing can be recorded. End the "
            "other `dagster` or `llm-assets` command (`fuser` names it), then run the same again."
        )
    if "database or disk is full" in text or "disk I/O error" in text:
        return (
            f"Dagster's history cannot be written: its disk is full or failing "
            f"({free_space(HISTORY)}). The folder is `{HISTORY}` (`storage.sqlite.base_dir` in "
            "dagster.yaml). Nothing finished is lost: free some space and run the same again."
        )
    if "database disk image is malformed" in text or "file is not a database" in text:
        return (
            "Dagster's history is damaged. It is a record only, no artifact is lost: move the "
            "folder `.llm_assets/dagster` (`storage.sqlite.base_dir` in dagster.yaml) away and run "
            "the same again."
        )
    if "psycopg2.OperationalError" in text or "too many retries for DB connection" in text:
        return (
            "Dagster's history cannot be reached: its PostgreSQL (`storage.postgres` in "
            "dagster.yaml) does not answer, or refuses this user. Nothing finished is lost: start "
            "it, or correct the address, and run the same again."
        )
    if "No module named 'psycopg'" in text:
        return (
            "The address of Dagster's PostgreSQL (`storage.postgres` in dagster.yaml) has to begin "
            "with postgresql+psycopg2://, which names the driver that is installed."
        )
    if found := UNSET_VARIABLE.search(text):
        return f"dagster.yaml names the environment variable {found[1]}, which is not set here."
    if "attempt to write a readonly database" in text or "unable to open database file" in text:
        return (
            "Dagster's history cannot be written: the folder `.llm_assets/dagster` "
            "(`storage.sqlite.base_dir` in dagster.yaml) is read-only, missing or not yours."
        )
    return None
