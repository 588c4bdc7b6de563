"""A source of files: what it holds now, and the reading of just that.

Digests of files are cached while the files' state stays the same.
"""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from artifacts.progress import CountedProgress
from artifacts.storage import files
from artifacts.store.identity import hash_json
from spark_jobs.read.document import EMPTY, UNREAD, Document, Fault, of_example
from spark_jobs.read.files import office, rows, streams
from spark_jobs.read.files.find import find_files
from spark_jobs.read.files.rows import Row
from spark_jobs.read.opened import (
    Batch,
    Chunks,
    ListedFile,
    OpenedSource,
    Texts,
    chunk_key,
    group,
    hash64,
)
from spark_jobs.read.settings import TABLES, Files, FormatName, format_of

SETTLED_NANOSECONDS = 2_000_000_000
"""A file that was written so shortly before it was hashed may change again within one step of its
file system's clock, so its digest is not kept."""


class Digests:
    """What is known of the files of each source, for whoever looks again and again.

    Kept in a file, since the process that looks may be another one each time.
    """

    def __init__(self, path: Path | None = None) -> None:
        """What a file has; nothing where it is absent or damaged."""
        self._path = path
        self._known: dict[str, tuple[Any, str]] = {}
        self._changed = False
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._known = {k: (_hashable(s), d) for k, (s, d) in json.loads(path.read_bytes())}

    def find(self, source: str, file: streams.StoredFile, state: object) -> str | None:
        """A file's digest, if its state is what it was before."""
        known = self._known.get(f"{source}\0{file.path}")
        return known[1] if known is not None and known[0] == state else None

    def read(self, source: str, file: streams.StoredFile, state: object, tick: streams.Tick) -> str:
        """A file's digest, for which the file is read."""
        began = time.time_ns()
        digest = file.digest(tick)
        if not isinstance(state, tuple) or began - max(state[2:]) > SETTLED_NANOSECONDS:
            self._known[f"{source}\0{file.path}"] = (state, digest)
            self._changed = True
        return digest

    def keep(self, source: str, found: Iterable[streams.StoredFile]) -> None:
        """Forget the files of a source that are no longer there, and write what is known."""
        there = {f"{source}\0{file.path}" for file in found}
        of_source = f"{source}\0"
        gone = [key for key in self._known if key.startswith(of_source) and key not in there]
        for key in gone:
            del self._known[key]
        if self._path is not None and (gone or self._changed):
            content = json.dumps(list(self._known.items())).encode()
            files.write(self._path, content)
            self._changed = False


def _hashable(state: Any) -> Any:
    return tuple(state) if isinstance(state, list) else state


READERS: dict[FormatName, Callable[[streams.Content], Iterator[Row]]] = {
    "text": rows.read_text,
    "code": rows.read_text,
    "html": rows.read_html,
    "pdf": rows.read_pdf,
    "mail": office.read_mail,
    "subtitles": office.read_subtitles,
    "xml": office.read_xml,
    "json": rows.read_json,
    "csv": rows.read_csv,
    "parquet": rows.read_parquet,
}
TEXTS: dict[FormatName, Callable[[bytes], str]] = {
    "docx": office.docx_text,
    "notebook": rows.notebook_text,
    "rtf": office.rtf_text,
    "odt": office.odt_text,
    "pptx": office.pptx_text,
    "xlsx": office.xlsx_text,
    "epub": office.epub_text,
}
"""Of formats that need no more: a file's content to its text, which is one document."""
EXTRACTORS: dict[FormatName, frozenset[str]] = {
    "html": frozenset({"charset-normalizer", "justext", "lxml", "trafilatura"}),
    "pdf": frozenset({"pypdf"}),
    "docx": frozenset({"lxml", "python-docx"}),
    "mail": frozenset({"lxml"}),
    "xml": frozenset({"lxml"}),
    "rtf": frozenset({"striprtf"}),
    "odt": frozenset({"lxml"}),
    "pptx": frozenset({"lxml"}),
    "xlsx": frozenset({"openpyxl"}),
    "epub": frozenset({"lxml"}),
}
"""Libraries that take the text out of a file, which is one document."""
SAMPLED_FILES = 20
"""Of a source, and files of an archive, whose text is compared after an upgrade of a library."""
HASH_THREADS = 4
"""A bucket answers several requests at a time, and hashing lets other threads work."""


