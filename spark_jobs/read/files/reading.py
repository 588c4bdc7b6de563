"""A source of files: what it holds now, and the reading of just that.

Digests of files are cached while the files' state stays the same.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from artifacts.progress import CountedProgress
from artifacts.storage import files
from artifacts.store.identity import hash_json
from spark_jobs.read.document import EMPTY, Document, Fault
from spark_jobs.read.files import mail, markup, office, rows, whole
from spark_jobs.read.files.archives import members
from spark_jobs.read.files.find import find_files
from spark_jobs.read.files.streams import BadFile, Content, SourceChanged, decode
from spark_jobs.read.files.whole import Extract, naming_encoding, one_document
from spark_jobs.read.formats import TABLES, FormatName
from spark_jobs.read.opened import Chunks, OpenedSource, Texts, chunk_key, group, hash64
from spark_jobs.read.settings import Files
from spark_jobs.read.source_file import RemoteFile, SourceFile, State, StoredFile, Tick

SETTLED_NANOSECONDS = 2_000_000_000
"""A file that was written so shortly before it was hashed may change again within one step of its
file system's clock, so its digest is not kept."""


class Digests:
    """What is known about the files of each source, so that only changed ones are hashed again.

    Kept in a file, since each look may come from another process.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Load what a file has; nothing if it is absent or damaged."""
        self._path = path
        self._known: dict[str, dict[str, tuple[Any, str]]] = {}
        """Source to the path of each of its files to its state and digest."""
        if path is not None:
            with suppress(OSError, ValueError, TypeError, AttributeError):
                for source, recorded in json.loads(path.read_bytes()).items():
                    # What were tuples are lists in JSON.
                    self._known[source] = {
                        name: (tuple(state) if isinstance(state, list) else state, digest)
                        for name, (state, digest) in recorded.items()
                    }
            with suppress(OSError):
                # Caches are cleaned of what was used longest ago.
                os.utime(path)

    def look(self, source: str, listed: list[StoredFile], tick: Tick) -> dict[str, str]:
        """Digests by path; only files whose state differs from before are read."""
        recorded, began = self._known.get(source, {}), time.time_ns()

        def digest(file: StoredFile) -> str:
            state, known = recorded.get(file.path, (None, ""))
            return known if state == file.listed_state else file.digest(tick)

        def is_settled(state: State) -> bool:
            # An object is known by its checksum, whenever it was written.
            written = max(state[2:]) if isinstance(state, tuple) else 0
            return began - written > SETTLED_NANOSECONDS

        with ThreadPoolExecutor(HASH_THREADS) as threads:
            paths = (file.path for file in listed)
            digests = dict(zip(paths, threads.map(digest, listed), strict=True))
        # Only what is there now: files that are gone leave the record.
        now = {
            file.path: (file.listed_state, digests[file.path])
            for file in listed
            if is_settled(file.listed_state)
        }
        # Of two processes that look at once, the last one's record stays; the other's files are
        # hashed again.
        if self._path is not None and now != recorded:
            self._known[source] = now
            files.write(self._path, json.dumps(self._known).encode())
        return digests


@dataclass(frozen=True)
class FormatReader:
    """How the files of a format are read."""

    documents: Callable[[Content], Iterator[Document | Fault]]
    libraries: frozenset[str] = frozenset()
    """Those that decide a file's text."""


def _one(extract: Extract, *libraries: str) -> FormatReader:
    """Of a format whose files are one document each."""
    return FormatReader(partial(one_document, extract=extract), frozenset(libraries))


READERS: dict[FormatName, FormatReader] = {
    "text": _one(decode),
    "code": _one(decode),
    "html": _one(markup.page_text, "charset-normalizer", "justext", "lxml", "trafilatura"),
    "pdf": FormatReader(whole.read_pdf, frozenset({"pypdf"})),
    "docx": _one(naming_encoding(office.docx_text), "lxml", "python-docx"),
    "notebook": _one(naming_encoding(whole.notebook_text)),
    "mail": FormatReader(mail.read_mail, frozenset({"lxml"})),
    "subtitles": _one(whole.subtitles_text),
    "xml": FormatReader(markup.read_xml, frozenset({"lxml"})),
    "rtf": _one(naming_encoding(office.rtf_text), "striprtf"),
    "odt": _one(naming_encoding(office.odt_text), "lxml"),
    "pptx": _one(naming_encoding(office.pptx_text), "lxml"),
    "xlsx": _one(naming_encoding(office.xlsx_text), "openpyxl"),
    "epub": _one(naming_encoding(office.epub_text), "lxml"),
    "json": FormatReader(rows.read_json),
    "csv": FormatReader(rows.read_csv),
    "parquet": FormatReader(rows.read_parquet),
}
"""All formats but archives, whose members are read by their own formats."""
EXTRACTORS = frozenset[str]().union(*(reader.libraries for reader in READERS.values()))
"""All libraries that may decide a file's text."""
HELD_CHARACTERS = 8 * 1024 * 1024
"""Held of a file that may turn out to be damaged; a file with more text is read twice."""
SAMPLED_FILES = 20
"""Files of a source, and of each archive, whose text is compared after a library's upgrade."""
HASH_THREADS = 4
"""A bucket answers several requests at a time, and hashing lets other threads work."""


