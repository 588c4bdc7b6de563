"""Digests of files, kept while the files' state stays the same."""

import time
from collections.abc import Iterable

from llm_assets.sources.files.source_file import StoredFile
from llm_assets.sources.files.streams import Tick

SETTLED_NANOSECONDS = 2_000_000_000
"""A file that was written so shortly before it was hashed may change again within one step of its
file system's clock, so its digest is not kept."""


class Digests:
    """What is known of the files of each source; for a process that looks again and again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[object, str]] = {}

    def of(self, source: str, file: StoredFile, state: object, tick: Tick) -> str:
        """A file's digest; the file is read only if its state is another than before."""
        key = (source, file.path)
        known = self._known.get(key)
        if known is not None and known[0] == state:
            return known[1]
        began = time.time_ns()
        digest = file.digest(tick)
        if not isinstance(state, tuple) or began - max(state[2:]) > SETTLED_NANOSECONDS:
            self._known[key] = (state, digest)
        return digest

    def keep(self, source: str, files: Iterable[StoredFile]) -> None:
        """Forget the files of a source that are no longer there."""
        there = {file.path for file in files}
        for key in [key for key in self._known if key[0] == source and key[1] not in there]:
            del self._known[key]
