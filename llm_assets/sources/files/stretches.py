"""Cuts a file of JSON lines into what tasks read at a time; the lines are counted, not parsed."""

from collections.abc import Iterator

from artifacts.errors import UserError
from llm_assets.sources.files.source_file import StoredFile
from llm_assets.sources.files.streams import MAGIC
from spark_jobs.runtime.pinned.file import PinnedFile, Stretch
from spark_jobs.runtime.pinned.lines import read_line

STRETCH_BYTES = 16 * 1024 * 1024
"""After which a stretch ends with the line."""
MOST_LINE_BYTES = 512 * 1024 * 1024
"""Of which one task holds a few times as much in memory."""


def check_first_line(file: StoredFile, pinned: PinnedFile) -> None:
    """Raise UserError where the first document lacks what the settings say, or is no JSON."""
    with file.open(lambda number: None) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MOST_LINE_BYTES), b""), start=1):
            kind = next((kind for magic, kind in MAGIC.items() if line.startswith(magic)), None)
            if kind:
                raise UserError(
                    f"{file.shown} is compressed ({kind}), though its name does not say so. Unpack "
                    "it, or have the source copied: `pin: false`."
                )
            if line.strip():
                read_line(pinned, line, number)
                return


def cut_lines(file: StoredFile) -> Iterator[Stretch]:
    """The file's lines, some megabytes at a time.

    Raises:
        UserError: a line is longer than `MOST_LINE_BYTES`.
    """
    size = lines = rows = all_lines = 0
    with file.open(lambda number: None) as stream:
        while line := stream.readline(MOST_LINE_BYTES + 1):
            all_lines += 1
            if len(line) > MOST_LINE_BYTES:
                raise UserError(
                    f"{file.shown}, line {all_lines} has more than {MOST_LINE_BYTES / 1e6:,.0f} "
                    "MB, which one task cannot read. Divide it, or have the source copied: "
                    "`pin: false`."
                )
            size += len(line)
            lines += 1
            rows += not line.isspace()
            if size >= STRETCH_BYTES:
                yield Stretch(size, lines, rows)
                size = lines = rows = 0
    if size:
        yield Stretch(size, lines, rows)
