"""The few things that are done with files, on a local disk and in an object store alike.

A file or folder is named by a local path or a URL such as `gs://bucket/path`. Whatever else the
project reads or writes by name goes through here, so that one place knows about caches of listings,
flushing, whole writes, private folders and checksums.

Every write of an object of Cloud Storage gives it another generation. A conditional write names the
one that its writer has seen, and storage compares both in the same step: it happens only if nobody
else was faster.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from artifacts.errors import UserError, shown_in_line
from artifacts.reasons import reason_of

if TYPE_CHECKING:
    from google.cloud.storage import Blob


CACHE_VARIABLE = "LLM_ASSETS_CACHE"
"""Where files of a store in the cloud are kept on this machine; `~/.cache/llm_assets` if absent."""


def make_private(folder: Path) -> Path:
    """Make a folder that its owner alone may enter, with what is missing above it.

    One that exists is closed to others, too, and to its group unless that may also write: then it
    is shared on purpose, or the group is its owner's own (a umask of 002 goes with such groups).
    """
    # One by one: `mkdir(parents=True)` would leave those above with the usual rights.
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    allowed = mode & ~(stat.S_IRWXO if mode & stat.S_IWGRP else stat.S_IRWXG | stat.S_IRWXO)
    if allowed != mode and status.st_uid == os.geteuid():
        # A mounted bucket has no rights to set.
        with suppress(OSError):
            folder.chmod(allowed)
    return folder


def need_writable(folder: Path, setting: str = "`store`: ") -> Path:
    """The folder, or the nearest existing one above it; raises UserError where no file can be
    written there, which says why after the setting."""
    try:
        while not folder.exists():
            folder = folder.parent
        # Tried out, since rights alone do not tell of a disk that is mounted read-only, or has no
        # place for one more file.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        # It names the file that would have been; the user knows the folder.
        error.filename = str(folder)
        raise UserError(f"{setting}{reason_of(error) or error}") from error
    return folder


def cache_folder() -> Path:
    """Where this machine keeps what belongs to stores in the cloud; its owner's alone."""
    path = os.environ.get(CACHE_VARIABLE)
    return make_private(Path(path) if path else Path.home() / ".cache" / "llm_assets")


HASH_BLOCK_BYTES = 4 * 1024 * 1024

# gcsfs reads this when it is imported. Its experimental classes would ask another service what kind
# of bucket each is; the plain ones serve flat and hierarchical buckets alike.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def is_local(url: str | Path) -> bool:
    """Whether a name means a file of this machine."""
    return isinstance(url, Path) or "://" not in url or url.startswith("file://")


def check_place(url: str) -> str:
    """The path or URL, if it is of a kind that is read; raises ValueError where it is another.

    The message leaves out the rest of the URL, which may hold a password or a token.
    """
    scheme, sign, rest = url.partition("://")
    if sign and scheme not in ("file", "gs"):
        raise ValueError(
            f"{shown_in_line(scheme)}:// is not read here; copy the files to this machine or to "
            "Cloud Storage, and give their local path or gs://bucket/path"
        )
    if scheme == "gs" and not rest.partition("/")[0]:
        raise ValueError("the name of a bucket is missing; give gs://bucket/path")
    if "@" in rest.partition("/")[0]:
        raise ValueError("a user or password has no place in a path; give it as gs://bucket/path")
    _need_name(url)
    return url


def check_local_path(path: str) -> str:
    """The path, with `~` as the home folder; raises ValueError, without the rest of it, for a
    URL."""
    scheme, sign, _ = path.partition("://")
    if sign:
        raise ValueError(
            f"a local path is expected, not {shown_in_line(scheme)}://; copy it to this machine"
        )
    _need_name(path)
    return os.path.expanduser(path)


_VARIABLE = re.compile(r"\$\{\w+\}|(?:(?<=/)|^)\$[A-Za-z_]\w*(?=/|$)")
"""A shell's variable; Windows names folders such as `$RECYCLE.BIN`."""


def _need_name(path: str) -> None:
    # Python takes an empty path for the current folder, which nobody has named by it.
    if not path.strip():
        raise ValueError("the path is empty; for the current folder, write a dot")
    if "\0" in path:
        raise ValueError("the character NUL has no place in a path; take it out")
    # No shell reads settings, so a folder of this very name would be made.
    if variable := _VARIABLE.search(path):
        raise ValueError(
            f"{variable[0]} is not filled in here; write its value, or for your home folder ~/"
        )
    if path.startswith("~") and os.path.expanduser(path) == path:
        user, _, _ = path[1:].partition("/")
        raise ValueError(
            f"this machine has no user {shown_in_line(user)!r}; your own home folder is ~/, and a "
            "name that begins with this sign follows ./"
        )


Place = Annotated[str, AfterValidator(check_place)]
"""A local path, or `gs://bucket/path`."""
LocalPath = Annotated[str, AfterValidator(check_local_path)]


def read(url: str | Path) -> bytes:
    """A file's content; raises FileNotFoundError where there is none."""
    if is_local(url):
        return _path(url).read_bytes()
    filesystem, path = resolve(url)
    return bytes(filesystem.cat_file(path))


