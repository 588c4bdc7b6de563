"""How much the documents of a part overlap with reference texts, kept from run to run.

The reference texts of a corpus that grew are those of before, but for a few. The overlap of a
document that holds no n-gram of those few is what it was: only the others are compared again.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.numbers.arrays import ends_of, sorted_unique
from artifacts.storage import files
from spark_jobs.decontaminate.overlap import Lookup, NGrams, load_ngrams, overlaps, read_ngrams
from spark_jobs.decontaminate.part_ngrams import PartNGrams, entry_key
from spark_jobs.runtime.cache import to_stream
from spark_jobs.text.shingles import Shingles

_COMPARED_WITH = b"references"
"""Of an entry: the name of the n-grams that its documents were compared with."""


@dataclass(frozen=True)
class PartOverlaps:
    """Compares documents with reference texts, part by part."""

    ngrams: PartNGrams
    key: str
    """Key of `artifacts.cache.cache_key`, but for the part."""

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartOverlaps":
        """By n-grams of so many words."""
        key = cache_key(__name__, ["numpy", "pyarrow"], ngram_size=size)
        return cls(PartNGrams.of(size, folder), key)

    def remember(self, url: str) -> None:
        """Keep the n-grams at a URL, for later runs to tell which reference texts are new."""
        folder, entry = self.ngrams.folder, f"{self.key}-{url.rpartition('/')[2]}"
        if folder and read_cached(folder, entry) is None:
            write_cached(folder, entry, files.read(url))

    def of_documents(
        self,
        name: str,
        ids: pa.ChunkedArray,
        texts: Callable[[], pa.ChunkedArray],
        references: NGrams,
    ) -> np.ndarray:
        """The overlap of each document (`overlap.overlaps`).

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
            references: those that were read from a file are compared with once; others, in every
                run.
        """
        ngrams = cache(lambda: self.ngrams.of_documents(name, ids, texts))
        folder = self.ngrams.folder
        if folder is None or references.name is None:
            return overlaps(ngrams(), references)
        key = entry_key(self.key, name)
        entry = read_cached(folder, key)
        if entry is None:
            found = overlaps(ngrams(), references)
        else:
            kept = pa.ipc.open_stream(entry).read_all()
            places = pc.index_in(ids, kept["id"])
            if _compared_with(kept) == references.name and not places.null_count:
                return np.asarray(kept["overlap"].take(places))
            found = self._compare(kept, places, ngrams(), references)
        table = pa.table({"id": ids, "overlap": found})
        table = table.replace_schema_metadata({_COMPARED_WITH: references.name})
        write_cached(folder, key, to_stream(table))
        return found

    def _compare(
        self, kept: pa.Table, places: pa.ChunkedArray, ngrams: Shingles, references: NGrams
    ) -> np.ndarray:
        """The overlaps, given what was kept of those documents that have a place."""
        assert self.ngrams.folder and references.url
        earlier = f"{self.key}-{_compared_with(kept)}"
        changed = _changed_ngrams(self.ngrams.folder, earlier, references.url)
        if changed is None:
            return overlaps(ngrams, references)
        found = kept["overlap"].take(places).fill_null(0).to_numpy().copy()
        touched = np.diff(ends_of(changed.find(ngrams.hashes))[ngrams.offsets]) > 0
        again = touched | np.asarray(places.is_null())
        found[again] = overlaps(ngrams.select(again), references)
        return found


def _compared_with(kept: pa.Table) -> str:
    name: bytes = kept.schema.metadata[_COMPARED_WITH]
    return name.decode()


@lru_cache(maxsize=2)
def _changed_ngrams(folder: str, earlier: str, references: str) -> Lookup | None:
    """The n-grams of texts that came or left since; None where the earlier ones are not known."""
    content = read_cached(folder, earlier)
    if content is None:
        return None
    both = [read_ngrams(io.BytesIO(content)), load_ngrams(references)]
    keys = [one.text_keys() for one in both]
    different, counts = np.unique(np.concatenate(keys), return_counts=True)
    # A text that both have once is no change; one that comes repeatedly is looked at again.
    same = different[counts == 2]
    same = same[np.isin(same, keys[0]) & np.isin(same, keys[1])]
    hashes = [
        one.hashes[~np.isin(of_texts, same)[one.texts]]
        for one, of_texts in zip(both, keys, strict=True)
    ]
    return Lookup(sorted_unique(np.concatenate(hashes)))