def open_files(
    source: Files,
    report: Callable[[str], None],
    apart: str | None = None,
    digests: Digests | None = None,
    others: Sequence[Files] = (),
) -> OpenedSource:
    """The source's files as they are now, some megabytes of them a chunk, in name order.

    Args, and what is raised: as `open_sources` and `find_files`; from reading, as `read_stored`.
    """
    listing = find_files(source, apart, others=others)
    try:
        tick = _progress(report, source, "comparing with what is known", listing.files)
        digest_of = (digests or Digests()).look(source.name, listing.files, tick)
    except FileNotFoundError as error:
        raise SourceChanged(f"{error.filename} was removed while the source was read") from error
    groups = group(listing.files, lambda file: (file.name, file.size))
    keys = [chunk_key((file.name, digest_of[file.path]) for file in chunk) for chunk in groups]

    def read(numbers: list[int]) -> Iterator[tuple[int, Document | Fault]]:
        chosen = [file for number in numbers for file in groups[number]]
        tick = _progress(report, source, "reading", chosen)
        for number in numbers:
            for file in groups[number]:
                for document in read_stored(file, source, tick):
                    yield number, document

    remote = [[file for file in chunk if isinstance(file, RemoteFile)] for chunk in groups]
    listed = None if files.is_local(source.path) else remote
    # Numbered: files of two folders may have one name, and their order is that of documents.
    by_name = {f"{n}/{f.name}": digest_of[f.path] for n, f in enumerate(listing.files)}
    chunks = Chunks(keys, read, listed)

    def extracted(libraries: Collection[str]) -> Texts:
        by_them = (f for f in listing.files if not _extractors(f, source).isdisjoint(libraries))
        texts: Texts = {}
        # By a hash, since files with similar names often hold similar text.
        for file in sorted(by_them, key=lambda file: hash64(file.name))[:SAMPLED_FILES]:
            # Where the library now stumbles over a file, None stays, which differs from any text.
            if file.format.name != "archive":
                texts[file.name] = None
            content = Content(file, source, lambda number: None)
            with suppress(BadFile):
                for document in islice(documents_of(content), SAMPLED_FILES):
                    # Only a document that is a file's whole text has the file's name as its id.
                    if isinstance(document, Document) and document.id == document.path:
                        texts[document.id] = document.text
        return texts

    return OpenedSource(
        {source.name: hash_json(by_name)},
        lambda: chunks,
        listing.unread,
        sizes={digest_of[file.path]: file.size for file in listing.files},
        libraries=frozenset().union(*(_extractors(file, source) for file in listing.files)),
        extracted=extracted,
    )


def _extractors(file: SourceFile, source: Files) -> frozenset[str]:
    """The libraries that decide a file's text."""
    names = source.formats if file.format.name == "archive" else [file.format.name]
    return frozenset().union(*(READERS[name].libraries for name in names if name in READERS))


def read_stored(
    file: StoredFile, source: Files, tick: Tick = lambda number: None
) -> Iterator[Document | Fault]:
    """A file's documents, in whichever process reads it.

    Raises:
        BadFile: as a whole it cannot be read.
        SourceChanged: it changed since the source was listed.
    """
    yield from documents_of(Content(file, source, tick))
    # After reading, so that a change in the meantime is noticed.
    try:
        changed = file.state() != file.listed_state
    except FileNotFoundError:
        changed = True
    if changed:
        raise SourceChanged(f"{file.shown} changed while it was read")


def _progress(
    report: Callable[[str], None], source: Files, what: str, files: list[StoredFile]
) -> Tick:
    total = sum(file.size for file in files)
    progress = CountedProgress(report, f"{source.name}: {what}", round(total / 1e6), "MB")
    done = 0

    def tick(number: int) -> None:
        nonlocal done
        done = min(total, done + number)
        progress.advance(round(done / 1e6))

    return tick


def documents_of(content: Content) -> Iterator[Document | Fault]:
    """All documents of a file; if it has none, as an upload that was cut, a fault that names it."""
    is_archive = content.file.format.name == "archive"
    documents = _of_archive(content) if is_archive else _of_file(content)
    first = next(documents, None)
    yield first or Fault(EMPTY, f"{content.file.shown} holds no document.")
    yield from documents


def _of_archive(content: Content) -> Iterator[Document | Fault]:
    try:
        for member in members(content):
            if isinstance(member, Fault):
                yield member
            else:
                yield from documents_of(replace(content, file=member))
    except BadFile as error:
        if content.source.on_bad_file == "stop":
            raise
        yield Fault("bad_file", str(error))


def _of_file(content: Content) -> Iterator[Document | Fault]:
    """A file's documents; with quarantine, all of them or one fault."""
    name = content.file.format.name
    read = _refuse if content.source.examples and name not in TABLES else READERS[name].documents
    if content.source.on_bad_file == "stop":
        yield from read(content)
        return
    held: list[Document | Fault] = []
    size = 0
    try:
        documents = read(content)
        for one in documents:
            held.append(one)
            size += len(one.text) if isinstance(one, Document) else 100
            if size > HELD_CHARACTERS:
                break
        # If a file is damaged further on, nothing of it is kept: the rest is read first.
        longer = sum(1 for _ in documents) > 0
    except BadFile as error:
        yield Fault("bad_file", str(error))
        return
    if longer:
        held.clear()
    yield from read(content) if longer else held


def _refuse(content: Content) -> Iterator[Document | Fault]:
    name = content.file.format.name
    raise BadFile(
        f"{content.file.shown} is in the format {name!r}, which has no rows, and the source's "
        f"`examples` are rows of {', '.join(TABLES)} files. Take {name!r} out of `formats` of the "
        "source, or let `path` match only the files of examples."
    )
