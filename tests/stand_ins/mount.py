"""What stands for the buckets that Vertex AI mounts under /gcs.

Where this machine has FUSE, a file system with Cloud Storage FUSE's own rules
(`tests.stand_ins.mounted_buckets`); elsewhere a folder that is kept equal to storage, which is
kinder than Google, and the tests of those rules are skipped.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.needs import FUSE, NEEDS
from tests.stand_ins.bucket_objects import BucketObjects, PreconditionFailed
from tests.stand_ins.processes import REPOSITORY, start_process

SCAN_SECONDS = 0.3
MOUNT_SECONDS = 120.0
UNMOUNT_SECONDS = 10
FILE_SYSTEM = "MountedBuckets"
"""Its name among the mounts of the machine."""


class Mount(ABC):
    """`<view>/<bucket>/<name>` is an object, as one machine sees it."""

    @abstractmethod
    def view(self, machine: str) -> Path:
        """Where a machine of this name finds the buckets: what it has for `/gcs`."""

    @abstractmethod
    def pull(self) -> None:
        """Called before a job's programs start."""

    @abstractmethod
    def push(self) -> None:
        """Called after a program's end, before anyone is told of it."""

    @abstractmethod
    def lose(self, machine: str) -> None:
        """The machine is gone, and with it what its programs had not closed."""

    @abstractmethod
    def stop(self) -> None:
        """Undo it."""


def open_mount(
    folder: Path, storage_url: str, buckets: Sequence[str], hierarchical: Sequence[str]
) -> Mount:
    """The strictest mount that this machine can have.

    Args:
        buckets: the buckets there are.
        hierarchical: those of them with a hierarchical namespace.
    """
    if all(NEEDS[need].is_there() for need in FUSE):
        return FuseMount(folder, storage_url, hierarchical)
    return CopiedBucket(folder, storage_url, buckets[0])


class FuseMount(Mount):
    """A real file system, served by a process of its own."""

    def __init__(self, folder: Path, storage_url: str, hierarchical: Sequence[str]) -> None:
        take_dead_mounts_away()
        folder.mkdir(parents=True)
        self._folder = folder
        program = [sys.executable, "-m", "tests.stand_ins.mounted_buckets"]
        # SIGTERM has it take the file system away before it ends.
        self._process = start_process(
            [*program, os.fspath(folder), storage_url, *hierarchical],
            signal.SIGTERM,
            cwd=REPOSITORY,
        )
        deadline = time.monotonic() + MOUNT_SECONDS
        while not os.path.ismount(folder):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError("the buckets could not be mounted")
            time.sleep(0.02)

    def view(self, machine: str) -> Path:
        return self._folder / machine

    def pull(self) -> None:
        """Nothing to do: reading asks storage."""

    def push(self) -> None:
        """Nothing to do: a closed file is in storage."""

    def lose(self, machine: str) -> None:
        self.view(machine).rmdir()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        take_dead_mounts_away()


def take_dead_mounts_away() -> None:
    """Unmount what no process serves any more: `du`, cleaners and backups fail at it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        name, _, folder = line.partition(" fuse ")[0].replace(r"\040", " ").partition(" ")
        if name == FILE_SYSTEM and _is_dead(folder):
            command = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount", "-u", "-z"]
            subprocess.run([*command, folder], check=False)


def _is_dead(folder: str) -> bool:
    try:
        os.stat(folder)
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


class CopiedBucket(Mount):
    """One folder for all: objects come in before a job starts, written files go out.

    As with the real mount, a file goes out once it is no longer being written.
    """

    def __init__(self, folder: Path, storage_url: str, bucket: str) -> None:
        self._folder = folder
        self._root = folder / bucket
        self._root.mkdir(parents=True, exist_ok=True)
        self._objects = BucketObjects(storage_url, bucket)
        self._known: dict[str, tuple[int, int]] = {}
        self._pending: dict[str, tuple[int, int]] = {}
        self._generations: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def view(self, machine: str) -> Path:
        return self._folder

    def lose(self, machine: str) -> None:
        """Nothing is lost: the folder outlives the machine."""

    def stop(self) -> None:
        self._stopped.set()

    def pull(self) -> None:
        with self._lock:
            self._push(settled_only=False)
            present = {found.name: found for found in self._objects.list("", "")[0]}
            for name, found in present.items():
                path = self._root / name
                if self._generations.get(name) != found.generation or not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self._objects.read(found) or b"")
                    self._note(name, found.generation)
            for name in set(self._known) - set(present):
                (self._root / name).unlink(missing_ok=True)
                del self._known[name]

    def push(self) -> None:
        with self._lock:
            self._push(settled_only=False)

    def _watch(self) -> None:
        while not self._stopped.wait(SCAN_SECONDS):
            with self._lock:
                self._push(settled_only=True)

    def _push(self, settled_only: bool) -> None:
        found = self._scan()
        for name, stamp in found.items():
            settled = self._pending.get(name) == stamp or not settled_only
            if self._known.get(name) != stamp and settled:
                self._upload(name)
        self._pending = found
        for name in set(self._known) - set(found):
            self._objects.remove(name)
            del self._known[name]

    def _scan(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in self._root.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file():
                    found[path.relative_to(self._root).as_posix()] = _stamp(path)
        return found

    def _note(self, name: str, generation: int) -> None:
        self._known[name] = _stamp(self._root / name)
        self._generations[name] = generation

    def _upload(self, name: str) -> None:
        with suppress(FileNotFoundError, PreconditionFailed):
            content, before = (self._root / name).read_bytes(), self._objects.find(name)
            self._known[name] = (0, 0)
            sent = self._objects.write(name, content, before.generation if before else 0)
            self._note(name, sent.generation)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
