"""A log of bounded size."""

import os
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 16 * 1024 * 1024
"""Of one file; when it is full, it takes the place of the one before."""


def append(path: Path, content: bytes) -> None:
    """Add to a log; where that cannot be, as on a full disk, the content is lost."""
    with suppress(OSError):
        make_room(path)
        with path.open("ab", buffering=0) as file:
            file.write(content)


def make_room(path: Path) -> None:
    """Begin a log again where it is full; what was written stays beside it, once."""
    with suppress(OSError):
        if path.stat().st_size >= MAX_BYTES:
            os.replace(path, before(path))


def before(path: Path) -> Path:
    """Where the full log lies that came before this one."""
    return path.with_name(f"{path.name}.before")
