"""Reads documents from files: plain text, JSON lines and Parquet, through fsspec."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from artifacts.errors import UserError
from artifacts.identity import hash_json
from artifacts.progress import CountedProgress
from llm_assets.sources.braces import expand_braces
from llm_assets.sources.compression import unpack
from llm_assets.sources.document import Document
from llm_assets.sources.faults import Fault
from llm_assets.sources.pieces import Batch, Pieces, group
from llm_assets.sources.settings import Files

TEXT_SUFFIXES = (".txt", ".md", ".rst")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BOMB_BYTES = 64 * 1024 * 1024
"""Unpacked size below which no file is taken for a compression bomb."""
BATCH_DOCUMENTS = 1_000
HASH_THREADS = 4
"""A bucket answers several requests at a time, and hashing lets other threads work."""

Row = tuple[str, str] | Fault
"""A document's id and text, or its fault."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str
    """Relative to the source's folder; it enters document ids, so no machine's paths do."""

    @property
    def compression(self) -> str | None:
        return next((kind for end, kind in COMPRESSIONS.items() if self.path.endswith(end)), None)

    @property
    def suffix(self) -> str:
        """The format's ending, with the compression's taken off."""
        path = self.path
        for end in COMPRESSIONS:
            path = path.removesuffix(end)
        return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), "")


def find_files(source: Files) -> list[SourceFile]:
    """The source's files in name order.

    Raises:
        UserError: nothing is there, or nothing of a format that can be read.
    """
    files = []
    for url in expand_braces(source.path):
        found = _match(url)
        if not found:
            raise UserError(
                f"Source {source.name!r}: {url} matches no file. "
                f"Check `raw_corpus.sources` ({source.name}), key `path`."
            )
        files += found
    readable = [file for file in files if file.suffix]
    if not readable:
        raise UserError(
            f"Source {source.name!r}: none of the {len(files)} files at {source.path} ends in "
            f"{', '.join(SUFFIXES)} (or those with .gz, .zst); the first is {files[0].name}."
        )
    return readable


def _match(url: str) -> list[SourceFile]:
    """The files of one path, folder or glob in name order."""
    filesystem, path = fsspec.core.url_to_fs(url)
    if any(character in path for character in "*?["):
        fixed = path[: min(path.find(c) for c in "*?[" if c in path)]
        folder = fixed.rpartition("/")[0]
        paths = [p for p in filesystem.glob(path) if not filesystem.isdir(p)]
    elif filesystem.isdir(path):
        folder, paths = path, filesystem.find(path)
    else:
        folder, paths = path.rpartition("/")[0], [path] if filesystem.exists(path) else []
    return [
        SourceFile(filesystem, path, path.removeprefix(folder).lstrip("/"))
        for path in sorted(paths)
    ]


def fingerprint_files(source: Files) -> str:
    """A hash of every file's name and content; in the cloud, of the object's own checksum."""
    digest = hashlib.sha256()
    files = find_files(source)
    for file, content in zip(files, _content_hashes(files), strict=True):
        digest.update(file.name.encode())
        digest.update(content.encode())
    return digest.hexdigest()[:32]


def file_pieces(source: Files, report: Callable[[str], None]) -> Pieces:
    """The source's files, some megabytes of them a piece, in name order.

    Reading raises UserError where a file as a whole cannot be read.
    """
    files = find_files(source)
    groups = group((file.name, file.filesystem.size(file.path) or 0) for file in files)
    hashes = _content_hashes(files)
    keys = [hash_json({files[n].name: hashes[n] for n in numbers}) for numbers in groups]
    pieces = [[files[number] for number in numbers] for numbers in groups]

    def read(numbers: list[int]) -> Iterator[tuple[int, Batch]]:
        total = sum(len(pieces[number]) for number in numbers)
        progress = CountedProgress(report, source.name, total, "files")
        done = 0
        for number in numbers:
            for file in pieces[number]:
                for batch in _batches(_read_file(file, source)):
                    yield number, batch
                done += 1
                progress.advance(done)

    return Pieces(keys, read)


def _read_file(file: SourceFile, source: Files) -> Iterator[Document | Fault]:
    if file.suffix == ".parquet":
        rows = _read_parquet(file, source)
    elif file.suffix == ".jsonl":
        rows = _read_json_lines(file, source)
    else:
        rows = _read_text(file, source)
    for row in rows:
        yield row if isinstance(row, Fault) else Document(row[0], row[1], source.name)


