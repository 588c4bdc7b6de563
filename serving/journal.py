"""What the endpoint answered, kept for those who ask later which text stands behind an answer.

A file for each day, `<date>.jsonl`, in a folder that its owner alone may read. By the settings it
holds nothing, keyed hashes of prompt and answer, or both as they were. Days past the retention are
removed with the first answer of each day, and until then found by nobody.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import BinaryIO

from serving.engine.protocol import GenerateRequest
from serving.logs import log
from serving.settings import JournalSettings
from serving.state import OfVersion, open_private, own_key

FOLDER = "requests"


@dataclass(frozen=True)
class JournalEntry:
    """One answer."""

    request: str
    """The request's id, `X-Request-Id`."""
    at: str
    """When it was complete, ISO 8601 in UTC."""
    version: str
    fingerprint: str
    index: int
    """Which of the request's answers, from 0."""
    prompt_hash: str
    answer_hash: str
    prompt: str | None = None
    """As the client sent it; chats and tokens as JSON. None where only hashes are kept."""
    answer: str | None = None


class Journal:
    """Writes answers down; a full disk must not stop the server."""

    def __init__(self, folder: Path, settings: Callable[[], JournalSettings]) -> None:
        """Begin with a state folder; what `settings` gives may change from answer to answer."""
        self._folder, self._settings = folder / FOLDER, settings
        self._day: date | None = None

    def write(
        self, request: str, by: OfVersion, asked: Sequence[GenerateRequest], answers: Sequence[str]
    ) -> None:
        """Note the answers to what a request asked."""
        settings, now = self._settings(), datetime.now(UTC)
        try:
            # Also where `keep` is off: what was written under another setting has to expire all the
            # same.
            if self._day != now.date():
                self._day = now.date()
                for day, file in _days(self._folder):
                    if _is_expired(day, settings.days, now.date()):
                        file.unlink(missing_ok=True)
            if settings.keep == "off":
                return
            key, lines = _read_key(self._folder), ""
            at = now.isoformat(timespec="milliseconds")
            common = (request, at, by.version, by.fingerprint)
            for index, (generate_request, answer) in enumerate(zip(asked, answers, strict=True)):
                prompt = generate_request.prompt
                if not isinstance(prompt, str):
                    turns = [turn.model_dump() for turn in generate_request.messages or ()]
                    prompt = json.dumps(turns or prompt, ensure_ascii=False)
                texts = (prompt, answer) if settings.keep == "text" else ()
                entry = JournalEntry(*common, index, _hash(key, prompt), _hash(key, answer), *texts)
                lines += json.dumps(asdict(entry)) + "\n"
            with open(self._folder / f"{self._day}.jsonl", "a+b", opener=open_private) as day_file:
                day_file.write(_line_break(day_file) + lines.encode())
        except OSError as error:
            log("journal", id=request, fault=error.strerror or str(error))


def _line_break(file: BinaryIO) -> bytes:
    """What ends the last line, where a killed server or a full disk left half of one."""
    if not file.tell():
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read() == b"\n" else b"\n"


def find_entries(state_folder: Path, request: str, days: float) -> list[JournalEntry]:
    """The answers to a request, oldest first; none where it is unknown or older than some days.

    Args:
        request: its `X-Request-Id`, or the `id` in a body of OpenAI's API, which has a prefix.
    """
    today, entries = datetime.now(UTC).date(), []
    names = {request.removeprefix(prefix) for prefix in ("", "cmpl-", "chatcmpl-")}
    for day, file in _days(state_folder / FOLDER):
        if _is_expired(day, days, today):
            continue
        # The last line of a killed server may be half a line.
        for line in file.read_text(errors="replace").split("\n")[:-1]:
            with suppress(ValueError, TypeError):
                entry = JournalEntry(**json.loads(line))
                entries += [entry] if entry.request in names else []
    return entries


def is_answer(state_folder: Path, entry: JournalEntry, text: str) -> bool:
    """Whether a text is, to the letter, the answer that an entry is about."""
    return secrets.compare_digest(_hash(_read_key(state_folder / FOLDER), text), entry.answer_hash)


def _days(folder: Path) -> Iterator[tuple[date, Path]]:
    """The files of days, oldest first; what else lies there is not the journal's."""
    for file in sorted(folder.glob("????-??-??.jsonl")):
        with suppress(ValueError):
            yield date.fromisoformat(file.stem), file


def _is_expired(day: date, days: float, today: date) -> bool:
    """Whether a day is before the last `days`."""
    return (today - day).days > days


def _read_key(folder: Path) -> bytes:
    """The key of the hashes: without it short texts could be guessed."""
    return own_key(folder / "key", lambda: secrets.token_bytes(32))


def _hash(key: bytes, text: str) -> str:
    return hashlib.blake2b(text.encode(), key=key, digest_size=16).hexdigest()
