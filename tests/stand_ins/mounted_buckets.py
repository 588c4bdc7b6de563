"""Buckets as Cloud Storage FUSE shows them, as a real file system over the storage stand-in.

    python -m tests.stand_ins.mounted_buckets FOLDER STORAGE_URL HIERARCHICAL_BUCKET...

Machines have mounts of their own, so `<folder>/<machine>/<bucket>/<name>` is an object as one
machine sees it; any name makes a machine. Each rule is one of Cloud Storage FUSE's page on
semantics (github.com/GoogleCloudPlatform/gcsfuse, docs/semantics.md), whose section stands with it.
What Vertex AI's own mount does differently, nobody can see from here.
"""

import ctypes
import errno
import os
import signal
import stat
import sys
import tempfile
from types import FrameType
from typing import Any

import mfusepy

from tests.stand_ins.bucket_objects import BucketObjects, Object, PreconditionFailed
from tests.stand_ins.bucket_view import FOLDER, Machine, OpenFile
from tests.stand_ins.mount import FILE_SYSTEM, UNMOUNT_SECONDS, take_dead_mounts_away

WRITES = os.O_WRONLY | os.O_RDWR
PR_SET_PDEATHSIG = 1


class MountedBuckets(mfusepy.Operations):
    """The file system's operations."""

    use_ns = True

    def __init__(self, storage_url: str, hierarchical: list[str]) -> None:
        self._storage_url = storage_url
        self._folders: dict[str, set[str]] = {bucket: set() for bucket in hierarchical}
        self._machines: dict[tuple[str, str], Machine] = {}
        self._lost: set[str] = set()
        self._handles: dict[int, OpenFile] = {}
        self._next_handle = 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        place = self._place(path)
        if place is None:
            return _attributes(FOLDER)
        machine, name = place
        if name in machine.open:
            file = machine.open[name]
            size = os.fstat(file.content.fileno()).st_size
            return _attributes(Object(name, size, file.generation))
        found = FOLDER if not name else machine.stat(name)
        if found is None:
            raise OSError(errno.ENOENT, path)
        return _attributes(found)

    def readdir(self, path: str, fh: int) -> list[str]:
        place = self._place(path)
        if place is None:
            raise OSError(errno.EACCES, path)
        machine, name = place
        return [".", "..", *machine.children(name)]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        machine, name = self._file_place(path)
        found = machine.stat(name)
        # Staged Writes, Notes: no empty object holds the place of a file that is being written.
        generation = found.generation if found else 0
        return self._opened(OpenFile(machine, name, _scratch(), generation, changed=True))

    def open(self, path: str, flags: int) -> int:
        machine, name = self._file_place(path)
        if name in machine.open:
            return self._opened(machine.open[name])
        found = machine.stat(name)
        if found is None:
            raise OSError(errno.ENOENT, path)
        content = b"" if flags & os.O_TRUNC else machine.objects.read(found)
        if content is None:
            # What was believed to be there has been removed or replaced elsewhere.
            machine.believe(name, None)
            raise OSError(errno.ESTALE if flags & WRITES else errno.ENOENT, path)
        emptied = bool(flags & os.O_TRUNC)
        return self._opened(OpenFile(machine, name, _scratch(content), found.generation, emptied))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(self._handles[fh].content.fileno(), size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._handles[fh].changed = True
        return os.pwrite(self._handles[fh].content.fileno(), data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        handle = self.open(path, os.O_RDWR) if fh is None else fh
        self._handles[handle].changed = True
        os.ftruncate(self._handles[handle].content.fileno(), length)
        if fh is None:
            self.flush(path, handle)
            self.release(path, handle)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        """Streaming Writes: fsync does not finalize the object; only closing the file does."""

    def flush(self, path: str, fh: int) -> None:
        file = self._handles[fh]
        file.machine.send(file)

    def release(self, path: str, fh: int) -> None:
        file = self._handles.pop(fh)
        file.handles -= 1
        if not file.handles:
            file.content.close()
            if file.machine.open.get(file.name) is file:
                del file.machine.open[file.name]

    def unlink(self, path: str) -> None:
        machine, name = self._file_place(path)
        if name in machine.open:
            machine.open.pop(name).unlinked = True
        machine.objects.remove(name)
        machine.believe(name, None)

    def rename(self, old: str, new: str) -> None:
        machine, name = self._file_place(old)
        other, target = self._file_place(new)
        if other is not machine:
            raise OSError(errno.EXDEV, new)
        if name in machine.open or machine.stat(name) is not FOLDER:
            machine.move(name, target)
            return
        if machine.folders is None:
            # --rename-dir-limit is 0 unless set: renaming a folder of a flat bucket is refused.
            raise OSError(errno.EMFILE, old)
        if machine.children(target):
            raise OSError(errno.ENOTEMPTY, new)
        for each in machine.objects.list(f"{name}/", "")[0]:
            machine.move(each.name, target + each.name.removeprefix(name))
        for folder in [f for f in machine.folders if f"{f}/".startswith(f"{name}/")]:
            machine.folders.remove(folder)
            machine.folders.add(target + folder.removeprefix(name))
            machine.believe(folder, None)
        machine.believe(target, FOLDER)

    def mkdir(self, path: str, mode: int) -> None:
        machine, name = self._file_place(path)
        if name in machine.open or machine.stat(name):
            raise OSError(errno.EEXIST, path)
        if machine.folders is None:
            # Files and Directories: a 0-byte object whose name ends in a slash stands for a folder.
            try:
                machine.objects.write(f"{name}/", b"", 0)
            except PreconditionFailed:
                # Another machine was faster; writing has ended what this one believed.
                machine.believe(name, FOLDER)
                raise OSError(errno.EEXIST, path) from None
        else:
            machine.folders.add(name)
        machine.believe(name, FOLDER)

    def rmdir(self, path: str) -> None:
        if path.count("/") == 1:
            self._lose(path.lstrip("/"))
            return
        machine, name = self._file_place(path)
        if machine.children(name):
            raise OSError(errno.ENOTEMPTY, path)
        machine.objects.remove(f"{name}/")
        (machine.folders or set()).discard(name)
        machine.believe(name, None)

    def chmod(self, path: str, mode: int) -> None:
        """Permissions and ownership: changes are silently ignored."""

    def chown(self, path: str, uid: int, gid: int) -> None:
        """As `chmod`."""

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        """Kept in metadata that nothing here reads."""

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_blocks": 2**40, "f_bavail": 2**40, "f_bfree": 2**40}

    def _lose(self, machine_name: str) -> None:
        """The machine is gone: nothing that it still has open is ever written."""
        self._lost.add(machine_name)
        for (name, _), machine in self._machines.items():
            machine.is_lost = machine.is_lost or name == machine_name

    def _place(self, path: str) -> tuple[Machine, str] | None:
        """The machine's mount and the object's name; None for the folders above buckets."""
        machine_name, _, rest = path.lstrip("/").partition("/")
        if machine_name in self._lost:
            raise OSError(errno.EIO, path)
        if not rest:
            return None
        bucket, _, name = rest.partition("/")
        key = (machine_name, bucket)
        if key not in self._machines:
            objects = BucketObjects(self._storage_url, bucket)
            if not objects.exists():
                raise OSError(errno.ENOENT, path)
            self._machines[key] = Machine(objects, self._folders.get(bucket))
        return self._machines[key], name

    def _file_place(self, path: str) -> tuple[Machine, str]:
        place = self._place(path)
        if place is None or not place[1]:
            raise OSError(errno.EACCES, path)
        return place

    def _opened(self, file: OpenFile) -> int:
        file.machine.open[file.name] = file
        file.handles += 1
        self._next_handle += 1
        self._handles[self._next_handle] = file
        return self._next_handle


def _scratch(content: bytes = b"") -> Any:
    made = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed when the last handle is
    made.write(content)
    return made


def _attributes(found: Object) -> dict[str, Any]:
    # A generation is the time of its making, in microseconds.
    times = dict.fromkeys(("st_mtime", "st_ctime", "st_atime"), found.generation * 1000)
    owner = {"st_uid": os.getuid(), "st_gid": os.getgid(), "st_nlink": 1}
    kind = stat.S_IFDIR | 0o755 if found is FOLDER else stat.S_IFREG | 0o644
    return {"st_mode": kind, "st_size": found.size, **times, **owner}


def main() -> None:
    """Serve in a child: one that is killed, or ends before it could unmount, is cleared up here."""
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        _serve(*sys.argv[1:])
        return

    def end(number: int, frame: FrameType | None) -> None:
        os.kill(child, signal.SIGTERM if number == signal.SIGTERM else signal.SIGKILL)
        signal.alarm(UNMOUNT_SECONDS)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, end)
    os.waitpid(child, 0)
    take_dead_mounts_away()


def _serve(folder: str, storage_url: str, *hierarchical: str) -> None:
    mfusepy.FUSE(
        MountedBuckets(storage_url, list(hierarchical)),
        folder,
        fsname=FILE_SYSTEM,
        foreground=True,
        nothreads=True,
        # The kernel believes nothing for itself: what is cached is cached above, by Google's rules.
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        big_writes=True,
        # Programs of an image are not of this user.
        **({"allow_other": True} if os.geteuid() == 0 else {}),
    )


if __name__ == "__main__":
    main()
