"""A first look at a source of files: what its readers make of it, read for so many seconds.

All of it where the time suffices; else a sample, from which the whole is reckoned.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest

from spark_jobs.read.document import DECODED, EXAMPLES, UNREAD, Document, Fault
from spark_jobs.read.files.reading import documents_of
from spark_jobs.read.files.rows import measure_parquet
from spark_jobs.read.files.streams import BadFile, Content, SourceChanged, StoredFile
from spark_jobs.read.language import guess_language
from spark_jobs.read.opened import SkippedFiles, check_document, hash64
from spark_jobs.read.settings import Files

ASCII = bytes(range(128))
ROWS = ("json", "csv", "parquet", "archive", "mail", "xml")
"""Formats whose files hold many documents, so that a look may end in the middle of one."""


@dataclass
class TextSurvey:
    """What files hold; where not all of them were read, as much as they likely do."""

    documents: float = 0.0
    """That cleaning can keep: long enough, and the same text once."""
    bytes: float = 0.0
    """Of these, in UTF-8."""
    beyond_ascii: float = 0.0
    """Of these bytes, those of characters beyond ASCII."""
    copies: float = 0.0
    """Documents whose very text another one has."""
    short: float = 0.0
    """Documents shorter than cleaning keeps."""
    short_lengths: Counter[int] = field(default_factory=Counter)
    """Of those that were read: characters to documents."""
    unread: SkippedFiles = field(default_factory=SkippedFiles)
    """What lies in archives and is not read, and files that were removed meanwhile."""
    decoded: SkippedFiles = field(default_factory=SkippedFiles)
    """Files that are not UTF-8, by their encodings, and are read nevertheless."""
    faults: Counter[str] = field(default_factory=Counter)
    """Reason to how many were set aside, of what was read."""
    messages: list[str] = field(default_factory=list)
    """Of what was set aside."""
    read: int = 0
    """Documents that were read."""
    languages: Counter[str | None] = field(default_factory=Counter)
    """What they seem to be written in, to how many; None where nothing tells."""
    share: float = 0.0
    """Of the bytes to read, those that were; 1 where everything was."""


@dataclass
class _Kind:
    """The files of one format, and what was read of them."""

    files: list[StoredFile]
    finished: int = 0
    bytes: float = 0.0
    begun_bytes: int = 0
    """Of the files that were begun, as stored."""
    begun_to_read: int = 0
    """Of these, those that are read: of a Parquet file those of some columns."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> float:
        """Bytes to read; of files that were not begun, the share that it is of the others."""
        stored = sum(file.size for file in self.files)
        return stored * self.begun_to_read / self.begun_bytes if self.begun_bytes else stored

    def whole_over_read(self, name: str) -> float:
        if self.finished == len(self.files) or not self.bytes:
            return 1.0
        if name in ROWS or not self.finished:
            return max(1.0, self.size / self.bytes)
        return len(self.files) / self.finished


def survey(
    source: Files,
    files: list[StoredFile],
    least_characters: int,
    seconds: float | None = None,
    messages: int = EXAMPLES,
    seen: set[int] | None = None,
) -> TextSurvey:
    """Read files of a source, of every format some, until the time is up.

    Args:
        least_characters: of a document that cleaning keeps.
        seconds: None reads everything.
        messages: of each reason, how many are kept.
        seen: texts of other sources, by `hash64`, of which copies count as copies; those of this
            one are added.

    Raises:
        UserError: a file cannot be read, and the source sets none aside; or a library is missing.
    """
    look = _Look(source, least_characters, seconds, messages, set() if seen is None else seen)
    kinds: dict[str, _Kind] = defaultdict(lambda: _Kind([]))
    for file in sorted(files, key=lambda one: hash64(one.name)):
        kinds[file.format.name].files.append(file)
    try:
        for row in zip_longest(*(kind.files for kind in kinds.values())):
            for file in filter(None, row):
                look.read(file, kinds[file.format.name])
    except _TimeIsUpError:
        pass
    return look.conclude(kinds)


class _TimeIsUpError(Exception):
    pass


class _Look:
    def __init__(
        self,
        source: Files,
        least_characters: int,
        seconds: float | None,
        messages: int,
        seen: set[int],
    ) -> None:
        self._source, self._least, self._messages = source, least_characters, messages
        # Else a large file would be read to its end before its first row is seen.
        self._streaming = source.model_copy(update={"on_bad_file": "stop"})
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._seen = seen
        self._new: list[int] = []
        """Texts of the file that is being read."""
        self._found = TextSurvey(unread=SkippedFiles(most=messages))

    def read(self, file: StoredFile, kind: _Kind) -> None:
        name = file.format.name

        def tick(number: int) -> None:
            kind.bytes += number if name != "parquet" else 0
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise _TimeIsUpError

        source = self._source if name == "archive" else self._streaming
        found = self._found
        before = found.read, found.short_lengths.copy(), found.languages.copy(), kind.counts.copy()
        self._new.clear()
        content = Content(file, source, tick)
        try:
            rows, to_read = 0, file.size
            if name == "parquet":
                # Of its bytes some megabytes are read ahead, and those of other columns never.
                rows, to_read = measure_parquet(content)
            kind.begun_bytes += file.size
            kind.begun_to_read += to_read
            for one in documents_of(content):
                kind.bytes += to_read / rows if rows else 0
                checked = one if isinstance(one, Fault) else check_document(one)
                if isinstance(checked, Fault):
                    self._set_aside(checked)
                else:
                    self._add(checked, kind)
        except BadFile as error:
            if self._source.on_bad_file == "stop":
                raise
            # A run leaves out all of it, also the documents that come before the damage.
            found.read, found.short_lengths, found.languages, kind.counts = before
            self._seen.difference_update(self._new)
            self._set_aside(Fault("bad_file", str(error)))
        except SourceChanged:
            # What else there is decides; a run reads what is there by then.
            self._found.unread.add("removed while the folder was read", file.name)
        kind.finished += 1

    def _add(self, document: Document, kind: _Kind) -> None:
        self._found.read += 1
        text = " ".join(document.text.split())
        digest = hash64(text)
        if len(text) < self._least:
            kind.counts["short"] += 1
            self._found.short_lengths[len(text)] += 1
        elif digest in self._seen:
            kind.counts["copies"] += 1
        else:
            self._seen.add(digest)
            self._new.append(digest)
            kind.counts["documents"] += 1
            self._found.languages[guess_language(text)] += 1
            content = document.text.encode("utf-8", "surrogatepass")
            kind.counts["bytes"] += len(content)
            kind.counts["beyond_ascii"] += len(content.translate(None, ASCII))

    def _set_aside(self, fault: Fault) -> None:
        found = self._found
        for beginning, told in ((DECODED, found.decoded), (UNREAD, found.unread)):
            if fault.reason.startswith(beginning):
                name = fault.message.removeprefix(f"{fault.reason}: ")
                told.add(fault.reason.removeprefix(beginning), name)
                return
        found.faults[fault.reason] += 1
        if found.faults[fault.reason] <= self._messages:
            found.messages.append(fault.message)

    def conclude(self, kinds: dict[str, _Kind]) -> TextSurvey:
        found = self._found
        for name, kind in kinds.items():
            factor = kind.whole_over_read(name)
            for counted, number in kind.counts.items():
                setattr(found, counted, getattr(found, counted) + factor * number)
        total = sum(kind.size for kind in kinds.values())
        read = sum(kind.bytes for kind in kinds.values())
        unfinished = any(kind.finished < len(kind.files) for kind in kinds.values())
        found.share = min(0.999, read / max(1, total)) if unfinished else 1.0
        return found
