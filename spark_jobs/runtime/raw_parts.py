"""Parts of a raw corpus: in its folder, or pinned, where their source has them."""

import fnmatch

from artifacts.storage import files
from spark_jobs.runtime.parquet import PART_NAMES, Part, find_parts
from spark_jobs.runtime.pinned.file import PinnedFile
from spark_jobs.runtime.pinned.parts import parts_of

RAW_COLUMNS = ["id", "text", "source"]
"""That every raw corpus has."""
PINNED_NAME = "pinned.jsonl"
"""Of the list of pinned files in a raw corpus, a line each."""


def find_raw_parts(url: str) -> list[Part]:
    """The parts of a raw corpus, in its folder or where they are pinned, in a fixed order.

    Raises:
        UserError: there are none, or one in the folder is damaged or lacks a column.
    """
    pinned = [part for file in find_pinned(url) for part in parts_of(file)]
    if pinned and not fnmatch.filter(files.list_names(url), PART_NAMES):
        return pinned
    return find_parts(url, RAW_COLUMNS, "raw_corpus") + pinned


def find_pinned(url: str) -> list[PinnedFile]:
    """The files that a raw corpus pins."""
    lines = (files.find(f"{url}/{PINNED_NAME}") or b"").splitlines()
    return [PinnedFile.model_validate_json(line) for line in lines]
