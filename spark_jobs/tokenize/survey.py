"""A first look at the clean corpus: sizes, and a sample for the parity check."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.shard_set import Split, in_split, token_dtype
from spark_jobs.runtime.parquet import READERS, Part
from spark_jobs.settings import TokenizedShardsSettings

SAMPLE_PARTS = 4
SAMPLE_CHARACTERS = 1_000_000

BYTES_PER_TOKEN = 4
"""Rough length of a token in text, which only decides into how many shards a split is cut."""


@dataclass(frozen=True)
class Survey:
    """What is known of the clean corpus before the long work."""

    documents: Counter[Split]
    bytes: Counter[Split]
    sources: set[str]
    source_bytes: Counter[str]
    """Bytes of training text by source."""
    held_out: list[list[str]]
    """Of each part, the ids of the documents that are held out."""
    sample: list[str]
    """Texts, the same ones for the same corpus."""


def survey_parts(parts: list[Part], settings: TokenizedShardsSettings) -> Survey:
    """Read the corpus's small columns, and a few of its texts."""
    with ThreadPoolExecutor(READERS) as readers:
        columns = ["id", "cluster", "source", "bytes", "split"]
        tables = list(readers.map(lambda part: part.read(columns), parts))
    table = pa.concat_tables(tables)
    documents: Counter[Split] = Counter()
    sizes: Counter[Split] = Counter()
    source_bytes: Counter[str] = Counter()
    groups = table.group_by(["split", "source"])
    for group in groups.aggregate([("bytes", "sum"), ("bytes", "count")]).to_pylist():
        documents[group["split"]] += group["bytes_count"]
        sizes[group["split"]] += group["bytes_sum"]
        if group["split"] == "train":
            source_bytes[group["source"]] += group["bytes_sum"]
    return Survey(
        documents=documents,
        bytes=sizes,
        sources=set(table["source"].unique().to_pylist()),
        source_bytes=source_bytes,
        held_out=_held_out_ids(table, parts),
        sample=_sample(parts, [pc.min(t["cluster"]).as_py() for t in tables], settings),
    )


def _held_out_ids(documents: pa.Table, parts: list[Part]) -> list[list[str]]:
    """Of each part, the ids of its held-out documents."""
    held_out = np.flatnonzero(in_split(documents, "held_out"))
    ids = documents["id"].take(pa.array(held_out)).to_pylist()
    ends = np.cumsum([0, *(part.rows for part in parts)])
    return [ids[first:last] for first, last in pairwise(np.searchsorted(held_out, ends).tolist())]


def _sample(parts: list[Part], smallest: list[str], settings: TokenizedShardsSettings) -> list[str]:
    """Texts from a few parts, both chosen by cluster ids, which are uniform hashes."""
    count = settings.parity_sample
    chosen = sorted(range(len(parts)), key=smallest.__getitem__)[:SAMPLE_PARTS]
    sample: list[str] = []
    for number in chosen:
        table = parts[number].read(["cluster", "text"]).sort_by("cluster")
        sample += table["text"][: -(-count // len(chosen))].to_pylist()
    sample = sample[:count]
    while len(sample) > 1 and sum(map(len, sample)) > SAMPLE_CHARACTERS:
        sample.pop()
    return sample


def count_shards(survey: Survey, vocab_size: int, shard_bytes: int) -> dict[Split, int]:
    """Shards of each split, from the size of its text."""
    token_bytes = 2 if token_dtype(vocab_size) == "uint16" else 4
    return {
        split: max(1, round(size / BYTES_PER_TOKEN * token_bytes / shard_bytes))
        for split, size in survey.bytes.items()
    }
