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
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from serving.engine.protocol import GenerateRequest
from serving.settings import JournalSettings
from serving.telemetry import log

FOLDER = "requests"
_KEY_NAME = "key"
_PRIVATE = 0o600


@dataclass(frozen=True)
class Entry:
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
        self,
        request: str,
        version: str,
        fingerprint: str,
        asked: Sequence[GenerateRequest],
        answers: Sequence[str],
    ) -> None:
        """Note the answers to what a request asked."""
        settings, now = self._settings(), datetime.now(UTC)
        try:
            if self._day != now.date():
                self._day = now.date()
                remove_expired(self._folder, settings.days, now.date())
            if settings.keep == "off":
                return
            key, prompts = _read_key(self._folder), map(_prompt_text, asked)
            entries = [
                Entry(
                    request,
                    now.isoformat(timespec="milliseconds"),
                    version,
                    fingerprint,
                    index,
                    _hash(key, prompt),
                    _hash(key, answer),
                    prompt if settings.keep == "text" else None,
                    answer if settings.keep == "text" else None,
                )
                for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            _append(self._folder / f"{self._day}.jsonl", entries)
        except OSError as error:
            log("journal", id=request, fault=error.strerror or str(error))


def _prompt_text(asked: GenerateRequest) -> str:
    if isinstance(asked.prompt, str):
        return asked.prompt
    turns = [message.model_dump() for message in asked.messages or ()]
    return json.dumps(turns or asked.prompt, ensure_ascii=False)


def find_entries(state_folder: Path, request: str, days: float) -> list[Entry]:
    """The answers to a request, oldest first; none where it is unknown or older than some days."""
    folder, today = state_folder / FOLDER, datetime.now(UTC).date()
    expired = set(_expired(folder, days, today))
    kept = [file for file in sorted(folder.glob("*.jsonl")) if file not in expired]
    return [one for file in kept for one in _entries(file) if one.request == request]


def is_answer(state_folder: Path, entry: Entry, text: str) -> bool:
    """Whether a text is, to the letter, the answer that an entry is about."""
    return secrets.compare_digest(_hash(_read_key(state_folder / FOLDER), text), entry.answer_hash)


def remove_expired(folder: Path, days: float, today: date) -> None:
    """Remove the files of the days before the last `days`."""
    for file in _expired(folder, days, today):
        file.unlink(missing_ok=True)


def _expired(folder: Path, days: float, today: date) -> Iterator[Path]:
    for file in folder.glob("*.jsonl"):
        if date.fromisoformat(file.stem) < today - timedelta(days=days):
            yield file


def _entries(file: Path) -> Iterator[Entry]:
    # The last line of a killed server may be half a line.
    for line in file.read_text(errors="replace").split("\n")[:-1]:
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue


def _append(path: Path, entries: list[Entry]) -> None:
    content = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _PRIVATE)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def _read_key(folder: Path) -> bytes:
    """The key of the hashes, made on first use: without it short texts could be guessed."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / _KEY_NAME
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    return path.read_bytes()


def _hash(key: bytes, text: str) -> str:
    return hashlib.blake2b(text.encode(), key=key, digest_size=16).hexdigest()
