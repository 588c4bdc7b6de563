"""Overlaps of a corpus's documents with reference texts, part by part and run by run.

When a corpus grows, its reference texts stay the same but for a few. A document without an n-gram
of those few overlaps as before, so only the others are compared again.
"""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.numbers import ends_of, sorted_unique
from artifacts.shards.format import in_split
from artifacts.storage import files
from spark_jobs.decontaminate.ngrams import (
    Lookup,
    NGrams,
    load_ngrams,
    overlaps,
    pack_ngrams,
    unpack_ngrams,
)
from spark_jobs.runtime import parquet
from spark_jobs.text import Shingles


def entry_key(key: str, name: str) -> str:
    """The cache key of a result for one part (`Part.content_name`), from the result's own key."""
    return f"{key}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


_COMPARED_WITH = b"references"
"""Metadata key of an entry: the name of the n-grams that its documents were compared with."""


@dataclass(frozen=True)
class PartOverlaps:
    """Compares documents with reference texts, part by part.

    N-grams and overlaps are cached by document: for 1 GB of text that spares 20 s of one core.
    """

    size: int
    """Words in an n-gram."""
    folder: str | None
    """Of the cache."""
    ngrams_key: str
    key: str
    """Keys of `artifacts.cache.cache_key` for n-grams and for overlaps, but for the part."""

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartOverlaps":
        """Make it for n-grams of so many words."""
        ngrams_key, key = (
            cache_key(entry, __name__, ["numpy", "pyarrow"], ngram_size=size)
            for entry in ("n-grams", "overlaps")
        )
        return cls(size, folder, ngrams_key, key)

    def ngrams(
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

        packed = parquet.cached_rows(self.folder, entry_key(self.ngrams_key, name), ids, make)
        return unpack_ngrams(packed["ngrams"])

    def held_out_ngrams(self, part: parquet.Part) -> Shingles:
        """The n-grams of the part's held-out documents."""
        documents = part.read(["id", "split"])
        places = pa.array(np.flatnonzero(in_split(documents, "held_out")))
        # An entry of their own, since they are needed before all others, and are few.
        name = f"held_out {part.content_name()}"
        ids = documents["id"].take(places)
        return self.ngrams(name, ids, lambda: part.read(["text"])["text"].take(places))

    def training_ngrams(self, part: parquet.Part) -> np.ndarray:
        """The different n-grams of the part's other documents, sorted: shape (n-grams,)."""
        documents = part.read(["id", "split"])
        ngrams = self.ngrams(
            part.content_name(), documents["id"], lambda: part.read(["text"])["text"]
        )
        is_training = ~in_split(documents, "held_out")
        return sorted_unique(ngrams.hashes[np.repeat(is_training, np.diff(ngrams.offsets))])

    def remember(self, url: str) -> None:
        """Keep the n-grams at a URL, for later runs to tell which reference texts are new."""
        entry = f"{self.key}-{url.rpartition('/')[2]}"
        if self.folder and read_cached(self.folder, entry) is None:
            write_cached(self.folder, entry, files.read(url))

    def of_documents(
        self,
        name: str,
        ids: pa.ChunkedArray,
        texts: Callable[[], pa.ChunkedArray],
        references: NGrams,
    ) -> np.ndarray:
        """The overlap of each document (`ngrams.overlaps`).

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
            references: overlaps with those that were read from a file are cached; with others, they
                are computed in every run.
        """
        if self.folder is None or references.url is None:
            return overlaps(self.ngrams(name, ids, texts), references)
        key, compared_with = entry_key(self.key, name), references.url.rpartition("/")[2]
        changed = None
        if (entry := read_cached(self.folder, key)) is not None:
            earlier_overlaps = pa.ipc.open_stream(entry).read_all()
            places = pc.index_in(ids, earlier_overlaps["id"])
            earlier = earlier_overlaps.schema.metadata[_COMPARED_WITH].decode()
            if earlier == compared_with and not places.null_count:
                return np.asarray(earlier_overlaps["overlap"].take(places))
            changed = _changed_ngrams(self.folder, f"{self.key}-{earlier}", references.url)
        ngrams = self.ngrams(name, ids, texts)
        if changed is None:
            shares = overlaps(ngrams, references)
        else:
            shares = earlier_overlaps["overlap"].take(places).fill_null(0).to_numpy().copy()
            # Other documents have no n-gram of a text that came or left, and overlap as before.
            touched = np.diff(ends_of(changed.find(ngrams.hashes))[ngrams.offsets]) > 0
            is_changed = touched | np.asarray(places.is_null())
            shares[is_changed] = overlaps(ngrams.select(is_changed), references)
        table = pa.table({"id": ids, "overlap": shares})
        table = table.replace_schema_metadata({_COMPARED_WITH: compared_with})
        write_cached(self.folder, key, parquet.to_stream(table))
        return shares


@lru_cache(maxsize=2)
def _changed_ngrams(folder: str, earlier: str, references: str) -> Lookup | None:
    """The n-grams of texts that came or left since; None where the earlier ones are not known."""
    content = read_cached(folder, earlier)
    if content is None:
        return None
    references_of_both = [NGrams(**np.load(io.BytesIO(content))), load_ngrams(references)]
    keys = [ngrams.text_keys() for ngrams in references_of_both]
    different, counts = np.unique(np.concatenate(keys), return_counts=True)
    # A text that both have once is no change; one that comes repeatedly is looked at again.
    same = different[counts == 2]
    same = same[np.isin(same, keys[0]) & np.isin(same, keys[1])]
    hashes = [
        ngrams.hashes[~np.isin(of_texts, same)[ngrams.texts]]
        for ngrams, of_texts in zip(references_of_both, keys, strict=True)
    ]
    return Lookup(sorted_unique(np.concatenate(hashes)))
