"""Faults of stored things, each in one line: `DAMAGES["flipped bit"](artifact)`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from artifacts.store.layout import MANIFEST_NAME
from artifacts.store.store import Artifact


def delete(artifact: Artifact) -> None:
    shutil.rmtree(artifact.path)


def empty_manifest(artifact: Artifact) -> None:
    (artifact.path / MANIFEST_NAME).write_bytes(b"")


def cut_manifest(artifact: Artifact) -> None:
    cut(artifact.path / MANIFEST_NAME)


def change_manifest(artifact: Artifact) -> None:
    """As somebody with an editor might."""
    path = artifact.path / MANIFEST_NAME
    fields = json.loads(path.read_bytes())
    path.write_text(json.dumps(fields | {"stats": {}}))


def flip_bit(path: Path) -> None:
    """Turn one bit in the middle of a file, which keeps its length."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0b100]))


def cut(path: Path) -> None:
    """Keep the first half of a file."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def largest_file(artifact: Artifact) -> Path:
    entry = max(artifact.manifest.files, key=lambda entry: entry.bytes)
    return artifact.path / entry.path


DAMAGES: dict[str, Callable[[Artifact], None]] = {
    "missing": delete,
    "empty manifest": empty_manifest,
    "cut manifest": cut_manifest,
    "wrong fields": change_manifest,
    "flipped bit": lambda artifact: flip_bit(largest_file(artifact)),
    "cut file": lambda artifact: cut(largest_file(artifact)),
    "file missing": lambda artifact: largest_file(artifact).unlink(),
}


def prescribed(message: str) -> str:
    """The shell line that a message about damage ends with."""
    before, _, command = message.strip().splitlines()[-1].rpartition("with: ")
    assert before, f"no way out in: {message}"
    return command
