"""The reason behind an error that nobody foresaw, with what to do about it, in one message.

It is told by what a library raises or says, so that none of them has to be imported for it.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from artifacts.errors import UserError, first_line, install_advice, shown

LOST_WORKER = (
    "A worker of this training ended while the others waited for it; what it said, or what ended "
    "it, is in the log. Run the same again: training goes on from its newest checkpoint."
)


def reason_of(error: BaseException, place: str = ".") -> str | None:
    """The reason behind an error, with what to do about it; None where it is not known. An error
    that names no file is taken for one of the disk that `place` is on."""
    libraries = (_of_memory, _of_spark, _of_worker, _of_history, _of_network, _of_parquet)
    for cause in chain(error):
        if isinstance(cause, UserError):
            return str(cause)
        if reason := _of_system(cause, place):
            return reason
        for of_library in libraries:
            if reason := of_library(cause):
                return reason
    return _of_missing_module(error)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, what caused that."""
    # Exceptions can be chained in a circle.
    seen_ids: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen_ids:
        seen_ids.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


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
        # In containers (control groups, version 2); the root of a machine's groups has none.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    # Without a limit, the file says `max`.
    return min(machine, int(limit)) if limit.isdigit() else machine


def _limit() -> str:
    return f"{memory_limit() / 2**30:,.1f} GiB"


_KILL_COUNTERS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")


def _count_kills() -> int | None:
    """Processes that the kernel has ended for want of memory: those of this control group, or of
    the machine; None where it does not say."""
    for counters in _KILL_COUNTERS:
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", Path(counters).read_text(), re.MULTILINE):
                return int(match[1])
    return None


# Read when the program starts: the counter includes kills from before, which explain nothing now.
_KILLS_BEFORE = _count_kills()


def why_killed(for_less: str) -> str:
    """Why a process was killed, as far as the kernel tells, as the end of a sentence on it; where
    memory may be the reason, `for_less` follows: what to do to need less of it."""
    kills, limit = _count_kills(), _limit()
    if kills is None:
        return f"perhaps because memory ran out (the limit here is {limit}). {for_less}"
    if kills == _KILLS_BEFORE:
        return "but not for want of memory: the kernel has ended no process for that."
    # "Most likely": the counter is of the whole control group, or machine, and names no process.
    cause = f"the kernel ended a process for that; the limit here is {limit}"
    return f"most likely because memory ran out: {cause}. {for_less}"


