"""Caches for later runs: bytes stored under a hash of everything that decides them.

A cache decides speed, never a result. An entry is one file, the SHA-256 of its content followed by
the content; or, where programs read the files themselves, a local folder with a manifest of their
checksums. It is read whole and verified, so one that was cut, changed or removed is made again. It
is written under a name of its own and then renamed, so concurrent makers do no harm. A reader holds
the bytes, so it misses nothing that is removed meanwhile. Reading renews an entry's time: when the
caches have to be cut, the least recently used go first (`llm_assets.maintenance.cleaning`).
"""

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from artifacts.libraries import PYTHON, UNICODE, installed, source_hash
from artifacts.storage import files
from artifacts.storage.files import FileEntry, list_files, sha256_of
from artifacts.store.identity import hash_json
from artifacts.store.layout import MANIFEST_NAME
from artifacts.store.manifest import find_faults

_DIGEST_BYTES = 32
# In an object store a renewal writes the entry again, so once a day is enough.
_RENEWAL_SECONDS = 24 * 60 * 60
_MANIFEST = TypeAdapter(list[FileEntry])


def cache_key(entry: str, module: str, libraries: Sequence[str] = (), **decided_by: Any) -> str:
    """The name of an entry; it differs if anything differs that may affect the content.

    Args:
        entry: what it holds, in words, since a module may make several kinds of entries.
        module: the module of this project that makes the content; its source, that of all modules
            of this project that it imports, and the version of Python are part of the key.
        libraries: packages that take part; their versions are part of the key.
        decided_by: all else that decides the content, as values that JSON can hold.
    """
    return hash_json(
        {
            "entry": entry,
            "module": module,
            "source": source_hash(module),
            "libraries": installed([PYTHON, UNICODE, *libraries]),
            "decided_by": decided_by,
        }
    )


def cached(folder: str | None, key: str, make: Callable[[], bytes]) -> bytes | memoryview:
    """The content under a key (`cache_key`) in a folder, local or in an object store. If there is
    none, `make` makes it, and it is kept; without a folder, nothing is kept."""
    if folder is None:
        return make()
    stored_content = read_cached(folder, key)
    if stored_content is not None:
        return stored_content
    content = make()
    write_cached(folder, key, content)
    return content


def read_cached(folder: str, key: str) -> memoryview | None:
    """The content of an entry, or None where it is absent or damaged."""
    entry = _read(f"{folder}/{key}")
    # A slice of bytes would be a copy, which takes as long as reading them.
    return memoryview(entry)[_DIGEST_BYTES:] if entry else None


def _read(url: str) -> bytes | None:
    entry = files.find(url)
    if entry is None:
        return None
    if hashlib.sha256(memoryview(entry)[_DIGEST_BYTES:]).digest() != entry[:_DIGEST_BYTES]:
        return None
    _renew(url, entry)
    return entry


class CachedContent(NamedTuple):
    """Content in a file."""

    begin: int
    """At which byte of the file the content begins."""
    sha256: str
    """Of the content."""


def place_cached(
    folder: str | None, key: str, make: Callable[[], bytes], url: str
) -> CachedContent:
    """What `cached` gives, as a file that stays when the cache is cleaned.

    On one disk that is the entry itself, under a second name, so that nothing is written.
    """
    entry = _read(f"{folder}/{key}") if folder else None
    if entry is None:
        content = make()
        if folder:
            write_cached(folder, key, content)
        files.write(url, content, sync=False)
        return CachedContent(0, hashlib.sha256(content).hexdigest())
    sha256 = entry[:_DIGEST_BYTES].hex()
    if files.link(f"{folder}/{key}", url):
        return CachedContent(_DIGEST_BYTES, sha256)
    # A link cannot lead to another file system or into an object store.
    files.write(url, memoryview(entry)[_DIGEST_BYTES:], sync=False)
    return CachedContent(0, sha256)


def cached_file(folder: str, key: str) -> tuple[Path, int] | None:
    """A local entry as a file to map into memory, and at which byte its content begins.

    The checksum is not compared, which would take reading all of it: for content that says itself
    whether it is whole, and that cannot mislead where a bit is wrong.
    """
    path = Path(folder, key)
    if not path.exists():
        return None
    # Its bytes are not needed: a local entry is renewed by setting its time alone.
    _renew(str(path), b"")
    return path, _DIGEST_BYTES


def write_cached(folder: str, key: str, content: bytes | memoryview) -> None:
    """Keep an entry, in place of an earlier one of this key."""
    try:
        entry = hashlib.sha256(content).digest() + content
        # Not flushed: what a loss of power leaves half written fails its checksum.
        files.write(f"{folder}/{key}", entry, sync=False)
    except FileNotFoundError:
        pass  # It was removed while it was written.


def cached_sha256(folder: Path, file: Path) -> str:
    """The SHA-256 of a local file, computed once, by whichever program, as long as the file
    system's record of it (number, size, times of its content and of its entry) stays the same."""
    status = os.stat(file)
    # With ctime, which no program can set back: a file changed under its old mtime is read again.
    state = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    key = hash_json({"file": state})
    return bytes(cached(str(folder), key, lambda: sha256_of(str(file)).encode())).decode()


def cached_folder(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """A local folder of files under the key (`cache_key`). If it is absent or not whole, `make`
    writes the files into an empty folder, which is then renamed to its place."""
    place = folder / key
    if not _is_whole(place):
        draft = folder / f"{key}.{uuid.uuid4().hex}"
        draft.mkdir(parents=True)
        try:
            make(draft)
            manifest = _MANIFEST.dump_json(list_files(str(draft)))
            (draft / MANIFEST_NAME).write_bytes(manifest)
            try:
                draft.rename(place)
            except OSError:
                # What another maker made first may be in use already.
                if not _is_whole(place):
                    # A rename takes the place of an empty folder, never of one with files in it.
                    shutil.rmtree(place, ignore_errors=True)
                    with suppress(OSError):
                        draft.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    # As for any entry, the time says when it was last used.
    for file in place.iterdir():
        os.utime(file)
    return place


def _is_whole(folder: Path) -> bool:
    try:
        entries = _MANIFEST.validate_json((folder / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, ValidationError):
        return False
    return not any(find_faults(str(folder), entries))


def _renew(url: str, entry: bytes) -> None:
    """Note that an entry was used: an object store knows only when it was written."""
    filesystem, path = files.resolve(url)
    try:
        if files.is_local(url):
            os.utime(path)
        elif time.time() - filesystem.modified(path).timestamp() > _RENEWAL_SECONDS:
            filesystem.pipe_file(path, entry)
    except FileNotFoundError:
        pass  # It was removed meanwhile.
