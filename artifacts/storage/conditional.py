"""Reads and writes of Cloud Storage that happen only if nobody else was faster.

Every write of an object gives it another generation, which storage compares with the one that the
writer has seen, in the same step.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.cloud.storage import Blob

ABSENT = 0
"""The generation of an object that is not there."""


def blob_of(url: str) -> "Blob":
    """The object of `gs://bucket/name`."""
    from google.cloud.storage import Client

    bucket, _, name = url.removeprefix("gs://").partition("/")
    return Client().bucket(bucket).blob(name)


def read(blob: "Blob") -> tuple[bytes | None, int]:
    """An object's content and its generation; None and ABSENT where it is not there."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    while True:
        # A fresh look: an object that was read before would ask for the generation it had then.
        current = blob.bucket.get_blob(blob.name)
        if current is None:
            return None, ABSENT
        generation = int(current.generation or ABSENT)
        try:
            return bytes(current.download_as_bytes(if_generation_match=generation)), generation
        except (NotFound, PreconditionFailed):
            continue


def write(blob: "Blob", content: bytes, generation: int) -> int | None:
    """Write over a known generation: the new one, or None where another was faster."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        blob.upload_from_string(content, if_generation_match=generation)
    except (PreconditionFailed, NotFound):
        return None
    return int(blob.generation or ABSENT)


def copy_new(source: "Blob", generation: int, target: "Blob") -> bool:
    """Copy a known generation of an object to where nothing is: whether both were so.

    Storage checks both within the copy, so nothing can come between.
    """
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        target.rewrite(source, if_generation_match=ABSENT, if_source_generation_match=generation)
    except (PreconditionFailed, NotFound):
        return False
    return True