_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""What Rust writes behind an error of the system."""


def _of_system(error: BaseException, place: str) -> str | None:
    if not isinstance(error, OSError):
        # safetensors and tokenizers are written in Rust, and raise classes of their own.
        match = _RUST_ERROR.search(str(error))
        return _of_system(OSError(int(match[1]), ""), place) if match else None
    path = shown(str(error.filename or place))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"No space left on the disk while writing {path}: {free_space(path)}. Nothing finished "
            "is lost: free some space, or set `store` to another disk, and run the same again."
        )
    if error.errno == errno.EFBIG:
        return f"{path} may not grow further: the limit on file size (`ulimit -f`) is too low."
    if error.errno == errno.ENAMETOOLONG:
        return f"{path}: the name is too long for a file. Choose a shorter one."
    if error.errno == errno.EROFS:
        return f"{path} is on a file system that is mounted read-only. Set `store` to another one."
    if error.errno == errno.ENOTDIR:
        parents = [Path(error.filename or place), *Path(error.filename or place).parents]
        file = next((parent for parent in parents if parent.exists() and not parent.is_dir()), path)
        return (
            f"{shown(str(file))} is a file, where a folder belongs. Move it away, or set `store` "
            "to a folder."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{path}: this user (uid {os.geteuid()}) has no permission for it. Grant it, or use a "
            "folder that is yours: as the project's, or by `store` or the source's `path`."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Too many open files: raise the limit, for example with `ulimit -n 65536`."
    if error.errno == errno.EIO:
        return f"{path} could not be read or written: the disk reports an error (EIO)."
    return None


_SIZE = r"[\d.]+ (?:\wiB|bytes)"
GPU_MEMORY = re.compile(
    rf"Tried to allocate (?P<wanted>{_SIZE})\..* total capacity of (?P<all>{_SIZE}) "
    rf"of which (?P<free>{_SIZE}) is free"
)
"""In what torch says."""


def _of_memory(error: BaseException) -> str | None:
    text = str(error)
    out_of_memory = isinstance(error, MemoryError) or "java.lang.OutOfMemoryError" in text
    if not out_of_memory and type(error).__name__ != "OutOfMemoryError":
        return None
    if gpu := GPU_MEMORY.search(text):
        # Training notes on the error what took the memory.
        took = "".join(f"{note} " for note in getattr(error, "__notes__", ()))
        return (
            f"The GPU's memory ran out: {gpu['wanted']} more were asked for where {gpu['free']} of "
            f"{gpu['all']} were free. {took}What needs less, the cheapest first: a lower "
            "`checkpoint.placement.device_batch_size`, which leaves the global batch as it is; "
            "`checkpoint.placement.activation_checkpointing: true`; more GPUs "
            "(`checkpoint.placement.workers`), over which weights and optimizer state are divided; "
            "a shorter `tokenized_shards.sequence_length`. In an evaluation: a lower "
            "`eval_metrics.batch_tokens`. Training goes on from its newest checkpoint."
        )
    java = "java.lang" in text
    setting = "raise `spark.driver_memory`" if java else "lower `spark.partitions` (corpus stages)"
    whose = "Spark's Java process ran" if java else "This process ran"
    return (
        f"{whose} out of memory; the limit here is {_limit()}. "
        f"For less need of it, {setting} or `checkpoint.placement.device_batch_size` (training)."
    )


_SPARK_ENDED = {
    "JAVA_GATEWAY_EXITED": "Spark's Java process ended before it was ready (its log says more)",
    "Py4JNetworkError|Answer from Java side is empty": "Spark's Java process was ended",
    "Python worker (exited unexpectedly|failed to connect)": "A Python worker of Spark was ended",
    "PythonWorkerFactory": "Spark's Python ended before it was ready (its log says more)",
}
"""What an error holds where a process of Spark ended, and what is said; the first found counts."""


def _of_spark(error: BaseException) -> str | None:
    text = f"{type(error).__name__}: {error}"
    # Java gives a full disk as text, without the number by which `_of_system` knows it.
    if "org.apache.spark" in text and "No space left on device" in text:
        return (
            "No space left on a disk that Spark writes to: that of its shuffles "
            f"(`SPARK_LOCAL_DIRS`, else {tempfile.gettempdir()}) or the store's. Nothing finished "
            "is lost: free some space, or set `SPARK_LOCAL_DIRS` to a folder on another disk, and "
            "run the same again."
        )
    for pattern, event in _SPARK_ENDED.items():
        if re.search(pattern, text):
            why = why_killed("Lower `spark.driver_memory` or `spark.partitions`.")
            return f"{event}, {why} Run the same again: what is finished is not done twice."
    return None


_WORKER_LOST = re.compile(
    r"gloo/.*(reset|closed) by peer|Dist\w*Error: .*(remote process exited|(reset|closed) by peer)",
    re.DOTALL,
)
"""What torch.distributed raises in the workers that are left, on processors and on GPUs."""


def _of_worker(error: BaseException) -> str | None:
    return LOST_WORKER if _WORKER_LOST.search(f"{type(error).__name__}: {error}") else None


HISTORY = ".llm_assets/dagster"
"""Where `dagster.yaml` puts Dagster's history."""
_OF_HISTORY = {
    "database is locked": (
        "Dagster's history is locked by another process, so nothing can be recorded. End the other "
        "`dagster` or `llm-assets` command (`fuser` names it), then run the same again."
    ),
    "database or disk is full|disk I/O error": (
        f"Dagster's history cannot be written: its disk is full or failing ({{free}}). The folder "
        f"is `{HISTORY}` (`storage.sqlite.base_dir` in dagster.yaml). Nothing finished is lost: "
        "free some space and run the same again."
    ),
    "database disk image is malformed|file is not a database": (
        "Dagster's history is damaged. It is a record only, no artifact is lost: move the folder "
        f"`{HISTORY}` (`storage.sqlite.base_dir` in dagster.yaml) away and run the same again."
    ),
    r"psycopg2\.OperationalError|too many retries for DB connection": (
        "Dagster's history cannot be reached: its PostgreSQL (`storage.postgres` in dagster.yaml) "
        "does not answer, or refuses this user. Nothing finished is lost: start it, or correct the "
        "address, and run the same again."
    ),
    r"\$DAGSTER_HOME is not set": (
        "There is no dagster.yaml here, which says where Dagster's history is. Run this in the "
        "project's folder, or set DAGSTER_HOME to it."
    ),
    "No module named 'psycopg'": (
        "The address of Dagster's PostgreSQL (`storage.postgres` in dagster.yaml) has to begin "
        "with postgresql+psycopg2://, which names the driver that is installed."
    ),
    "attempt to write a readonly database|unable to open database file": (
        f"Dagster's history cannot be written: the folder `{HISTORY}` (`storage.sqlite.base_dir` "
        "in dagster.yaml) is read-only, missing or not yours."
    ),
}
"""What an error of Dagster's history holds, and what is said."""


