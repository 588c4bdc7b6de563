"""Walks a local folder: every file in it is either given or counted as unread, by kind."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from spark_jobs.read.opened import Unread
from spark_jobs.read.settings import Files

_SPECIAL = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclass(frozen=True)
class Walk:
    """One walk through a folder."""

    source: Files
    unread: Unread
    root: str
    """The folder, without links."""
    apart: frozenset[str] = frozenset()
    """Folders, without links, that are no source text: the store."""
    depth: int | None = None
    """Levels of subfolders that are entered; all without it."""

    def files(self) -> Iterator[tuple[str, int]]:
        """Each regular file's path and size, in no order."""
        folders = [(self.root, 0)]
        while folders:
            folder, level = folders.pop()
            for entry in self._entries(folder):
                if self._is_passed_over(entry):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if self.depth is None or level < self.depth:
                        folders.append((entry.path, level + 1))
                elif (size := self._size(entry)) is not None:
                    yield entry.path, size

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except PermissionError as error:
            self.not_permitted("folder", folder, error)
            return []

    def not_permitted(self, kind: str, path: str, error: PermissionError) -> None:
        """Count what may not be read, or raise UserError where the settings say so."""
        if self.source.on_bad_file == "quarantine":
            self.unread.add(f"unreadable {kind}", self._name(path))
            return
        raise UserError(
            f"Source {self.source.name!r}: the {kind} {shown_in_line(path)} may not be read "
            f"({error.strerror}). Give this user (uid {os.geteuid()}) the right to, or set "
            "`on_bad_file: quarantine` to leave it out."
        ) from error

    def _is_passed_over(self, entry: os.DirEntry[str]) -> bool:
        if entry.name.startswith(".") and not self.source.hidden:
            self._add("hidden", entry)
        elif entry.is_dir(follow_symlinks=False) and entry.path in self.apart:
            self._add("store of llm-assets", entry)
        elif entry.is_symlink():
            return self._is_link_passed_over(entry)
        else:
            return False
        return True

    def _is_link_passed_over(self, entry: os.DirEntry[str]) -> bool:
        target = os.path.realpath(entry.path)
        if not os.path.exists(target):
            self._add("broken link", entry)
        elif os.path.isdir(target):
            self._add("link to a folder", entry)
        elif not self.source.follow_links and not _is_within(target, self.root):
            self._add("link out of the folder", entry)
        else:
            return False
        return True

    def _size(self, entry: os.DirEntry[str]) -> int | None:
        """The bytes of a regular file; what is none, and has no end to read to, is counted."""
        try:
            found = entry.stat()
        except FileNotFoundError:
            return None
        kind = _SPECIAL.get(stat.S_IFMT(found.st_mode))
        if kind:
            self._add(kind, entry)
            return None
        return found.st_size

    def _add(self, kind: str, entry: os.DirEntry[str]) -> None:
        self.unread.add(kind, self._name(entry.path) + ("/" if os.path.isdir(entry.path) else ""))

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.root)


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder
