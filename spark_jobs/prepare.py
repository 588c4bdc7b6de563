"""The first pass over raw text: normalise, judge each document by itself, sign it.

What it makes of a part depends on the part's rows and the settings alone, so it is kept under that
name and found again when the corpus has grown elsewhere.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from spark_jobs.kept import name_kept
from spark_jobs.minhash import Bands, band_keys, derive_bands, shingle, signatures, sum_words
from spark_jobs.overlap import load_runs, overlaps
from spark_jobs.parquet import Part, write_table
from spark_jobs.quality import personal_data_mask, quality_filter
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.text import cluster_hash, fold, normalise, repair_encoding

CODE_VERSION = "3"
"""Part of the name of what is kept; raise it when this module gives another result."""

RAW_COLUMNS = ["id", "text", "source"]


def prepared_schema(bands: Bands | None) -> pa.Schema:
    """Columns of a prepared part; without near-duplicate search the last two are left out."""
    fields = [
        ("id", pa.string()),
        ("text", pa.string()),
        ("source", pa.string()),
        ("cluster", pa.string()),
        ("characters", pa.int64()),
        ("bytes", pa.int64()),
        ("reason", pa.string()),
        ("repaired", pa.bool_()),
    ]
    if bands:
        fields += [
            ("bands", pa.binary(8 * bands.bands)),
            ("signature", pa.binary(bands.permutations)),
        ]
    return pa.schema(fields)


def bands_of(settings: CleanCorpusSettings) -> Bands | None:
    """How signatures are cut, or None where near-duplicates are not looked for."""
    if not settings.near_duplicates.enabled:
        return None
    return derive_bands(settings.near_duplicates.threshold, settings.near_duplicates.permutations)


def name_prepared(folder: str, part: Part, settings: CleanCorpusSettings, runs: str | None) -> str:
    """Where the part's prepared rows are kept; the arguments are those of `prepare_part`."""
    return name_kept(
        folder,
        "parquet",
        code_version=CODE_VERSION,
        settings=settings.preparation(),
        evaluation=runs.rpartition("/")[2] if runs else None,
        raw=part.name(RAW_COLUMNS),
    )


def prepare_part(
    part: tuple[Part, str], settings: CleanCorpusSettings, runs: str | None
) -> dict[str, Any]:
    """Prepare one part.

    Args:
        part: and where its prepared rows are to be kept.
        runs: URL of the evaluation texts' word runs, named by their content (`spark_jobs.overlap`).
    """
    raw, url = part
    bands = bands_of(settings)
    # Read again soon and by few: quick to pack and unpack counts for more than small.
    compression = dict.fromkeys(prepared_schema(bands).names, "lz4")
    for column in ("cluster", "bands", "signature"):
        if column in compression:
            compression[column] = "none"
    prepared = _prepare(raw.read(RAW_COLUMNS), settings, bands, runs)
    write_table(url, prepared, compression)
    return {}


def _prepare(
    raw: pa.Table, settings: CleanCorpusSettings, bands: Bands | None, runs: str | None
) -> pa.Table:
    texts, repaired = _tidy([text or "" for text in raw["text"].to_pylist()], settings)
    reasons = [_length_fault(text, settings) for text in texts]
    for name in settings.quality_filters:
        judge = quality_filter(name)
        reasons = [r or judge(text) for r, text in zip(reasons, texts, strict=True)]
    folded = ["" if reason else fold(text) for text, reason in zip(texts, reasons, strict=True)]
    words = sum_words(folded)
    if runs:
        limits = settings.decontamination
        overlap = overlaps(words, limits.run_words, load_runs(runs)) > limits.maximum_overlap
        for number in np.flatnonzero(overlap):
            reasons[number] = "overlaps_evaluation"
    columns = {
        "id": raw["id"],
        "text": texts,
        "source": raw["source"],
        "cluster": [cluster_hash(text, settings.split_seed) for text in folded],
        "characters": [len(text) for text in texts],
        "bytes": [len(text.encode()) for text in texts],
        "reason": reasons,
        "repaired": repaired,
    }
    if bands:
        shingles = shingle(words, settings.near_duplicates.shingle_words)
        signature = signatures(shingles, bands.permutations)
        columns["bands"] = _fixed_binary(band_keys(signature, bands))
        # The lowest byte of each hash will do to rule a pair out (Li and König, "b-Bit Minwise
        # Hashing", 2010): one of 256 others agrees by chance, so that a few pairs too many are
        # compared, and none too few.
        columns["signature"] = _fixed_binary(signature.astype(np.uint8))
    return pa.table(columns, prepared_schema(bands))


def _tidy(raw: list[str], settings: CleanCorpusSettings) -> tuple[list[str], list[bool]]:
    """The texts repaired, normalised and masked, and which were in need of repair."""
    texts = list(map(repair_encoding, raw)) if settings.repair_encodings else raw
    repaired = [text is not original for text, original in zip(texts, raw, strict=True)]
    texts = [normalise(text, settings.unicode_form) for text in texts]
    if settings.mask_personal_data:
        texts = list(map(personal_data_mask(), texts))
    return texts, repaired


def _fixed_binary(rows: np.ndarray) -> pa.Array:
    """A matrix as one fixed-size binary value a row."""
    content = np.ascontiguousarray(rows)
    width = content.dtype.itemsize * content.shape[1]
    return pa.Array.from_buffers(pa.binary(width), len(content), [None, pa.py_buffer(content)])


def _length_fault(text: str, settings: CleanCorpusSettings) -> str | None:
    if not text:
        return "empty"
    if len(text) < settings.minimum_characters:
        return "too_short"
    if len(text) > settings.maximum_characters:
        return "too_long"
    return None
