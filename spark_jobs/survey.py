"""A first look at the clean corpus: sizes, a sample for the parity check, the held-out texts."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.shards import SPLITS, Split
from spark_jobs.decisions import CLEAN_SCHEMA
from spark_jobs.overlap import load_runs, save_runs, word_runs
from spark_jobs.parquet import Part, write_table
from spark_jobs.progress import Report
from spark_jobs.settings import TokenizedShardsSettings
from spark_jobs.split import Splitter, threshold
from spark_jobs.tasks import map_tasks

SAMPLE_CHARACTERS = 2_000_000
_SPARE = 3
"""Tasks offer this many times the wanted sample, so that chance leaves enough."""


@dataclass(frozen=True)
class Survey:
    """What is known of the clean corpus before the long work."""

    documents: dict[Split, int]
    bytes: dict[Split, int]
    source_bytes: dict[str, int]
    """Bytes of training text by source."""
    sample: list[str]
    """Texts, the same ones for the same corpus."""
    pinned: int
    """Documents that an earlier held-out set has pinned."""
    text_digests: list[str]
    """A hash of each part's texts."""
    runs: str
    """Where the word runs of the held-out texts are kept (`spark_jobs.overlap`)."""


def survey_parts(
    spark: SparkSession,
    parts: list[Part],
    output: str,
    scratch: str,
    settings: TokenizedShardsSettings,
    report: Report,
) -> Survey:
    """Read the corpus once; write the held-out texts to `output`/held_out, as clean parts.

    They make the shards a pin by themselves: a later corpus finds in them what to keep held out.
    """
    documents = sum(part.rows for part in parts)
    # Cluster ids are uniform hashes, so those below a bound are a fixed random sample.
    bound = threshold(min(1.0, _SPARE * settings.parity_sample / max(1, documents)))
    # Pinned documents are never dropped and come last.
    pinned = any(parts[-1].read(["pinned"])["pinned"].to_pylist()) if parts else False
    work = partial(
        _survey_part,
        splitter=Splitter(settings.split, pinned),
        bound=bound,
        output=output,
        scratch=scratch,
        run_words=settings.decontamination.run_words,
    )
    records = map_tasks(spark, "surveying the clean corpus", list(enumerate(parts)), work, report)
    candidates = sorted(tuple(item) for record in records for item in record["sample"])
    sample: list[str] = []
    for _, _, text in candidates[: settings.parity_sample]:
        sample.append(text)
        if sum(map(len, sample)) > SAMPLE_CHARACTERS:
            break
    runs = f"{scratch}/runs.npy"
    found = [load_runs(record["runs"]) for record in records if record["runs"]]
    save_runs(runs, np.unique(np.concatenate([np.empty(0, np.uint64), *found])))
    source_bytes: Counter[str] = Counter()
    for record in records:
        source_bytes.update(record["source_bytes"])
    return Survey(
        documents={
            split: sum(record["documents"][split] for record in records) for split in SPLITS
        },
        bytes={split: sum(record["bytes"][split] for record in records) for split in SPLITS},
        source_bytes=dict(source_bytes),
        sample=sample,
        pinned=sum(record["pinned"] for record in records),
        text_digests=[record["text_digest"] for record in records],
        runs=runs,
    )


def _survey_part(
    numbered: tuple[int, Part],
    splitter: Splitter,
    bound: str,
    output: str,
    scratch: str,
    run_words: int,
) -> dict[str, Any]:
    number, part = numbered
    table = part.read(CLEAN_SCHEMA.names)
    splits = splitter.splits(table)
    sizes = table["bytes"].to_pylist()
    documents: Counter[str] = Counter(splits)
    size_of: Counter[str] = Counter()
    source_bytes: Counter[str] = Counter()
    for split, source, size in zip(splits, table["source"].to_pylist(), sizes, strict=True):
        size_of[split] += size
        if split == "train":
            source_bytes[source] += size
    clusters = table["cluster"].to_pylist()
    chosen = [row for row, cluster in enumerate(clusters) if cluster < bound]
    sample = table.take(pa.array(chosen, pa.int64())).to_pylist()
    held_out = table.take(
        pa.array([row for row, split in enumerate(splits) if split == "held_out"], pa.int64())
    )
    runs = None
    if held_out.num_rows:
        write_table(f"{output}/held_out/part-{number:05d}.parquet", held_out)
        runs = f"{scratch}/runs-{number:05d}.npy"
        save_runs(runs, word_runs(held_out["text"].to_pylist(), run_words))
    return {
        "documents": {split: documents[split] for split in SPLITS},
        "bytes": {split: size_of[split] for split in SPLITS},
        "source_bytes": source_bytes,
        "sample": [(row["cluster"], row["id"], row["text"]) for row in sample],
        "pinned": sum(table["pinned"].to_pylist()),
        "text_digest": _digest(table["text"].to_pylist()),
        "runs": runs,
    }


def _digest(texts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(hashlib.blake2b(text.encode(), digest_size=16).digest())
    return digest.hexdigest()