def open_files(
    source: Files,
    report: Callable[[str], None],
    apart: str | None = None,
    digests: Digests | None = None,
) -> OpenedSource:
    """The source's files as they are now, some megabytes of them a chunk, in name order.

    Args:
        report: told how far hashing and reading are.
        apart: a folder that is no source text: the store.
        digests: what is known of the files from a look before.

    Raises:
        UserError: nothing can be read there; from reading, a file that as a whole cannot be.
        SourceChanged: from reading, a file changed since it was hashed.
    """
    found = find_files(source, apart)
    try:
        states = [file.state_when_found() for file in found.files]
        hashes = _hashes(found.files, states, source, report, digests or Digests())
    except FileNotFoundError as error:
        raise streams.SourceChanged(
            f"{error.filename} was removed while the source was read"
        ) from error
    groups = group((file.name, file.size) for file in found.files)
    keys = [chunk_key((found.files[n].name, hashes[n]) for n in numbers) for numbers in groups]

    def read(numbers: list[int]) -> Iterator[tuple[int, Batch]]:
        chosen = [n for number in numbers for n in groups[number]]
        tick = _progress(report, source, "reading", [found.files[n] for n in chosen])
        for number in numbers:
            for n in groups[number]:
                for batch in _read(found.files[n], states[n], source, tick):
                    yield number, batch

    remote = [file.listed for file in found.files if isinstance(file, streams.RemoteFile)]
    in_bucket = len(remote) == len(found.files)
    listed = [remote[numbers.start : numbers.stop] for numbers in groups] if in_bucket else None
    by_name = {f"{n}/{file.name}": hashes[n] for n, file in enumerate(found.files)}
    whole = hash_json(by_name)
    sizes = {one: file.size for file, one in zip(found.files, hashes, strict=True)}
    chunks = Chunks(keys, read, listed)

    def extracted(libraries: Collection[str]) -> Texts:
        by_them = (f for f in found.files if not _extractors(f, source).isdisjoint(libraries))
        texts: Texts = {}
        for file in sorted(by_them, key=lambda file: hash64(file.name))[:SAMPLED_FILES]:
            if file.format.name != "archive":
                texts[file.name] = None
            with suppress(streams.BadFile):
                for one in islice(documents_of(file, source, lambda number: None), SAMPLED_FILES):
                    # What is a file's whole text is known by the file's name.
                    if isinstance(one, Document) and one.id == one.path:
                        texts[one.id] = one.text
        return texts

    return OpenedSource(
        {source.name: whole},
        lambda: chunks,
        found.unread,
        sizes,
        libraries=frozenset().union(*(_extractors(file, source) for file in found.files)),
        extracted=extracted,
    )


def _extractors(file: streams.SourceFile, source: Files) -> frozenset[str]:
    """The libraries that decide a file's text."""
    if file.format.name == "archive":
        return frozenset().union(*(EXTRACTORS.get(name, ()) for name in source.formats))
    return EXTRACTORS.get(file.format.name, frozenset())


def read_listed(source: Files, listed: ListedFile) -> Iterator[Batch]:
    """A file of a chunk (`Chunks.files`), in whichever process reads it; raises as `open_files`
    does from reading."""
    form = format_of(listed.name)
    assert form is not None, "files of other formats are not listed"
    file = streams.RemoteFile(listed.url, listed.name, listed.bytes, form, listed)
    return _read(file, file.state_when_found(), source, lambda number: None)


def _read(
    file: streams.StoredFile, state: object, source: Files, tick: streams.Tick
) -> Iterator[Batch]:
    """A file's documents; raises SourceChanged where it is no longer in that state."""
    yield from _batches(documents_of(file, source, tick))
    try:
        changed = file.state() != state
    except FileNotFoundError:
        changed = True
    if changed:
        raise streams.SourceChanged(f"{file.shown} changed while it was read")


