"""A line of a pinned file of JSON lines as a document."""

import json
from typing import NoReturn

from artifacts.document_ids import find_id_fault
from artifacts.errors import UserError
from artifacts.json_rows import value_at, with_whole_characters
from artifacts.shown import shown_in_line
from spark_jobs.runtime.pinned.file import PinnedFile

_MISSING = object()


def read_line(file: PinnedFile, line: bytes, number: int) -> tuple[str, str | None]:
    """The id and text of a line, as they are when the file is copied; None is a text that is null.

    Args:
        number: the line's in the file, from 1.

    Raises:
        UserError: the line is no JSON object in UTF-8 with a text and an id.
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        _refuse(file, number, f"byte 0x{error.object[error.start]:02x} is not UTF-8")
    except (ValueError, RecursionError) as error:
        _refuse(file, number, f"not valid JSON ({error})")
    text = value_at(record, file.text_column, _MISSING)
    if not isinstance(text, str | None):
        _refuse(file, number, f"no text under the key {file.text_column!r}")
    identifier = f"{file.name}:{number}"
    if file.id_column is not None:
        found = value_at(record, file.id_column)
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            _refuse(file, number, f"no text or number under the key {file.id_column!r}")
        identifier = str(found)
    if fault := find_id_fault(identifier):
        _refuse(file, number, f"the id '{shown_in_line(identifier[:80])}' {fault}")
    return identifier, None if text is None else with_whole_characters(text)


def _refuse(file: PinnedFile, number: int, what: str) -> NoReturn:
    raise UserError(
        f"{file.url}, line {number}: {what}. Mend it, or have such lines set aside and counted: "
        "`pin: false`."
    )