def _read_text(file: SourceFile, source: Files) -> Iterator[Row]:
    content = b"".join(_lines(file, source))
    try:
        yield file.name, content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield _not_utf8(file, "the file", error)


def _read_json_lines(file: SourceFile, source: Files) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, source), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            yield _not_utf8(file, f"line {number}", error)
        except (ValueError, RecursionError) as error:
            message = f"{file.path}, line {number}: not valid JSON ({error})."
            yield Fault("not_json", message)
        else:
            yield _pick(record, file, source, f"line {number}", f"{file.name}:{number}")


def _read_parquet(file: SourceFile, source: Files) -> Iterator[Row]:
    try:
        with file.filesystem.open(file.path, "rb") as handle:
            parquet = pq.ParquetFile(handle)
            columns = [c for c in (source.text_column, source.id_column) if c]
            missing = [c for c in columns if c not in parquet.schema_arrow.names]
            if missing:
                raise UserError(
                    f"{file.path} has no column {missing[0]!r}; its columns are "
                    f"{', '.join(parquet.schema_arrow.names)}. Set `text_column` or `id_column`."
                )
            number = 0
            for batch in parquet.iter_batches(BATCH_DOCUMENTS, columns=columns):
                for record in _records(batch):
                    number += 1
                    where = f"row {number}"
                    if isinstance(record, UnicodeDecodeError):
                        yield _not_utf8(file, where, record)
                    else:
                        yield _pick(record, file, source, where, f"{file.name}:{number}")
    except pa.ArrowInvalid as error:
        raise UserError(f"{file.path} is not a readable Parquet file ({error}).") from error


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch; in place of one whose text is not UTF-8, that fault."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for place in range(batch.num_rows):
            try:
                yield batch.slice(place, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


def _pick(record: Any, file: SourceFile, source: Files, where: str, default_id: str) -> Row:
    if not isinstance(record, dict) or not isinstance(record.get(source.text_column), str):
        found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        return Fault(
            "no_text",
            f"{file.path}, {where}: no text under the key {source.text_column!r} (found: {found}). "
            "Set `text_column` to the key that holds the text.",
        )
    if source.id_column is None:
        return default_id, record[source.text_column]
    if record.get(source.id_column) is None:
        message = f"{file.path}, {where}: no id under the key {source.id_column!r}."
        return Fault("no_id", message)
    return str(record[source.id_column]), record[source.text_column]


def _lines(file: SourceFile, source: Files) -> Iterator[bytes]:
    """The file's lines, unpacked.

    Raises:
        UserError: the compressed data are damaged or cut off, or unpack to far too much.
    """
    bound = max(BOMB_BYTES, source.maximum_expansion * (file.filesystem.size(file.path) or 0))
    unpacked = 0
    with file.filesystem.open(file.path, "rb") as handle:
        try:
            lines = unpack(handle, file.compression)
            while line := lines.readline(int(bound) + 1):
                unpacked += len(line)
                if file.compression and unpacked > bound:
                    raise UserError(
                        f"{file.path} unpacks to more than {bound / 1e6:,.0f} MB, over "
                        f"{source.maximum_expansion:g} times its size. If it is meant to, raise "
                        "`maximum_expansion` of the source."
                    )
                yield line
        except (EOFError, OSError, pa.ArrowInvalid) as error:
            raise _corrupt(file, error) from error


def _not_utf8(file: SourceFile, where: str, error: UnicodeDecodeError) -> Fault:
    return Fault(
        "not_utf8",
        f"{file.path}: {where} is not UTF-8 (byte 0x{error.object[error.start]:02x} at position "
        f"{error.start}). Convert it, for example with: iconv -f LATIN1 -t UTF-8",
    )


def _corrupt(file: SourceFile, error: Exception) -> UserError:
    return UserError(
        f"{file.path} is damaged: its {file.compression or 'content'} cannot be read ({error}). "
        "Fetch the file again, or take it out of the source."
    )


def _batches(documents: Iterator[Document | Fault]) -> Iterator[Batch]:
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        yield batch


def _content_hashes(files: list[SourceFile]) -> list[str]:
    """A hash of each file's content; in the cloud, the object's own checksum."""
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        return list(threads.map(_content_hash, files))


def _content_hash(file: SourceFile) -> str:
    if not isinstance(file.filesystem, LocalFileSystem):
        details = file.filesystem.info(file.path)
        stated = details.get("md5Hash") or details.get("crc32c") or details.get("etag")
        return str(stated or file.filesystem.ukey(file.path))
    with open(file.path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
