"""Errors that a user can act on, and one message for those that nobody foresaw.

What is quoted is made fit for a terminal: nothing in untrusted text reaches it as a command. Where
a module is not installed, the extra of llm-assets that brings it is named.
"""

import errno
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote

_UNSAFE = re.compile(
    # Control characters but the line feed and tab, marks that turn the direction of writing, and
    # surrogates, which no terminal or file takes.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BREAKS = re.compile("[\t\n]")


HUB_ADVICE = (
    "If it is gated or private, accept its terms there and give a token in HF_TOKEN, or on Google "
    "Cloud in the secret that `secrets.hugging_face_token` names; if the Hub is busy, try again "
    "later."
)
"""What to do where the Hugging Face Hub gives nothing."""


def shown(text: str) -> str:
    r"""Text of several lines with its control characters written out: `\x1b[31m`, `\u202e`."""
    return _UNSAFE.sub(_escape, text)


def shown_in_line(text: str) -> str:
    r"""The same for what belongs on one line, such as an id or a path: breaks become `\n`."""
    return _BREAKS.sub(_escape, shown(text))


def has_control_characters(text: str) -> bool:
    """Whether `shown_in_line` would change the text."""
    return bool(_UNSAFE.search(text) or _BREAKS.search(text))


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()


_DISTRIBUTIONS = {
    "awkward": "gigatoken",
    "docx": "python-docx",
    "fasttext": "fasttext-numpy2-wheel",
    "google": "google-cloud-storage",
    "google_crc32c": "google-cloud-storage",
    "huggingface_hub": "transformers",
    "openvino_tokenizers": "openvino-genai",
    "psycopg2": "dagster-postgres",
    "py4j": "pyspark",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel-yaml",
}
"""Of a top-level module the distribution that brings it, where their names differ."""


def extra_of(module: str) -> str | None:
    """The first extra whose distributions bring the module, as pyproject.toml lists them.

    None where none does, or where llm-assets itself is not installed as a distribution.
    """
    name = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(name, name).replace("_", "-").lower()
    try:
        requirements = importlib.metadata.requires("llm-assets") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        # Such a line of the metadata is `NAME>=VERSION; extra == "EXTRA"`.
        extra = re.match(r"""([\w.-]+).*;.*\bextra == ["']([\w-]+)["']""", requirement)
        if extra and extra[1].replace("_", "-").lower() == distribution:
            return extra[2]
    return None


def pip_command() -> str:
    """The program that installs packages here: `uv venv` makes environments without pip."""
    return "pip" if importlib.util.find_spec("pip") else "uv pip"


def install_advice(module: str) -> str | None:
    """What to install where the module is absent, in a sentence; None where no extra brings it."""
    extra = extra_of(module)
    return extra and (
        f"This needs {module}, which is not installed here. Install the extra that brings it: "
        f"{pip_command()} install 'llm-assets[{extra}]'"
    )


CONFIG_VARIABLE, PREFIX_VARIABLE = "LLM_ASSETS_CONFIG", "LLM_ASSETS_KEY_PREFIX"
"""The pipeline file in force, and the prefix of its asset keys; programs that it starts inherit
both."""


class UserError(Exception):
    """A fault in what the user gave: a setting, a file, a missing input.

    The message names the file, key or row, says what was expected and what to do next. Entry points
    print it alone, without a traceback.
    """


class MissingArtifact(UserError):
    """An input artifact does not exist yet, or no longer."""


class LeaseLost(UserError):
    """Another maker has taken over; what this one made is not committed.

    Raised where this machine was asleep or cut off for longer than the lease lasts. Asking again
    finds what the other made.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} That happens where this machine was asleep, or cut off from the store, for "
            "too long. Nothing of its work was entered. Run the same command again: what exists by "
            "then is used."
        )


class DamagedArtifact(UserError):
    """A file of an artifact has another size or checksum than its manifest says."""


OF_ONE_REQUEST = re.compile(
    r"\s*\((?:Request ID|Amzn Trace ID|Amz CF ID): [^)\n]*\)"
    r"|\s*Job ID: \S+"
)
"""What errors of the Hub and of BigQuery say of one request alone. Without it, an error that
repeats reads the same each time, and is reported once."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters; its name where it says nothing."""
    # The first line of the Hub's rate-limit error has nothing but the request's id.
    message = OF_ONE_REQUEST.sub("", str(error)).strip()
    return (message or type(error).__name__).splitlines()[0][:300]


def make_command(asset: str) -> str:
    """The shell line that makes an asset and whatever before it does not exist."""
    return materialize_command(f"*{asset}")


def materialize_command(*selected: str) -> str:
    """The shell line that materializes assets, an asterisk before a name meaning all before it.

    Asset keys have the prefix that PREFIX_VARIABLE names, as they have in the pipeline in force.
    """
    prefix = os.environ.get(PREFIX_VARIABLE)
    before = f"{prefix}/" if prefix else ""
    keys = ",".join(re.sub(r"^(\*?)", rf"\1{before}", name) for name in selected)
    command = f'dagster asset materialize --select "{keys}"'
    with suppress(OSError, UnicodeDecodeError):
        # In a project that `llm-assets init` made, that file says where the definitions are.
        if "DAGSTER_MODULE_NAME=llm_assets" in Path("env.sh").read_text():
            config = os.environ.get(CONFIG_VARIABLE)
            assignment = f"{CONFIG_VARIABLE}={quote(config)} " if config else ""
            # In a shell of its own, so that the user's keeps what it has.
            return f"(. ./env.sh && {assignment}{command})"
    return command


def mend_command(folder: str) -> str:
    """The shell line that sets a damaged artifact aside and makes it again from its inputs.

    Args:
        folder: of the artifact, wherever its store is: `.../<kind>/<fingerprint>`.
    """
    kind, fingerprint = folder.rstrip("/").split("/")[-2:]
    return f"llm-assets doctor --repair {kind}/{fingerprint} && {make_command(kind)}"


GIB = 2**30
_SIZE = r"[\d.]+ (?:\wiB|bytes)"
GPU_MEMORY = re.compile(
    rf"Tried to allocate (?P<wanted>{_SIZE})\..* total capacity of (?P<all>{_SIZE}) "
    rf"of which (?P<free>{_SIZE}) is free"
)
"""In what torch says."""
HISTORY = ".llm_assets/dagster"
"""Where `dagster.yaml` puts Dagster's history."""
_SPARK_ENDED = {
    "JAVA_GATEWAY_EXITED": "Spark's Java process ended before it was ready (its log says more)",
    "Py4JNetworkError|Answer from Java side is empty": "Spark's Java process was ended",
    "Python worker (exited unexpectedly|failed to connect)": "A Python worker of Spark was ended",
    "PythonWorkerFactory": "Spark's Python ended before it was ready (its log says more)",
}
"""What an error holds where a process of Spark ended, and what is said; the first found counts."""
_WORKER_LOST = re.compile(
    r"gloo/.*(reset|closed) by peer|Dist\w*Error: .*(remote process exited|(reset|closed) by peer)",
    re.DOTALL,
)
"""What torch.distributed raises in the workers that are left, on processors and on GPUs."""
LOST_WORKER = (
    "A worker of this training ended while the others waited for it; what it said, or what ended "
    "it, is in the log. Run the same again: training goes on from its newest checkpoint."
)
_UNREACHABLE = {
    *("ClientConnectorError", "ConnectError", "ConnectTimeout", "ConnectTimeoutError"),
    *("MaxRetryError", "NewConnectionError", "TransportError", "gaierror"),
}
"""What aiohttp, httpx, requests, urllib3, Google's clients and Python raise for a server that does
not answer."""
_PARQUET = re.compile(
    "Parquet magic bytes|Could not open Parquet input|Parquet file size|page integrity"
    "|deserialize thrift|Invalid flatbuffers|Corrupt [a-zA-Z]+ compressed"
)
"""What Arrow says of damaged bytes, by classes of errors that others have, too."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""What Rust writes behind an error of the system."""
_KILL_COUNTERS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")


def reason_of(error: BaseException, place: str = ".") -> str | None:
    """The reason behind an error, with what to do about it; None where it is not known.

    Args:
        place: a folder on the disk that was written to, for errors that name no file.
    """
    for cause in chain(error):
        if isinstance(cause, UserError):
            return str(cause)
        reason = _of_system(cause, place) or _of_memory(cause) or _of_spark(cause)
        reason = (
            reason
            or _of_worker(cause)
            or _of_history(cause)
            or _of_network(cause)
            or _of_parquet(cause)
        )
        if reason:
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
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    # Without a limit, the file says `max`.
    return min(machine, int(limit)) if limit.isdigit() else machine


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
    """Why a process was killed, as far as the kernel tells, in words that go on from that.

    Args:
        for_less: a sentence on what to do for less need of memory.
    """
    kills, limit = _count_kills(), f"{memory_limit() / GIB:,.1f} GiB"
    if kills is None:
        return f"perhaps because memory ran out (the limit here is {limit}). {for_less}"
    if kills == _KILLS_BEFORE:
        return "but not for want of memory: the kernel has ended no process for that."
    cause = f"the kernel ended a process for that; the limit here is {limit}"
    return f"most likely because memory ran out: {cause}. {for_less}"


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


def _of_network(error: BaseException) -> str | None:
    """By the names of classes, so that none of the clients has to be imported."""
    names = {base.__name__ for base in type(error).__mro__}
    if "DefaultCredentialsError" in names:
        return (
            f"{first_line(error)} Log in with `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS to the key file of a service account."
        )
    if names & _UNREACHABLE:
        return (
            f"A server cannot be reached: {first_line(error)}. Check this machine's network and "
            "proxy (`HTTPS_PROXY`), then run the same again."
        )
    return None


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


def _of_memory(error: BaseException) -> str | None:
    text = str(error)
    out_of_memory = isinstance(error, MemoryError) or "java.lang.OutOfMemoryError" in text
    if not out_of_memory and type(error).__name__ != "OutOfMemoryError":
        return None
    if gpu := GPU_MEMORY.search(text):
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
    for pattern, event in _SPARK_ENDED.items():
        if re.search(pattern, text):
            why = why_killed("Lower `spark.driver_memory` or `spark.partitions`.")
            return f"{event}, {why} Run the same again: what is finished is not done twice."
    return None


def _of_worker(error: BaseException) -> str | None:
    return LOST_WORKER if _WORKER_LOST.search(f"{type(error).__name__}: {error}") else None


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
    if "$DAGSTER_HOME is not set" in text:
        return (
            "There is no dagster.yaml here, which says where Dagster's history is. Run this in the "
            "project's folder, or set DAGSTER_HOME to it."
        )
    if "No module named 'psycopg'" in text:
        return (
            "The address of Dagster's PostgreSQL (`storage.postgres` in dagster.yaml) has to begin "
            "with postgresql+psycopg2://, which names the driver that is installed."
        )
    # What Dagster says of dagster.yaml: of a package that is absent, of a variable, of all else.
    if absent := re.search(
        r"Couldn't import module (\w+) when attempting to load the config", text
    ):
        return install_advice(absent[1])
    if unset := re.search(r'fetch the environment variable "(\w+)" which is not set', text):
        return f"dagster.yaml names the environment variable {unset[1]}, which is not set here."
    phrases = "loading dagster instance config at dagster.yaml.", "Expected YAML from file "
    if fault := next((text.partition(phrase)[2] for phrase in phrases if phrase in text), None):
        return f"dagster.yaml is wrong: {fault.strip()}"
    if "attempt to write a readonly database" in text or "unable to open database file" in text:
        return (
            "Dagster's history cannot be written: the folder `.llm_assets/dagster` "
            "(`storage.sqlite.base_dir` in dagster.yaml) is read-only, missing or not yours."
        )
    return None
