"""A source of files: what it holds now, and the reading of just that."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from artifacts.progress import CountedProgress
from artifacts.store.identity import hash_json
from spark_jobs.read.chunks import Batch, Chunks, group, no_chunks
from spark_jobs.read.document import Document, of_example
from spark_jobs.read.faults import UNREAD, Fault
from spark_jobs.read.files import extracted, rows
from spark_jobs.read.files.archives import Passed, members
from spark_jobs.read.files.content import Content
from spark_jobs.read.files.digests import Digests
from spark_jobs.read.files.find import find_files
from spark_jobs.read.files.pinned import pin_files
from spark_jobs.read.files.rows import Row
from spark_jobs.read.files.source_file import RemoteFile, SourceChanged, SourceFile, StoredFile
from spark_jobs.read.files.streams import BadFile, Tick
from spark_jobs.read.formats import FormatName, format_of
from spark_jobs.read.opened import OpenedSource
from spark_jobs.read.settings import Files
from spark_jobs.runtime.pinned.file import ListedFile

READERS: dict[FormatName, Callable[[Content], Iterator[Row]]] = {
    "text": extracted.read_text,
    "code": extracted.read_text,
    "html": extracted.read_html,
    "pdf": extracted.read_pdf,
    "docx": extracted.read_docx,
    "notebook": extracted.read_notebook,
    "json": rows.read_json,
    "csv": rows.read_csv,
    "parquet": rows.read_parquet,
}
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
        raise SourceChanged(f"{error.filename} was removed while the source was read") from error
    groups = group((file.name, file.size) for file in found.files)
    keys = [hash_json({found.files[n].name: hashes[n] for n in numbers}) for numbers in groups]

    def read(numbers: list[int]) -> Iterator[tuple[int, Batch]]:
        chosen = [n for number in numbers for n in groups[number]]
        tick = _progress(report, source, "reading", [found.files[n] for n in chosen])
        for number in numbers:
            for n in groups[number]:
                for batch in _read(found.files[n], states[n], source, tick):
                    yield number, batch

    remote = [file.listed for file in found.files if isinstance(file, RemoteFile)]
    in_bucket = len(remote) == len(found.files)
    listed = [remote[numbers.start : numbers.stop] for numbers in groups] if in_bucket else None
    by_name = {f"{n}/{file.name}": hashes[n] for n, file in enumerate(found.files)}
    whole = hash_json(by_name)
    sizes = {one: file.size for file, one in zip(found.files, hashes, strict=True)}
    if source.pin:
        pin = partial(pin_files, source, found.files, hashes, report)
        return OpenedSource({source.name: whole}, no_chunks, found.unread, sizes, pin)
    chunks = Chunks(keys, read, listed)
    return OpenedSource({source.name: whole}, lambda: chunks, found.unread, sizes)


def read_listed(source: Files, listed: ListedFile) -> Iterator[Batch]:
    """A file of a chunk (`Chunks.files`), in whichever process reads it; raises as `open_files`
    does from reading."""
    form = format_of(listed.name)
    assert form is not None, "files of other formats are not listed"
    file = RemoteFile(listed.url, listed.name, listed.bytes, form, listed)
    return _read(file, file.state_when_found(), source, lambda number: None)


def _read(file: StoredFile, state: object, source: Files, tick: Tick) -> Iterator[Batch]:
    """A file's documents; raises SourceChanged where it is no longer in that state."""
    yield from _batches(_documents(file, source, tick))
    _refuse_change(file, state)


def _hashes(
    files: list[StoredFile],
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


def _refuse_change(file: StoredFile, before: object) -> None:
    try:
        changed = file.state() != before
    except FileNotFoundError:
        changed = True
    if changed:
        raise SourceChanged(f"{file.shown} changed while it was read")


def _documents(file: SourceFile, source: Files, tick: Tick) -> Iterator[Document | Fault]:
    content = Content(file, source, tick)
    if file.format.name != "archive":
        for row in _rows(content):
            yield row if isinstance(row, Fault) else _document(row, file, source)
        return
    try:
        for member in members(content):
            if isinstance(member, Passed):
                reason = f"{UNREAD}{member.kind}"
                yield Fault(reason, f"{reason}: {member.name}")
            else:
                yield from _documents(member, source, tick)
    except BadFile as error:
        if source.on_bad_file == "stop":
            raise
        yield Fault("bad_file", str(error))


def _document(row: tuple[str, str], file: SourceFile, source: Files) -> Document:
    identifier, text = row
    if source.examples:
        return of_example(identifier, text, source.name, file.name)
    return Document(identifier, text, source.name, path=file.name, language=file.format.language)


def _rows(content: Content) -> Iterator[Row]:
    """A file's rows; with quarantine, all of them or one fault."""
    read = READERS[content.file.format.name]
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
    except BadFile as error:
        yield Fault("bad_file", str(error))
        return
    if longer:
        first.clear()
    yield from read(content) if longer else first


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
