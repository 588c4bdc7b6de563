"""A folder that lives as long as one run."""

from collections.abc import Iterator
from contextlib import contextmanager

from artifacts.storage import files


@contextmanager
def scratch_folder(url: str) -> Iterator[str]:
    """A folder with nothing in it, which is removed at the end, whatever that is."""
    files.remove(url)
    try:
        yield url
    finally:
        files.remove(url)
