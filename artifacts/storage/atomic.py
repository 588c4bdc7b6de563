"""Write a small file whole or not at all."""

from fsspec import AbstractFileSystem

from artifacts.storage import files


def write_atomically(
    filesystem: AbstractFileSystem, path: str, content: bytes, sync: bool = True
) -> None:
    """Replace `path` in one step, as `files.write` does."""
    files.write(filesystem.unstrip_protocol(path), content, sync)
