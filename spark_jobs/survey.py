"""A first look at the clean corpus: sizes, a sample for the parity check, the held-out runs."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.shards import Split
from spark_jobs.overlap import join_runs, load_runs, save_runs, word_runs
from spark_jobs.parquet import Part
from spark_jobs.progress import Report
from spark_jobs.settings import TokenizedShardsSettings
from spark_jobs.split import Splitter
from spark_jobs.tasks import map_tasks

SAMPLE_PARTS = 4
SAMPLE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Survey:
    """What is known of the clean corpus before the long work."""

    documents: Counter[Split]
    bytes: Counter[Split]
    sources: set[str]
    source_bytes: Counter[str]
    """Bytes of training text by source."""
    sample: list[str]
    """Texts, the same ones for the same corpus."""
    pinned: int
    """Documents that an earlier held-out set has pinned."""
    splitter: Splitter


def survey_parts(parts: list[Part], settings: TokenizedShardsSettings) -> Survey:
    """Read the corpus's small columns, and a few of its texts."""
    tables = [part.read(["cluster", "source", "bytes", "pinned"]) for part in parts]
    table = pa.concat_tables(tables) if tables else None
    documents: Counter[Split] = Counter()
    sizes: Counter[Split] = Counter()
    source_bytes: Counter[str] = Counter()
    pinned = int(np.sum(table["pinned"].to_numpy())) if table else 0
    splitter = Splitter(settings.split, pinned > 0, frozenset(settings.replay))
    if table:
        columns = (table["source"].to_pylist(), table["bytes"].to_pylist())
        for split, source, size in zip(splitter.splits(table), *columns, strict=True):
            documents[split] += 1
            sizes[split] += size
            if split == "train":
                source_bytes[source] += size
    sources = set(table["source"].unique().to_pylist()) if table else set()
    smallest = [min(t["cluster"].to_pylist(), default="") for t in tables]
    sample = _sample(parts, smallest, settings.parity_sample)
    return Survey(documents, sizes, sources, source_bytes, sample, pinned, splitter)


def _sample(parts: list[Part], smallest: list[str], count: int) -> list[str]:
    """Texts from a few parts, both chosen by cluster ids, which are uniform hashes."""
    chosen = sorted(range(len(parts)), key=smallest.__getitem__)[:SAMPLE_PARTS]
    sample: list[str] = []
    for number in chosen:
        table = parts[number].read(["cluster", "text"]).sort_by("cluster")
        sample += table["text"][: -(-count // len(chosen))].to_pylist()
    sample = sample[:count]
    while len(sample) > 1 and sum(map(len, sample)) > SAMPLE_CHARACTERS:
        sample.pop()
    return sample


@dataclass(frozen=True)
class TextPass:
    """What one pass over all texts has found."""

    digests: list[str]
    """A hash of each part's texts, which names what is kept of them."""
    runs: str | None
    """Where the word runs of the texts that judge are kept (`spark_jobs.overlap`)."""


def pass_over_texts(
    spark: SparkSession,
    parts: list[Part],
    splitter: Splitter,
    words: int | None,
    folder: str,
    report: Report,
    judging: str | None,
) -> TextPass:
    """Hash every part's texts, and keep the word runs of the held-out ones.

    Args:
        words: in a run; None keeps none.
        folder: where runs are kept.
        judging: runs of other texts that judge, to be kept with them.
    """
    work = partial(_look_at_part, splitter=splitter, words=words, folder=folder)
    records = map_tasks(spark, "reading held-out texts", list(enumerate(parts)), work, report)
    runs = None
    if words:
        found = [record["runs"] for record in records] + ([judging] if judging else [])
        runs = f"{folder}/runs.npz"
        save_runs(runs, join_runs(map(load_runs, found)))
    return TextPass([record["digest"] for record in records], runs)


def _look_at_part(
    numbered: tuple[int, Part], splitter: Splitter, words: int | None, folder: str
) -> dict[str, Any]:
    number, part = numbered
    table = part.read(["cluster", "pinned", "source", "text"])
    record = {"digest": _digest(table["text"])}
    if words:
        held_out = pa.array([split == "held_out" for split in splitter.splits(table)], pa.bool_())
        record["runs"] = f"{folder}/runs-{number:05d}.npz"
        save_runs(record["runs"], word_runs(table["text"].filter(held_out).to_pylist(), words))
    return record


def _digest(texts: pa.ChunkedArray) -> str:
    """A hash of texts, however they lie in memory."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.asarray(pc.binary_length(texts)).tobytes())
    for chunk in texts.chunks:
        offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset :]
        digest.update(memoryview(chunk.buffers()[2])[offsets[0] : offsets[len(chunk)]])
    return digest.hexdigest()
