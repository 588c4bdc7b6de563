"""The pinned snapshot of source text: Parquet files of `(id, text, source, …)`."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifacts.errors import UserError
from artifacts.identity import hash_json
from llm_assets.sources.bigquery import bigquery_pieces, fingerprint_bigquery
from llm_assets.sources.bigquery_settings import BigQuery
from llm_assets.sources.docstrings import find_package, fingerprint_package, package_pieces
from llm_assets.sources.faults import EXAMPLES, judge_faults
from llm_assets.sources.files import file_pieces, fingerprint_files
from llm_assets.sources.hugging_face import dataset_pieces, fingerprint_dataset
from llm_assets.sources.identifiers import number_repeated_ids
from llm_assets.sources.piece_files import PieceRecord, keep_pieces, remove_other_pieces
from llm_assets.sources.pieces import Pieces
from llm_assets.sources.settings import (
    PLACES,
    HuggingFaceDataset,
    PackageDocs,
    RawCorpusSettings,
    Source,
)

CODE_VERSION = "4"


def source_fingerprints(settings: RawCorpusSettings) -> dict[str, str]:
    """Source (for packages: `source/package`) to a hash of its content now.

    Raises:
        UserError: a package or path is not there.
    """
    fingerprints = {}
    for source in settings.sources:
        if isinstance(source, PackageDocs):
            for name in source.packages:
                fingerprints[f"{source.name}/{name}"] = fingerprint_package(find_package(name))
        elif isinstance(source, BigQuery):
            fingerprints[source.name] = fingerprint_bigquery(source)
        elif isinstance(source, HuggingFaceDataset):
            fingerprints[source.name] = fingerprint_dataset(source)
        else:
            fingerprints[source.name] = fingerprint_files(source)
    return fingerprints


def write_snapshot(
    settings: RawCorpusSettings,
    folder: Path,
    report: Callable[[str], None] = print,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Read every source and write `part-NNNNN.parquet` files; the same input gives the same bytes.

    Args:
        cache: folder that keeps what was read, piece by piece, for the next run; it decides speed,
            never the result.

    Returns:
        The manifest's stats: `documents`, `bytes` (UTF-8), `dropped` (reason to count), `sources`
        (name to documents and bytes), `licenses` (name to documents), `faults` (the first ones of
        each source, named), `repeated_ids` (ids that were given a number).

    Raises:
        UserError: a source cannot be read, or all of them together hold no document.
    """
    kept = cache or folder.with_name(f"{folder.name}.pieces")
    records: dict[str, list[PieceRecord]] = {}
    keys: set[str] = set()
    for source in settings.sources:
        pieces = _salted(_pieces(source, report), source)
        records[source.name] = keep_pieces(pieces, kept)
        keys.update(pieces.keys)
        _judge_faults(source, records[source.name])
    in_order = [kept / name for found in records.values() for one in found for name in one.files]
    files = _lay_out(in_order, folder)
    if cache:
        remove_other_pieces(cache, keys)
    else:
        shutil.rmtree(kept)
    stats = _stats(records)
    _refuse_nothing(stats)
    return stats | {"repeated_ids": number_repeated_ids(files)}


def _pieces(source: Source, report: Callable[[str], None]) -> Pieces:
    if isinstance(source, PackageDocs):
        return package_pieces(source, report)
    if isinstance(source, BigQuery):
        return bigquery_pieces(source, report)
    if isinstance(source, HuggingFaceDataset):
        return dataset_pieces(source, report)
    return file_pieces(source, report)


def _salted(pieces: Pieces, source: Source) -> Pieces:
    """The pieces under keys that hold the source's settings and this code's version, too."""
    settings = source.model_dump(mode="json", exclude=PLACES)
    salt = {"code_version": CODE_VERSION, "settings": settings}
    return Pieces([hash_json(salt | {"content": key}) for key in pieces.keys], pieces.read)


def _judge_faults(source: Source, records: list[PieceRecord]) -> None:
    share = getattr(source, "maximum_faulty_share", 0.0)
    sound = sum(record.documents + record.empty for record in records)
    judge_faults(source.name, share, sound, _sum("faults", records), _examples(records))


def _lay_out(kept: list[Path], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"part-{number:05d}.parquet" for number in range(len(kept))]
    for file, target in zip(kept, files, strict=True):
        shutil.copyfile(file, target)
    return files


def _stats(records: dict[str, list[PieceRecord]]) -> dict[str, Any]:
    of_all = [record for found in records.values() for record in found]
    dropped = Counter(empty=sum(record.empty for record in of_all)) + _sum("faults", of_all)
    return {
        "documents": sum(record.documents for record in of_all),
        "bytes": sum(record.bytes for record in of_all),
        "sources": {
            name: {
                "documents": sum(record.documents for record in found),
                "bytes": sum(record.bytes for record in found),
            }
            for name, found in records.items()
            if any(record.documents for record in found)
        },
        "licenses": dict(sorted(_sum("licenses", of_all).items())),
        "dropped": dict(dropped),
        "faults": [example for found in records.values() for example in _examples(found)],
    }


def _sum(field: str, records: list[PieceRecord]) -> Counter[str]:
    return sum((Counter(getattr(record, field)) for record in records), Counter[str]())


def _examples(records: list[PieceRecord]) -> list[str]:
    return [example for record in records for example in record.examples][:EXAMPLES]


def _refuse_nothing(stats: dict[str, Any]) -> None:
    if stats["documents"]:
        return
    empty = stats["dropped"].get("empty")
    raise UserError(
        "The raw corpus is empty: the sources hold no document with text"
        + (f" ({empty:,} were empty)." if empty else ".")
        + " Check `raw_corpus.sources`."
    )
