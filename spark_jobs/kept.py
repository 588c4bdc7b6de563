"""What a run keeps for the next one, under names that follow from all that decides its content."""

from collections.abc import Iterable
from typing import Any

import fsspec

from artifacts.identity import hash_json


def name_kept(folder: str, ending: str, **decided_by: Any) -> str:
    """Where something is kept: another name for another content.

    Args:
        decided_by: all that decides the content, as values that JSON can hold.
    """
    return f"{folder}/{hash_json(decided_by)}.{ending}"


def is_kept(url: str) -> bool:
    """Whether it is there."""
    filesystem, path = fsspec.core.url_to_fs(url)
    return bool(filesystem.exists(path))


def copy_file(url: str, target: str) -> None:
    """Copy a file within one file system; it appears under its name only when it is whole."""
    filesystem, path = fsspec.core.url_to_fs(url)
    copy = fsspec.core.url_to_fs(target)[1]
    folder, _, name = copy.rpartition("/")
    filesystem.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/.{name}.tmp"
    filesystem.cp_file(path, temporary)
    filesystem.mv(temporary, copy)


def remove_others(folder: str, kept: Iterable[str]) -> None:
    """Remove every file of a folder but the ones to keep."""
    filesystem, path = fsspec.core.url_to_fs(folder)
    wanted = {fsspec.core.url_to_fs(url)[1] for url in kept}
    for file in set(filesystem.find(path)) - wanted:
        filesystem.rm(file)
