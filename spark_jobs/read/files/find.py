"""Finds the files of a source, and what lies beside them.

Of a local folder, every file is either given or counted as unread, by kind.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod

from fsspec import AbstractFileSystem
from fsspec.utils import glob_translate

from artifacts.errors import UserError, shown_in_line
from artifacts.storage import files, transfer
from spark_jobs.read.document import EXAMPLES
from spark_jobs.read.formats import FORMATS, advise_conversion, format_of, kind_of
from spark_jobs.read.opened import SkippedFiles
from spark_jobs.read.settings import Files
from spark_jobs.read.source_file import LocalFile, RemoteFile, StoredFile, local_state

STORE = "store of llm-assets"
"""The kind of the pipeline's own folder among the text."""
UNREADABLE = "unreadable"
"""Prefix of the kinds that this user may not read."""
_READ_BY = {"hidden": "hidden", "link out of the folder": "follow_links"}
"""Kinds to the settings that read them."""
_SPECIAL = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.EINVAL}
"""What the system says of a folder that was removed during the walk, or whose process has ended."""


@dataclass(frozen=True)
class Walk:
    """One walk through a folder."""

    source: Files
    unread: SkippedFiles
    root: str
    """The folder, without links."""
    store: str | None = None
    """A folder, without links, that is no source text."""
    depth: int | None = None
    """Levels of subfolders to enter; None for all."""
    chosen: re.Pattern[str] | None = None
    """Names of the files that are read or counted; all without it."""

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Each regular file's path and what the system says of it, in no order."""
        folders = [(self.root, 0)]
        while folders:
            folder, level = folders.pop()
            for entry in self._entries(folder):
                kind, path = self._kind_not_read(entry), entry.path
                is_folder = os.path.isdir(path) if kind else entry.is_dir(follow_symlinks=False)
                if is_folder and level == self.depth:
                    continue  # No file below it is chosen.
                if self.chosen and not is_folder and not self.chosen.fullmatch(self.name_of(path)):
                    continue
                if kind:
                    self._add(kind, entry)
                elif is_folder:
                    folders.append((path, level + 1))
                elif found := self._stat(entry):
                    yield path, found

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except PermissionError:
            self.not_permitted("folder", folder)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        return []

    def not_permitted(self, kind: str, path: str) -> None:
        """Count what may not be read, or raise UserError where the settings say so."""
        if self.source.on_bad_file == "quarantine":
            self.unread.add(f"{UNREADABLE} {kind}", self.name_of(path) or ".")
            return
        raise UserError(
            f"Source {self.source.name!r}: the {kind} {shown_in_line(path)} may not be read "
            f"(permission denied). Give this user (uid {os.geteuid()}) the right to, or set "
            "`on_bad_file: quarantine` to leave it out."
        )

    def _kind_not_read(self, entry: os.DirEntry[str]) -> str | None:
        """What a folder or link that is passed over, or anything hidden, is counted under."""
        if entry.name.startswith(".") and not self.source.hidden:
            return "hidden"
        if entry.is_dir(follow_symlinks=False):
            # Both paths are without links, as no link to a folder is followed.
            return STORE if entry.path == self.store else None
        if not entry.is_symlink():
            return None
        try:
            target = os.path.realpath(entry.path)
        except OSError:  # As of a link of a process without a program, in /proc.
            return "broken link"
        if not os.path.exists(target):
            return "broken link"
        if os.path.isdir(target):
            return "link to a folder"
        is_outside = os.path.commonpath([target, self.root]) != self.root
        return "link out of the folder" if is_outside and not self.source.follow_links else None

    def _stat(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """The status of a regular file; anything else, which may have no end, is counted."""
        try:
            status = entry.stat()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if stat.S_ISREG(status.st_mode):
            return status
        self._add(_SPECIAL.get(stat.S_IFMT(status.st_mode), "device"), entry)
        return None

    def _add(self, kind: str, entry: os.DirEntry[str]) -> None:
        self.unread.add(kind, self.name_of(entry.path) + ("/" if os.path.isdir(entry.path) else ""))

    def name_of(self, path: str) -> str:
        """A path below the root, from there."""
        return path.removeprefix(self.root).lstrip("/")


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST_PATHS = 100_000


class NoFiles(UserError):
    """There is no file at all, not even one of another format."""


@dataclass
class FileListing:
    """What a source's path leads to."""

    files: list[StoredFile] = field(default_factory=list)
    """In name order, of formats that are read."""
    unread: SkippedFiles = field(default_factory=SkippedFiles)


def find_files(
    source: Files,
    apart: str | None = None,
    names: int = EXAMPLES,
    others: Sequence[Files] = (),
) -> FileListing:
    """The source's files, and what is not read.

    Args:
        apart: a folder that is no source text wherever it lies: the store.
        names: how many are kept of each kind that is not read.
        others: sources, of whose files none counts as not read.

    Raises:
        UserError: nothing is there (`NoFiles`), nothing of a format that is read, or, unless the
            settings say otherwise, something that may not be read; or the path leads into the
            store.
    """
    listing = FileListing(unread=SkippedFiles(most=names))
    places: set[tuple[str, str]] = set()
    # The links of a folder are followed once for all of its files.
    real_folder = cache(os.path.realpath)
    # What exists under this very name is meant, even if the name could be a pattern.
    is_name = files.is_local(source.path) and os.path.exists(source.path)
    for url in [source.path] if is_name else expand_braces(source.path):
        if apart:
            _refuse_store(source, url, apart)
        filesystem, path = files.resolve(url)
        matched = list(
            _match_local(source, path, listing.unread, apart)
            if files.is_local(url)
            else _match_remote(source, filesystem, path, listing.unread, apart)
        )
        if not matched:
            kind = UserError if listing.unread.counts else NoFiles
            raise kind(_nothing_found(source, url, listing.unread))
        for file in sorted(matched, key=lambda file: file.name):
            folder, name = os.path.split(file.path)
            # The folder without links, since two paths of a source may lead to one file.
            place = (real_folder(folder) if isinstance(file, LocalFile) else folder, name)
            if file.format.name not in source.formats:
                if not any(_reads(other, file) for other in others):
                    listing.unread.add(f"{file.format.name} files", file.name)
            elif place in places:
                listing.unread.add("other spelling of a file that is read", file.name)
            else:
                listing.files.append(file)
                places.add(place)
    if not listing.files:
        raise UserError(
            f"Source {source.name!r}: nothing at {shown_in_line(source.path)} is read: "
            f"{listing.unread}. Formats read here: {', '.join(source.formats)} (key `formats`)."
        )
    return listing


def _reads(source: Files, file: StoredFile) -> bool:
    """Whether a source without a pattern in its path reads a file."""
    if file.format.name not in source.formats:
        return False
    path = source.path
    if files.is_local(path):
        # As that of a file that was found in a folder.
        path = os.path.realpath(files.resolve(path)[1])
    return f"{file.path}/".startswith(f"{path.rstrip('/')}/")


def _refuse_store(source: Files, url: str, store: str) -> None:
    """Raise UserError where a path leads into the store, which a model would learn then."""
    if files.is_local(url) != files.is_local(store):
        return
    (_, path), (_, root) = files.resolve(url), files.resolve(store)
    folder = _split_glob(path)[0]
    if files.is_local(url):
        folder, root = os.path.realpath(folder), os.path.realpath(root)
    if f"{folder}/".startswith(f"{root.rstrip('/')}/"):
        raise UserError(
            f"Source {source.name!r}: `path` ({shown_in_line(url)}) is in the pipeline's `store` "
            f"({shown_in_line(store)}), whose files are no source text. Set `path` to the folder "
            "of your text, or `store` to another folder."
        )


def _nothing_found(source: Files, url: str, unread: SkippedFiles) -> str:
    if unread.counts and all(kind.startswith(UNREADABLE) for kind in unread.counts):
        return (
            f"Source {source.name!r}: at {shown_in_line(url)}, this user (uid {os.geteuid()}) may "
            f"read none of: {unread}. Have their owner grant it."
        )
    if unread.counts:
        keys = [f"`{key}`" for kind, key in _READ_BY.items() if kind in unread.counts]
        advice = f"set {' or '.join(keys)} to read such files, " if keys else ""
        return (
            f"Source {source.name!r}: no file at {shown_in_line(url)} has a format that is read "
            f"({', '.join(FORMATS)}). Found instead: {unread}. Convert them to text, {advice}or "
            "point `path` at another folder."
            + "".join(f"\n  {way}" for way in advise_conversion(unread.counts))
        )
    return (
        f"Source {source.name!r}: {shown_in_line(url)} matches no file. "
        f"Check `raw_corpus.sources` ({source.name}), key `path`."
    )


def _match_local(
    source: Files, path: str, unread: SkippedFiles, apart: str | None
) -> Iterator[StoredFile]:
    folder, pattern = (path, None) if os.path.exists(path) else _split_glob(path)
    if pattern is None and os.path.exists(path) and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise UserError(
                f"Source {source.name!r}: {shown_in_line(path)} is a FIFO, socket or device, which "
                "has no end. Point `path` at a file or folder."
            )
        # A file that the settings name is read whatever link leads to it.
        single = _local_file(path, os.path.basename(path), os.stat(path), unread)
        if single is None:
            raise UserError(_nothing_found(source, path, unread))
        yield single
        return
    if not os.path.isdir(folder):
        return
    root = os.path.realpath(folder)
    name_pattern = re.compile(glob_translate(pattern)) if pattern else None
    # Without `**`, a pattern reaches no deeper than its slashes.
    depth = pattern.count("/") if pattern and "**" not in pattern else None
    store = os.path.realpath(files.resolve(apart)[1]) if apart and files.is_local(apart) else None
    walk = Walk(source, unread, root, store, depth, name_pattern)
    for place, about in walk.files():
        # By the effective user, whose right it is that decides when the file is opened.
        if not os.access(place, os.R_OK, effective_ids=True):
            if not os.path.lexists(place):
                continue  # It was removed during the walk.
            walk.not_permitted("file", place)
            continue
        if file := _local_file(place, walk.name_of(place), about, unread):
            yield file


def _local_file(
    path: str, name: str, about: os.stat_result, unread: SkippedFiles
) -> LocalFile | None:
    # Bytes of a name that are not UTF-8 are escaped, as control characters are.
    name = shown_in_line(os.fsencode(name).decode("utf-8", "backslashreplace"))
    form = format_of(name)
    if form is None:
        unread.add(kind_of(name), name)
        return None
    return LocalFile(path, name, about.st_size, form, local_state(about))


def _match_remote(
    source: Files,
    filesystem: AbstractFileSystem,
    path: str,
    unread: SkippedFiles,
    apart: str | None,
) -> Iterator[StoredFile]:
    store = f"{apart.rstrip('/')}/" if apart else None
    folder, pattern = _split_glob(path)
    if pattern:
        details = filesystem.glob(path, detail=True)
    elif filesystem.isfile(path):
        folder, details = path.rpartition("/")[0], {path: filesystem.info(path)}
    else:
        details = filesystem.find(path, detail=True)
    for key, about in details.items():
        name = shown_in_line(key.removeprefix(folder).lstrip("/"))
        # Consoles of buckets stand for a folder by an object whose name ends with a slash.
        if about.get("type") == "directory" or key.endswith("/"):
            continue
        if store and filesystem.unstrip_protocol(key).startswith(store):
            unread.add(STORE, name)
        elif not source.hidden and any(part.startswith(".") for part in name.split("/")):
            unread.add("hidden", name)
        elif form := format_of(name):
            url, size = filesystem.unstrip_protocol(key), about.get("size") or 0
            checksum = transfer.stated_checksum(filesystem, key, about)
            yield RemoteFile(url, name, size, form, checksum)
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
    """All paths that a path with braces means, in order; a range keeps its leading zeros. Raises
    UserError where braces or a range are typed wrong, or there are more than `MOST_PATHS` paths."""
    parts = _BRACES.split(path)
    if re.search("[{}]", "".join(parts[::2])):
        raise UserError(f"{path}: a brace without its pair, or nested. Write ranges as {{1..128}}.")
    # Every other part is what was in braces.
    choices = [_choices(one, path) if place % 2 else [one] for place, one in enumerate(parts)]
    if prod(map(len, choices)) > MOST_PATHS:
        raise UserError(f"{path} means more than {MOST_PATHS:,} files: use a glob instead.")
    return ["".join(chosen) for chosen in product(*choices)]


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
    # Before the names are made, of which a typing error may mean billions.
    if int(last) - int(first) > MOST_PATHS:
        raise UserError(f"{path} means more than {MOST_PATHS:,} files: use a glob instead.")
    width = len(first) if first.startswith("0") and len(first) > 1 else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
