"""A folder that lives as long as one run."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec


@contextmanager
def scratch_folder(url: str) -> Iterator[str]:
    """A folder with nothing in it, which is removed at the end, whatever that is."""
    filesystem, path = fsspec.core.url_to_fs(url)
    _remove(filesystem, path)
    try:
        yield url
    finally:
        _remove(filesystem, path)


def _remove(filesystem: fsspec.AbstractFileSystem, path: str) -> None:
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)
