"""Reads a Hugging Face dataset: of the Hub, its copy in the Hub's cache, or a folder anywhere."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from artifacts.errors import HUB_ADVICE, UserError, first_line
from artifacts.storage import files
from artifacts.storage.transfer import download_folder, remote_entries, stated_checksum
from artifacts.store.identity import hash_json
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.opened import OpenedSource, single_chunk
from spark_jobs.read.records import as_document
from spark_jobs.read.settings import HuggingFaceDataset

TOLD_DOCUMENTS = 1_000
"""Progress is reported whenever so many more were read."""


def fingerprint_dataset(source: HuggingFaceDataset) -> str:
    """A hash of a folder's files, or the dataset's revision on the Hub, offline in its cache."""
    if not files.is_local(source.dataset):
        filesystem, path = files.resolve(source.dataset)
        revision = {
            name: stated_checksum(filesystem, f"{path}/{name}", about)
            for name, about in files.describe(source.dataset).items()
        }
        if not revision:
            raise UserError(
                f"Source {source.name!r}: there is no file in {source.dataset}. Give the "
                "folder that `save_to_disk` has written, or one with the dataset's files."
            )
        return hash_json(revision)[:32]
    if folder := _folder(source):
        digest = hashlib.sha256()
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            # Names too, since the library tells splits by them.
            digest.update(file.relative_to(folder).as_posix().encode())
            with file.open("rb") as handle:
                hashlib.file_digest(handle, lambda: digest)
        return digest.hexdigest()[:32]
    if cached := _cached(source):
        return cached.name
    from huggingface_hub import HfApi

    with _reached(source):
        return str(HfApi().dataset_info(source.dataset, revision=source.revision).sha)


def open_dataset(source: HuggingFaceDataset, report: Callable[[str], None]) -> OpenedSource:
    """The dataset as one chunk, in its own order. Raises UserError where it cannot be reached or
    read, and from reading SourceChanged where a folder changed since it was hashed."""
    fingerprint = fingerprint_dataset(source)

    def read() -> Iterator[Document | Fault]:
        if not files.is_local(source.dataset):
            with tempfile.TemporaryDirectory() as folder:
                entries = remote_entries(source.dataset)
                download_folder(source.dataset, entries, Path(folder), report)
                # Before reading: unlike a folder, the copy cannot change any more.
                _need_unchanged(source, fingerprint)
                yield from _read(source, report, folder)
        elif own := _folder(source):
            yield from _read(source, report, str(own))
            _need_unchanged(source, fingerprint)
        else:
            # A branch may have moved since: what is read is the revision of the fingerprint.
            yield from _read(source.model_copy(update={"revision": fingerprint}), report)

    chunks = single_chunk(fingerprint, read)
    return OpenedSource(
        {source.name: fingerprint}, lambda: chunks, libraries=frozenset({"datasets"})
    )


def _folder(source: HuggingFaceDataset) -> Path | None:
    """The folder of this machine that a dataset is; None where it is in a bucket or of the Hub."""
    if not files.is_local(source.dataset):
        return None
    folder = Path(source.dataset).expanduser()
    return folder if folder.is_dir() else None


def _need_unchanged(source: HuggingFaceDataset, fingerprint: str) -> None:
    if fingerprint_dataset(source) != fingerprint:
        raise SourceChanged(f"{source.dataset} changed while it was read")


def _read(
    source: HuggingFaceDataset, report: Callable[[str], None], folder: str | None = None
) -> Iterator[Document | Fault]:
    # Most rows are fetched only when they are asked for.
    with _reached(source):
        rows = _load(source, folder)
        columns = list(rows.column_names or [])
        for column in source.columns:
            if columns and column not in columns:
                raise UserError(
                    f"Source {source.name!r}: the dataset {source.dataset} has no column "
                    f"{column!r}; its columns are {', '.join(columns)}. Name its columns in the "
                    "source's settings."
                )
        for number, row in enumerate(rows):
            place = f"{source.dataset}, row {number}"
            yield as_document(row, source, place, f"{source.name}:{number}")
            if (number + 1) % TOLD_DOCUMENTS == 0:
                report(f"{source.name}: {number + 1:,} documents read")


def _load(source: HuggingFaceDataset, folder: str | None) -> Any:
    """The dataset's rows, of a folder or of the Hub."""
    import datasets

    datasets.disable_progress_bars()
    # `save_to_disk` of a `Dataset` writes this file, and that of a `DatasetDict` the one below.
    if folder and (Path(folder) / "state.json").exists():
        return datasets.load_from_disk(folder)
    if folder and (Path(folder) / "dataset_dict.json").exists():
        return datasets.load_from_disk(folder)[source.split]
    cached = folder or _cached(source)
    # Streaming reads each file once and keeps no second copy of the data.
    return datasets.load_dataset(
        str(cached or source.dataset),
        source.subset,
        split=source.split,
        revision=None if cached else source.revision,
        streaming=True,
    )


def _cached(source: HuggingFaceDataset) -> Path | None:
    """The dataset's folder in the Hub's cache, named by its revision; None if not offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not is_offline_mode():
        return None
    try:
        folder = snapshot_download(
            source.dataset, repo_type="dataset", revision=source.revision, local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        option = f" --revision {source.revision}" if source.revision else ""
        raise UserError(
            f"Source {source.name!r}: HF_HUB_OFFLINE is set, and the Hub's cache has no copy of "
            f"{source.dataset} (revision {source.revision or 'main'}). Get one where there is a "
            f"network: hf download --repo-type dataset {source.dataset}{option}"
        ) from error
    return Path(folder)


@contextmanager
def _reached(source: HuggingFaceDataset) -> Iterator[None]:
    """Raise UserError where within it the dataset cannot be reached or read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The Hub's, httpx', the operating system's and the formats' errors share no class.
        is_folder = not files.is_local(source.dataset) or _folder(source)
        raise UserError(
            f"Source {source.name!r}: the Hugging Face dataset {source.dataset} (subset "
            f"{source.subset}, split {source.split}) cannot be read ({first_line(error)})."
            f"{'' if is_folder else f' {HUB_ADVICE}'}"
        ) from error