def _hashes(
    files: list[streams.StoredFile],
    states: list[object],
    source: Files,
    report: Callable[[str], None],
    digests: Digests,
) -> list[str]:
    tick = _progress(report, source, "comparing with what is known", files)
    found = [digests.find(source.name, *one) for one in zip(files, states, strict=True)]
    missing = [number for number, digest in enumerate(found) if digest is None]

    def digest(number: int) -> str:
        return digests.read(source.name, files[number], states[number], tick)

    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for number, one in zip(missing, threads.map(digest, missing), strict=True):
            found[number] = one
    digests.keep(source.name, files)
    return [one for one in found if one is not None]


def _progress(
    report: Callable[[str], None], source: Files, what: str, files: list[streams.StoredFile]
) -> streams.Tick:
    total = sum(file.size for file in files)
    progress = CountedProgress(report, f"{source.name}: {what}", round(total / 1e6), "MB")
    done = 0

    def tick(number: int) -> None:
        nonlocal done
        done = min(total, done + number)
        progress.advance(round(done / 1e6))

    return tick


def documents_of(
    file: streams.SourceFile, source: Files, tick: streams.Tick
) -> Iterator[Document | Fault]:
    """All that is in a file; one in which nothing is, such as an upload that was cut, is named."""
    documents = _of_file(file, source, tick)
    first = next(documents, None)
    yield first or Fault(EMPTY, f"{file.shown} holds no document.")
    yield from documents


def _of_file(
    file: streams.SourceFile, source: Files, tick: streams.Tick
) -> Iterator[Document | Fault]:
    content = streams.Content(file, source, tick)
    if file.format.name != "archive":
        for row in _rows(content):
            yield row if isinstance(row, Fault) else _document(row, file, source)
        return
    try:
        for member in streams.members(content):
            if isinstance(member, streams.SkippedMember):
                reason = f"{UNREAD}{member.kind}"
                yield Fault(reason, f"{reason}: {member.name}")
            else:
                yield from documents_of(member, source, tick)
    except streams.BadFile as error:
        if source.on_bad_file == "stop":
            raise
        yield Fault("bad_file", str(error))


def _document(row: tuple[str, str, str], file: streams.SourceFile, source: Files) -> Document:
    identifier, text, place = row
    if source.examples:
        return of_example(identifier, text, source.name, place, file.name)
    language = file.format.language
    return Document(identifier, text, source.name, path=file.name, language=language, place=place)


def _rows(content: streams.Content) -> Iterator[Row]:
    """A file's rows; with quarantine, all of them or one fault."""
    name = content.file.format.name
    read = READERS.get(name) or partial(rows.one_document, extract=TEXTS[name])
    if content.source.examples and name not in TABLES:
        read = _refuse
    if content.source.on_bad_file == "stop":
        yield from read(content)
        return
    first: list[Row] = []
    size = 0
    try:
        rows_left = read(content)
        for row in rows_left:
            first.append(row)
            size += _size(row)
            if size > rows.BATCH_BYTES:
                break
        # Of a file that is damaged further on, nothing is kept: it is read through before.
        longer = sum(1 for _ in rows_left) > 0
    except streams.BadFile as error:
        yield Fault("bad_file", str(error))
        return
    if longer:
        first.clear()
    yield from read(content) if longer else first


def _refuse(content: streams.Content) -> Iterator[Row]:
    name = content.file.format.name
    raise streams.BadFile(
        f"{content.file.shown} is in the format {name!r}, which has no rows, and the source's "
        f"`examples` are rows of {', '.join(TABLES)} files. Take {name!r} out of `formats` of the "
        "source, or let `path` match only the files of examples."
    )


def _size(row: Row | Document) -> int:
    if isinstance(row, Document):
        return len(row.text)
    return 100 if isinstance(row, Fault) else len(row[1])


def _batches(documents: Iterator[Document | Fault]) -> Iterator[Batch]:
    """Batches of some megabytes."""
    batch: Batch = []
    size = 0
    for document in documents:
        batch.append(document)
        size += 100 + _size(document)
        if size >= rows.BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch
