"""The n-grams of the documents of a clean corpus, part by part."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from artifacts.cache import cache_key
from artifacts.numbers.arrays import sorted_unique
from artifacts.shards.format import in_split
from spark_jobs.decontaminate.overlap import pack_ngrams, unpack_ngrams
from spark_jobs.runtime.cache import cached_rows
from spark_jobs.runtime.parquet import Part
from spark_jobs.text.shingles import Shingles


def entry_key(key: str, name: str) -> str:
    """The cache's key of what was made of a part (`Part.content_name`), from that of its making."""
    return f"{key}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


@dataclass(frozen=True)
class PartNGrams:
    """Reads n-grams, cached by document: for 1 GB of text that spares 20 s of one core."""

    size: int
    """Words in an n-gram."""
    folder: str | None
    """Of the cache."""
    key: str
    """Key of `artifacts.cache.cache_key`, but for the part."""

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartNGrams":
        """N-grams of so many words."""
        return cls(size, folder, cache_key(__name__, ["numpy", "pyarrow"], ngram_size=size))

    def of_documents(
        self, name: str, ids: pa.ChunkedArray, texts: Callable[[], pa.ChunkedArray]
    ) -> Shingles:
        """The n-grams of documents.

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
        """

        def make(places: np.ndarray) -> pa.Table:
            chosen = texts().take(pa.array(places)).to_pylist()
            return pa.table({"ngrams": pack_ngrams(chosen, self.size)})

        found = cached_rows(self.folder, entry_key(self.key, name), ids, make)
        return unpack_ngrams(found["ngrams"])

    def of_held_out(self, part: Part) -> Shingles:
        """The n-grams of the part's held-out documents."""
        documents = part.read(["id", "split"])
        places = pa.array(np.flatnonzero(in_split(documents, "held_out")))
        # An entry of their own, since they are needed before all others, and are few.
        name = f"held_out {part.content_name()}"
        ids = documents["id"].take(places)
        return self.of_documents(name, ids, lambda: part.read(["text"])["text"].take(places))

    def of_training(self, part: Part) -> np.ndarray:
        """The different n-grams of the part's other documents, sorted: shape (n-grams,)."""
        documents = part.read(["id", "split"])
        found = self.of_documents(
            part.content_name(), documents["id"], lambda: part.read(["text"])["text"]
        )
        is_training = ~in_split(documents, "held_out")
        return sorted_unique(found.hashes[np.repeat(is_training, np.diff(found.offsets))])
