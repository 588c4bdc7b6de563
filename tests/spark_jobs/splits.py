"""The split of a single duplicate cluster, and clean corpora written by hand."""

import numpy as np
import pyarrow as pa

from artifacts.shards.format import Split
from spark_jobs.clean.history import NAMES, by_hash
from spark_jobs.settings import SplitSettings
from spark_jobs.text import text_hash


def split_of(cluster: str, settings: SplitSettings) -> Split:
    """What is decided for a new cluster that nothing else is known of."""
    found = NAMES[int(by_hash(pa.array([cluster]), settings, np.ones(1))[0])]
    assert found
    return found


def clean_table(
    ids: list[str], texts: list[str], sources: list[str], settings: SplitSettings
) -> pa.Table:
    """A clean corpus of texts that are no copies; general text is replayed."""
    hashes = list(map(text_hash, texts))
    return pa.table(
        {
            "id": ids,
            "text": texts,
            "source": sources,
            "cluster": hashes,
            "bytes": [len(text.encode()) for text in texts],
            "text_hash": hashes,
            "split": [
                "replay" if source == "general" else split_of(one, settings)
                for one, source in zip(hashes, sources, strict=True)
            ],
            "slice": pa.array([1] * len(texts), pa.int64()),
        }
    )