def find(url: str | Path) -> bytes | None:
    """A file's content, or None where there is none."""
    try:
        return read(url)
    except FileNotFoundError:
        return None


def write(url: str | Path, content: bytes | memoryview, sync: bool = True) -> None:
    """Replace a file in one step: a reader sees the old bytes or the new ones, never a part.

    Object stores write whole objects by nature. On a local disk the bytes go to a temporary file
    first, which is flushed and renamed, and then the folder is flushed, so that a written file is
    there after a loss of power too. Absent folders are made. A full disk, which leaves what was
    there before untouched, raises UserError. Nothing need be flushed (`sync`) where a reader
    compares a checksum.
    """
    if not is_local(url):
        filesystem, path = resolve(url)
        filesystem.pipe_file(path, bytes(content))
        filesystem.invalidate_cache()
        return
    target = _path(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename across file systems is a copy; hidden, since listings of
    # parts match by names.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    with _full_disk_named(target):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                if sync:
                    # Before the rename, which may reach the disk first: a loss of power would leave
                    # an empty file in place of the old one.
                    os.fsync(file.fileno())
            os.replace(temporary, target)
            if sync:
                flush(target.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def link(url: str | Path, target: str | Path) -> bool:
    """Give a file a second name; False where its file system, or an object store, cannot do so."""
    if not (is_local(url) and is_local(target)):
        return False
    place = _path(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    # A link does not replace a file, as a write does.
    place.unlink(missing_ok=True)
    try:
        os.link(_path(url), place)
    except OSError:
        return False
    return True


def open_file(url: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """A file opened for reading or writing, for libraries that want a file object."""
    filesystem, path = resolve(url)
    file: IO[Any] = filesystem.open(path, mode, **options)
    return file


def exists(url: str | Path) -> bool:
    """Whether there is a file or folder of this name."""
    if is_local(url):
        return _path(url).exists()
    filesystem, path = resolve(url)
    filesystem.invalidate_cache()
    return bool(filesystem.exists(path))


def size(url: str | Path) -> int:
    """A file's bytes; raises FileNotFoundError where there is none."""
    if is_local(url):
        return _path(url).stat().st_size
    filesystem, path = resolve(url)
    return int(filesystem.size(path))


def describe(url: str | Path) -> dict[str, dict[str, Any]]:
    """Every file below a folder: path relative to it → what its file system says of it, in order.

    Empty where there is no folder. In an object store this is one listing; objects whose names end
    in a slash stand for folders that were made through a mounted bucket, and are left out.
    """
    filesystem, folder = resolve(url)
    filesystem.invalidate_cache()
    folder = folder.rstrip("/")
    # fsspec remembers listings, also what other processes have changed since; so it is made to
    # forget them.
    details: dict[str, Any] = filesystem.find(folder, detail=True)
    return {p[len(folder) + 1 :]: details[p] for p in sorted(details) if not p.endswith("/")}


def list_sizes(url: str | Path) -> dict[str, int]:
    """Every file below a folder: path relative to it → bytes, in order; empty without a folder."""
    return {path: int(details["size"]) for path, details in describe(url).items()}


def list_names(url: str | Path) -> list[str]:
    """The names of a folder's files and folders, in order; none where there is no folder."""
    filesystem, folder = resolve(url)
    filesystem.invalidate_cache()
    try:
        listing = filesystem.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    # Some file systems list the folder itself, too.
    paths = {str(path).rstrip("/") for path in listing} - {folder.rstrip("/")}
    return sorted(path.rpartition("/")[2] for path in paths)


def make_folder(url: str | Path) -> None:
    """Make a folder and those above it, where they lack; an object store needs none."""
    filesystem, path = resolve(url)
    filesystem.makedirs(path, exist_ok=True)


def copy(url: str | Path, target: str | Path) -> None:
    """Copy a file within one store."""
    filesystem, path = resolve(url)
    filesystem.copy(path, resolve(target)[1])


def upload(path: Path, url: str) -> None:
    """Copy a file of this machine, whatever its size."""
    filesystem, target = resolve(url)
    filesystem.put_file(str(path), target)


def download(url: str, path: Path) -> None:
    """Copy a file to this machine, whatever its size; whoever reads `path` sees it whole."""
    filesystem, source = resolve(url)
    # One name for all: callers see to it that a file is not fetched twice at once.
    partial = path.with_name(f".{path.name}.partial")
    filesystem.get_file(source, str(partial))
    os.replace(partial, path)


def move(url: str | Path, target: str | Path) -> None:
    """Move a file, or a folder with all that is in it, within one store."""
    filesystem, path = resolve(url)
    _, end = resolve(target)
    filesystem.makedirs(end.rpartition("/")[0], exist_ok=True)
    filesystem.mv(path, end, recursive=filesystem.isdir(path))


def remove(url: str | Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing happens where there is none."""
    if is_local(url):
        path = _path(url)
        # Of a link, only the link itself is removed.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return
    filesystem, name = resolve(url)
    filesystem.invalidate_cache()
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)


@contextmanager
def scratch_folder(url: str) -> Iterator[str]:
    """A folder with nothing in it, which is removed at the end, whatever that is."""
    remove(url)
    try:
        yield url
    finally:
        remove(url)


def flush(path: Path) -> None:
    """Bring a local file's content, or a folder's list of names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path, names: Iterable[str]) -> None:
    """Bring some files of a local folder to the disk, and every folder between; raises UserError
    where it is full."""
    folders = {folder}
    with _full_disk_named(folder):
        for name in names:
            path = folder / name
            flush(path)
            folders.update(parent for parent in path.parents if parent.is_relative_to(folder))
        # Folders below first: a name is of use once what it names is on the disk.
        for place in sorted(folders, reverse=True):
            flush(place)


@contextmanager
def _full_disk_named(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"No space left on the disk while writing {target}. Nothing existing was changed: "
                "free some space and run the same command again."
            ) from error
        raise


def _path(url: str | Path) -> Path:
    return Path(str(url).removeprefix("file://"))


def resolve(url: str | Path) -> tuple[Any, str]:
    """The `fsspec` file system that a name belongs to, and the name as that writes it."""
    import fsspec

    # Its own `url_to_fs` takes the `::` in a name for the end of one URL and the start of another.
    if is_local(url):
        # Folders are made on the way, so that callers treat a disk as they treat a bucket.
        filesystem = fsspec.filesystem("file", auto_mkdir=True)
    else:
        filesystem = fsspec.filesystem(str(url).partition("://")[0])
    return filesystem, filesystem._strip_protocol(str(url))


def storage_errors() -> tuple[type[Exception], ...]:
    """What is raised where storage fails, for whoever tries again later.

    gcsfs tries for half a minute by itself, and then gives its libraries' errors as they came.
    """
    # Whoever works in a bucket has loaded it by then; elsewhere its errors cannot arise.
    if "gcsfs" not in sys.modules:
        return (OSError,)
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    # A package of gcsfs, and loaded by it.
    connection_lost: type[Exception] = sys.modules["aiohttp"].ClientError
    return (OSError, HttpError, connection_lost, GoogleAuthError)


_known: dict[tuple[int, ...], str] = {}
"""SHA-256 of the local files that this process has read, by what the file system says of each
(number, size, times). A file that was only renamed is recognized."""


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative to the artifact's folder, with forward slashes."""
    bytes: int
    sha256: str | None = None
    """None for a file that was written to Cloud Storage from elsewhere: `crc32c` stands for it."""
    crc32c: str | None = None
    """Base64, as Cloud Storage keeps it for every object; None in a local store."""


def list_files(folder: str) -> list[FileEntry]:
    """Every file under a folder with its size and SHA-256, in the order of their paths."""
    return [
        FileEntry(path=path, bytes=size, sha256=sha256_of(f"{folder}/{path}"))
        for path, size in list_sizes(folder).items()
    ]


def sha256_of(url: str) -> str:
    """A file's SHA-256 in hexadecimal; a local file is read once a process while unchanged."""
    if not is_local(url):
        return _read(url)
    status = os.stat(url)
    # With ctime, which nobody can set back: a file changed under its old mtime is read again.
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if state not in _known:
        _known[state] = _read(url)
    return _known[state]


def _read(url: str) -> str:
    digest = hashlib.sha256()
    with open_file(url) as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


ABSENT = 0
"""The generation of an object that is not there."""


def blob_of(url: str) -> "Blob":
    """The object of `gs://bucket/name`."""
    from google.cloud.storage import Client

    bucket, _, name = url.removeprefix("gs://").partition("/")
    return Client().bucket(bucket).blob(name)


def read_generation(blob: "Blob") -> tuple[bytes | None, int]:
    """An object's content and its generation; None and ABSENT where it is not there."""
    entry = read_dated(blob)
    return entry[:2] if entry else (None, ABSENT)


def read_dated(blob: "Blob") -> tuple[bytes, int, float] | None:
    """An object's content, its generation, and when that was written, in seconds since the epoch;
    None where it is not there."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    while True:
        # A fresh look: an object that was read before would ask for the generation it had then.
        current = blob.bucket.get_blob(blob.name)
        if current is None:
            return None
        generation = int(current.generation)
        try:
            content = bytes(current.download_as_bytes(if_generation_match=generation))
        except (NotFound, PreconditionFailed):
            # Written or removed since the look.
            continue
        return content, generation, current.updated.timestamp()


def write_generation(blob: "Blob", content: bytes, generation: int) -> int | None:
    """Write over a known generation: the new one, or None where another was faster."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        blob.upload_from_string(content, if_generation_match=generation)
    except (PreconditionFailed, NotFound):
        return None
    return int(blob.generation or ABSENT)


def copy_new(source: "Blob", generation: int, target: "Blob") -> bool:
    """Copy a known generation of an object to an unused name; False if another generation is there
    by now, or the name is taken.

    Storage checks both within the copy, so nothing can come between.
    """
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        target.rewrite(source, if_generation_match=ABSENT, if_source_generation_match=generation)
    except (PreconditionFailed, NotFound):
        return False
    return True