def _of_history(error: BaseException) -> str | None:
    text = str(error)
    for pattern, message in _OF_HISTORY.items():
        if re.search(pattern, text):
            # Only where it is told: where the folder is gone or not this user's, it is not known.
            return message.format(free=free_space(HISTORY) if "{free}" in message else "")
    # What Dagster says of dagster.yaml: of a package that is absent, of a variable, of all else.
    if absent := re.search(
        r"Couldn't import module (\w+) when attempting to load the config", text
    ):
        return install_advice(absent[1])
    if unset := re.search(r'fetch the environment variable "(\w+)" which is not set', text):
        return f"dagster.yaml names the environment variable {unset[1]}, which is not set here."
    phrases = "loading dagster instance config at dagster.yaml.", "Expected YAML from file "
    fault = next((text.partition(phrase)[2] for phrase in phrases if phrase in text), None)
    return fault and f"dagster.yaml is wrong: {fault.strip()}"


_UNREACHABLE = {
    *("ClientConnectorError", "ConnectError", "ConnectTimeout", "ConnectTimeoutError"),
    *("MaxRetryError", "NewConnectionError", "TransportError", "gaierror"),
}
"""What aiohttp, httpx, requests, urllib3, Google's clients and Python raise for a server that does
not answer."""


def _of_network(error: BaseException) -> str | None:
    """By the names of classes, so that none of the clients has to be imported."""
    names = {base.__name__ for base in type(error).__mro__}
    if "DefaultCredentialsError" in names:
        # Google's library gives some of them the error behind them as a second argument.
        told = first_line(Exception(*error.args[:1]))
        return (
            f"{told} Log in with `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS to the key file of a service account."
        )
    if names & _UNREACHABLE:
        return (
            f"A server cannot be reached: {first_line(error)}. Check this machine's network and "
            "proxy (`HTTPS_PROXY`), then run the same again."
        )
    return None


_PARQUET = re.compile(
    "Parquet magic bytes|Could not open Parquet input|Parquet file size|page integrity"
    "|deserialize thrift|Invalid flatbuffers|Corrupt [a-zA-Z]+ compressed"
)
"""What Arrow says of damaged bytes, by classes of errors that others have, too."""


def _of_parquet(error: BaseException) -> str | None:
    """Whoever reads files one by one names the damaged one; of many at once, Arrow may not."""
    if type(error).__name__ not in ("ArrowInvalid", "OSError") or not _PARQUET.search(str(error)):
        return None
    # What the system says of a file, such as of one on a network, tells nothing of its bytes.
    if getattr(error, "errno", None) is not None:
        return None
    return (
        f"A Parquet file of the store is damaged ({first_line(error)}). Set what is damaged aside "
        "with `llm-assets doctor --repair`, and make it again."
    )


def _of_missing_module(error: BaseException) -> str | None:
    """Only what an error was raised from: libraries try modules that they can do without."""
    while error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    return install_advice(error.name)
