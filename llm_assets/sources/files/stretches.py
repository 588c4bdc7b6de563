"""Cuts a file of JSON lines into what tasks read at a time; the lines are counted, not parsed."""

from collections.abc import Iterator

from artifacts.errors import UserError
from llm_assets.sources.files.source_file import StoredFile
from llm_assets.sources.files.streams import MAGIC
from llm_assets.sources.settings import Files
from spark_jobs.runtime.pinned.file import PinnedFile, Stretch
from spark_jobs.runtime.pinned.lines import read_line

STRETCH_BYTES = 16 * 1024 * 1024
"""After which a stretch ends with the line."""


def check_first_line(source: Files, file: StoredFile, pinned: PinnedFile) -> None:
    """Raise UserError where the first document lacks what the settings say, or is no JSON."""
    for number, line in enumerate(_lines(source, file), start=1):
        kind = next((kind for magic, kind in MAGIC.items() if line.startswith(magic)), None)
        if kind:
            raise UserError(
                f"{file.shown} is compressed ({kind}), though its name does not say so. Unpack it, "
                "or have the source copied: `pin: false`."
            )
        if line.strip():
            read_line(pinned, line, number)
            return


def cut_lines(source: Files, file: StoredFile) -> Iterator[Stretch]:
    """The file's lines, some megabytes at a time.

    Raises:
        UserError: a line is longer than a document may be.
    """
    size = lines = rows = 0
    for line in _lines(source, file):
        size += len(line)
        lines += 1
        rows += not line.isspace()
        if size >= STRETCH_BYTES:
            yield Stretch(size, lines, rows)
            size = lines = rows = 0
    if size:
        yield Stretch(size, lines, rows)


def _lines(source: Files, file: StoredFile) -> Iterator[bytes]:
    most_bytes = int(source.maximum_document_megabytes * 1e6)
    with file.open(lambda number: None) as stream:
        number = 0
        while line := stream.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise UserError(
                    f"{file.shown}, line {number}: more than {source.maximum_document_megabytes:g} "
                    "MB. Divide it, raise `maximum_document_megabytes` of the source, or have such "
                    "lines set aside and counted: `pin: false`."
                )
            yield line
