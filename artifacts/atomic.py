"""Write a small file whole or not at all."""

import errno
import os
import uuid
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.errors import UserError


def write_atomically(filesystem: AbstractFileSystem, path: str, content: bytes) -> None:
    """Replace `path` in one step; a reader sees the old bytes or the new ones, never a part.

    Object stores write whole objects by nature; on a local disk the bytes go to a temporary file
    first, which is flushed and renamed.

    Raises:
        UserError: the disk is full. What was at `path` before is untouched.
    """
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.pipe_file(path, content)
        filesystem.invalidate_cache()
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"No space left on the disk while writing {target}. Nothing existing was changed: "
                "free some space and run the same command again."
            ) from error
        raise
