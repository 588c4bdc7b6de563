"""Why something failed, in one message, however deep the cause lies."""

import errno
import socket
import sqlite3
from pathlib import Path

import httpx
import pytest
from google.auth.exceptions import DefaultCredentialsError
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import ArrowInvalid
from safetensors import SafetensorError

from artifacts.errors import UserError, first_line, has_control_characters, shown, shown_in_line
from artifacts.reasons import reason_of
from artifacts.settings import read_yaml


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/store/part"), "GB free of"),
        (OSError(errno.EROFS, "Read-only file system", "/store/part"), "mounted read-only"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/etc/hosts/a/b"), "/etc/hosts is a"),
        (PermissionError(errno.EACCES, "Permission denied", "/store"), "has no permission for it"),
        (OSError(errno.EFBIG, "File too large", "/store/part"), "ulimit -f"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/store/a"), "Choose a shorter one"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "GB free of"),
        (SafetensorError("Error while deserializing header: incomplete metadata"), None),
        (MemoryError(), "out of memory; the limit here is"),
        (RuntimeError("java.lang.OutOfMemoryError: Java heap space"), "spark.driver_memory"),
        (
            RuntimeError("org.apache.spark.memory.SparkOutOfMemoryError: No space left on device"),
            "set `SPARK_LOCAL_DIRS` to a folder on another disk",
        ),
        (RuntimeError("Python worker exited unexpectedly (crashed)"), "worker of Spark was ended"),
        (sqlite3.OperationalError("database is locked"), "locked by another process"),
        (sqlite3.OperationalError("database or disk is full"), "full or failing"),
        (sqlite3.DatabaseError("file is not a database"), "history is damaged"),
        (socket.gaierror(-2, "Name or service not known"), "Check this machine's network"),
        (httpx.ConnectError("Connection refused"), "cannot be reached: Connection refused"),
        (DefaultCredentialsError("There are none."), "gcloud auth application-default login"),
        (OSError("could not verify page integrity, CRC checksum verification"), "doctor --repair"),
        (ArrowInvalid("Parquet magic bytes not found in footer."), "doctor --repair"),
        (OSError("Forbidden: https://storage.test/o/part-00000.parquet"), None),
        (OSError(errno.ESTALE, "Stale file handle", "/nfs/Parquet file size.parquet"), None),
        (UserError("Name the file."), "Name the file."),
        (ZeroDivisionError("division by zero"), None),
    ],
)
def test_a_known_cause_is_found_however_deep_it_lies(error: Exception, said: str | None) -> None:
    try:
        try:
            raise error
        except Exception as inner:
            raise RuntimeError("Error occurred while executing op") from inner
    except RuntimeError as outer:
        found = reason_of(outer)

    assert found is said if said is None else found is not None and said in found


def test_a_history_in_a_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    told = reason_of(sqlite3.OperationalError("unable to open database file"))

    assert told is not None and "read-only, missing or not yours" in told


def test_no_character_reaches_a_terminal_as_a_command() -> None:
    untrusted = "red\x1b[31m\x07 \u202eevil\ud800\x9b \n\ttext"

    assert shown(untrusted) == "red\\x1b[31m\\x07 \\u202eevil\\ud800\\x9b \n\ttext"
    assert shown_in_line("a\nb\tc") == r"a\nb\tc"
    assert shown("plain é 漢字 🙂") == "plain é 漢字 🙂"
    assert has_control_characters("a\nb") and not has_control_characters("é 🙂")


@given(st.text())
@example("\n\nThe file is cut.\nMore of it.")
@example("\x85")
@example("")
def test_an_errors_line_is_one_line_and_never_empty(message: str) -> None:
    line = first_line(OSError(message))
    assert line.splitlines() == [line] and line.strip()
    assert line == "OSError" or line in message


BOMB = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
"""Lines of aliases, each of which means nine times as much as the one before."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a0: &a0 [x]\n" + "\n".join(BOMB), "81 aliases"),
        ("a: 1\nb: 2\n'a': 3\n", "the key `a` is on line 1 and again on line 3"),
        ("a:\n- {b: 1, b: 2}\n", "the key `b` is on line 2 and again on line 2"),
    ],
)
def test_settings_with_many_aliases_or_a_key_twice_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_yaml(tmp_path / "a.yaml")


def test_some_aliases_and_keys_that_override_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: *b\n")
    assert read_yaml(tmp_path / "a.yaml")["c"] == {"x": 2, "y": 1}
    (tmp_path / "a.yaml").write_text("")
    assert read_yaml(tmp_path / "a.yaml") is None


CUDA_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.18 GiB is free. Process 4711 has 77.92 GiB memory in use. Of the allocated memory "
    "70.12 GiB is allocated by PyTorch, and 6.90 GiB is reserved by PyTorch but unallocated."
)
"""As CUDA's allocator of torch says it."""
HELPS = ("device_batch_size", "activation_checkpointing", "workers", "sequence_length")


@pytest.mark.fault(
    "checkpoint",
    "out of memory on a GPU",
    sees="its memory, how much was free and requested, and the settings that help, in order",
    then="resumes from its newest checkpoint",
)
def test_memory_of_a_gpu_that_runs_out_is_told_with_what_helps_the_cheapest_first() -> None:
    import torch

    told = reason_of(torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY))
    assert told is not None
    assert "2.00 GiB more were asked for where 1.18 GiB of 79.11 GiB were free" in told
    places = [told.index(setting) for setting in HELPS]
    assert places == sorted(places) and "spark" not in told
    full = reason_of(torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY.replace("1.18 GiB", "0 bytes")))
    assert full == told.replace("1.18 GiB", "0 bytes")
