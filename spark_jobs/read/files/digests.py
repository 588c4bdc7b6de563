"""Digests of files, kept while the files' state stays the same."""

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from artifacts.storage import files
from spark_jobs.read.files.source_file import StoredFile
from spark_jobs.read.files.streams import Tick

SETTLED_NANOSECONDS = 2_000_000_000
"""A file that was written so shortly before it was hashed may change again within one step of its
file system's clock, so its digest is not kept."""


class Digests:
    """What is known of the files of each source, for whoever looks again and again.

    Kept in a file, since the process that looks may be another one each time.
    """

    def __init__(self, path: Path | None = None) -> None:
        """What a file has; nothing where it is absent or damaged."""
        self._path = path
        self._known: dict[str, tuple[Any, str]] = {}
        self._changed = False
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._known = {k: (_hashable(s), d) for k, (s, d) in json.loads(path.read_bytes())}

    def find(self, source: str, file: StoredFile, state: object) -> str | None:
        """A file's digest, if its state is what it was before."""
        known = self._known.get(f"{source}\0{file.path}")
        return known[1] if known is not None and known[0] == state else None

    def read(self, source: str, file: StoredFile, state: object, tick: Tick) -> str:
        """A file's digest, for which the file is read."""
        began = time.time_ns()
        digest = file.digest(tick)
        if not isinstance(state, tuple) or began - max(state[2:]) > SETTLED_NANOSECONDS:
            self._known[f"{source}\0{file.path}"] = (state, digest)
            self._changed = True
        return digest

    def keep(self, source: str, found: Iterable[StoredFile]) -> None:
        """Forget the files of a source that are no longer there, and write what is known."""
        there = {f"{source}\0{file.path}" for file in found}
        of_source = f"{source}\0"
        gone = [key for key in self._known if key.startswith(of_source) and key not in there]
        for key in gone:
            del self._known[key]
        if self._path is not None and (gone or self._changed):
            content = json.dumps(list(self._known.items())).encode()
            files.write(self._path, content)
            self._changed = False


def _hashable(state: Any) -> Any:
    return tuple(state) if isinstance(state, list) else state
