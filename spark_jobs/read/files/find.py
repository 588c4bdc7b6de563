"""Finds the files of a source, and what lies beside them."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsspec import AbstractFileSystem
from fsspec.utils import glob_translate

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from artifacts.storage import files, versions
from spark_jobs.read.files.source_file import LocalFile, RemoteFile, StoredFile
from spark_jobs.read.files.walk import Walk
from spark_jobs.read.formats import FORMATS, format_of, kind_of
from spark_jobs.read.opened import Unread
from spark_jobs.read.settings import Files
from spark_jobs.runtime.pinned.file import ListedFile

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST_PATHS = 100_000


@dataclass
class Found:
    """What a source's path leads to."""

    files: list[StoredFile] = field(default_factory=list)
    """In name order, of formats that are read."""
    unread: Unread = field(default_factory=Unread)


def find_files(source: Files, apart: str | None = None) -> Found:
    """The source's files, and what is not read.

    Args:
        apart: a folder that is no source text wherever it lies: the store.

    Raises:
        UserError: nothing is there, nothing of a format that is read, or, unless the settings say
            otherwise, something that may not be read.
    """
    found = Found()
    for url in expand_braces(source.path):
        matched = _match(source, url, found.unread, apart)
        if not matched:
            raise UserError(_nothing_found(source, url, found.unread))
        for file in sorted(matched, key=lambda one: one.name):
            if file.format.name in source.formats:
                found.files.append(file)
            else:
                found.unread.add(f"{file.format.name} files", file.name)
    if not found.files:
        raise UserError(
            f"Source {source.name!r}: nothing at {shown_in_line(source.path)} is read: "
            f"{found.unread}. Formats read here: {', '.join(source.formats)} (key `formats`)."
        )
    return found


def _nothing_found(source: Files, url: str, unread: Unread) -> str:
    if unread.counts:
        return (
            f"Source {source.name!r}: no file at {shown_in_line(url)} is of a format that is read "
            f"({', '.join(FORMATS)}). What is there: {unread}."
        )
    return (
        f"Source {source.name!r}: {shown_in_line(url)} matches no file. "
        f"Check `raw_corpus.sources` ({source.name}), key `path`."
    )


def _match(source: Files, url: str, unread: Unread, apart: str | None) -> list[StoredFile]:
    filesystem, path = files.resolve(url)
    if files.is_local(url):
        return list(_match_local(source, path, unread, apart))
    return list(_match_remote(source, filesystem, path, unread))


def _match_local(
    source: Files, path: str, unread: Unread, apart: str | None
) -> Iterator[StoredFile]:
    folder, pattern = _split_glob(path)
    if pattern is None and not os.path.isdir(path):
        yield from _single(source, path)
        return
    if not os.path.isdir(folder):
        return
    root = os.path.realpath(folder)
    chosen = re.compile(glob_translate(pattern)) if pattern else None
    depth = pattern.count("/") if pattern and "**" not in pattern else None
    stores = frozenset({os.path.realpath(apart)}) if apart and "://" not in apart else frozenset()
    walk = Walk(source, unread, root, stores, depth)
    for found, size in walk.files():
        name = found.removeprefix(root).lstrip("/")
        if chosen and not chosen.fullmatch(name):
            continue
        if not os.access(found, os.R_OK, effective_ids=True):
            walk.not_permitted("file", found, PermissionError(13, "permission denied"))
            continue
        if file := _local_file(found, name, size, unread):
            yield file


def _single(source: Files, path: str) -> Iterator[StoredFile]:
    """A file that the settings name is read whatever link leads to it."""
    if not os.path.exists(path):
        return
    if not os.path.isfile(path):
        raise UserError(
            f"Source {source.name!r}: {shown_in_line(path)} is a FIFO, socket or device, which has "
            "no end. Point `path` at a file or folder."
        )
    unread = Unread()
    file = _local_file(path, os.path.basename(path), os.path.getsize(path), unread)
    if file is None:
        raise UserError(_nothing_found(source, path, unread))
    yield file


def _local_file(path: str, name: str, size: int, unread: Unread) -> LocalFile | None:
    # A name that is not UTF-8 is written out, as one that holds control characters.
    name = shown_in_line(os.fsencode(name).decode("utf-8", "backslashreplace"))
    form = format_of(name)
    if form is None:
        unread.add(kind_of(name), name)
        return None
    return LocalFile(path, name, size, form)


def _match_remote(
    source: Files, filesystem: AbstractFileSystem, path: str, unread: Unread
) -> Iterator[StoredFile]:
    folder, pattern = _split_glob(path)
    if pattern:
        details = filesystem.glob(path, detail=True)
    elif filesystem.isfile(path):
        folder, details = path.rpartition("/")[0], {path: filesystem.info(path)}
    else:
        details = filesystem.find(path, detail=True)
    for found, about in details.items():
        name = shown_in_line(found.removeprefix(folder).lstrip("/"))
        if about.get("type") == "directory" or found.endswith("/"):
            continue
        if not source.hidden and any(part.startswith(".") for part in name.split("/")):
            unread.add("hidden", name)
        elif form := format_of(name):
            listed = ListedFile(
                url=filesystem.unstrip_protocol(found),
                name=name,
                bytes=about.get("size") or 0,
                generation=versions.stated_generation(filesystem, found, about),
                checksum=versions.stated_checksum(filesystem, found, about),
            )
            yield RemoteFile(listed.url, name, listed.bytes, form, listed)
        else:
            unread.add(kind_of(name), name)


def _split_glob(path: str) -> tuple[str, str | None]:
    """The folder that a path names, and the glob below it, if it has one."""
    signs = [path.find(sign) for sign in "*?[" if sign in path]
    if not signs:
        return path.rstrip("/") or "/", None
    folder, _, rest = path[: min(signs)].rpartition("/")
    return folder or "/", rest + path[min(signs) :]


def expand_braces(path: str) -> list[str]:
    """All paths that a path with braces means, in order; a range keeps its leading zeros.

    Raises:
        UserError: a brace is not closed, a range is typed wrong or runs backwards, or there are
            more than `MOST_PATHS` paths.
    """
    found = _BRACES.search(path)
    if found is None:
        if "{" in path or "}" in path:
            raise UserError(f"{path}: a brace without its pair. Write ranges as {{1..128}}.")
        return [path]
    paths: list[str] = []
    for choice in _choices(found.group(1), path):
        paths += expand_braces(path[: found.start()] + choice + path[found.end() :])
        if len(paths) > MOST_PATHS:
            raise UserError(f"{path} means more than {MOST_PATHS:,} files: use a glob instead.")
    return paths


def _choices(inside: str, path: str) -> list[str]:
    bounds = _RANGE.fullmatch(inside)
    if bounds is None:
        if "," in inside:
            return inside.split(",")
        raise UserError(
            f"{path}: {{{inside}}} is neither a range like {{1..128}} nor a list like {{a,b}}."
        )
    first, last = bounds.groups()
    if int(first) > int(last):
        raise UserError(f"{path}: the range {{{inside}}} runs backwards.")
    if int(last) - int(first) > MOST_PATHS:
        raise UserError(f"{path} means more than {MOST_PATHS:,} files: use a glob instead.")
    width = len(first) if first.startswith("0") and len(first) > 1 else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
