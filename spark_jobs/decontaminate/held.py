"""The n-grams of reference texts that the documents of a part hold, kept from run to run.

The reference texts of a corpus that grew are those of before, but for a few. So what is kept of a
part names the n-grams that it was compared with, and the next run looks for those alone that have
come since: a small table, in place of one that no processor's cache holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.numbers.arrays import run_starts
from spark_jobs.decontaminate.overlap import Held, Lookup, NGrams, load_ngrams
from spark_jobs.decontaminate.part_ngrams import PartNGrams, entry_key
from spark_jobs.runtime.cache import to_stream
from spark_jobs.text.shingles import Shingles

_COMPARED_WITH = b"references"
"""Of an entry: the name of the n-grams that its documents were compared with."""


@dataclass(frozen=True)
class PartHeld:
    """Finds what documents hold of reference texts, part by part."""

    ngrams: PartNGrams
    key: str
    """Key of `artifacts.cache.cache_key`, but for the part."""

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartHeld":
        """With n-grams of so many words."""
        key = cache_key(__name__, ["numpy", "pyarrow"], ngram_size=size)
        return cls(PartNGrams.of(size, folder), key)

    def remember(self, references: NGrams) -> None:
        """Keep the n-grams of reference texts, for later runs to tell which are new."""
        folder = self.ngrams.folder
        if folder and read_cached(folder, f"{self.key}-{references.name}") is None:
            content = references.lookup.ordered.tobytes()
            write_cached(folder, f"{self.key}-{references.name}", content)

    def of_documents(
        self,
        name: str,
        ids: pa.ChunkedArray,
        texts: Callable[[], pa.ChunkedArray],
        references: NGrams,
    ) -> Held:
        """What documents hold.

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
            references: those that were read from a file (`overlap.load_ngrams`) are looked for
                once; others, in every run.
        """
        ngrams = cache(lambda: self.ngrams.of_documents(name, ids, texts))
        folder = self.ngrams.folder
        if folder is None or references.name is None:
            return references.held_by(ngrams())
        key = entry_key(self.key, name)
        entry = read_cached(folder, key)
        if entry is None:
            held = references.held_by(ngrams())
        else:
            kept = pa.ipc.open_stream(entry).read_all()
            places = pc.index_in(ids, kept["id"])
            if _compared_with(kept) == references.name and not places.null_count:
                return _from_table(kept.take(places))
            held = self._compare(kept, places, ngrams, references)
        write_cached(folder, key, to_stream(_to_table(ids, held, references)))
        return held

    def _compare(
        self,
        kept: pa.Table,
        places: pa.ChunkedArray,
        ngrams: Callable[[], Shingles],
        references: NGrams,
    ) -> Held:
        """What documents hold, given what those held of earlier references that have a place."""
        change = self._change(kept, references)
        if change is None:
            return references.held_by(ngrams())
        came, left = change
        held = _from_table(kept.take(places)).without(left)
        is_new = np.asarray(places.is_null())
        if not len(came.ordered) and not is_new.any():
            return held
        of_new = np.repeat(is_new, np.diff(ngrams().offsets))
        is_held = came.find(ngrams().hashes)
        is_held[of_new] = references.lookup.find(ngrams().hashes[of_new])
        return held.joined(Held.of(ngrams(), is_held))

    def _change(self, kept: pa.Table, references: NGrams) -> tuple[Lookup, Lookup] | None:
        """The n-grams that came since, and those that left; None where it is not known."""
        assert self.ngrams.folder and references.url
        earlier = f"{self.key}-{_compared_with(kept)}"
        return _find_change(self.ngrams.folder, earlier, references.url)


@lru_cache(maxsize=2)
def _find_change(folder: str, earlier: str, references: str) -> tuple[Lookup, Lookup] | None:
    content = read_cached(folder, earlier)
    if content is None:
        return None
    now = load_ngrams(references).lookup
    both = np.sort(np.concatenate([now.ordered, np.frombuffer(content, np.uint64)]))
    starts = run_starts(both)
    changed = both[starts & np.append(starts[1:], True)]
    came = now.find(changed)
    return Lookup(changed[came]), Lookup(changed[~came])


def _compared_with(kept: pa.Table) -> str:
    name: bytes = kept.schema.metadata[_COMPARED_WITH]
    return name.decode()


def _to_table(ids: pa.ChunkedArray, held: Held, references: NGrams) -> pa.Table:
    found = pa.ListArray.from_arrays(held.found.offsets.astype(np.int32), held.found.hashes)
    table = pa.table({"id": ids, "found": found, "size": held.sizes})
    return table.replace_schema_metadata({_COMPARED_WITH: references.name})


def _from_table(table: pa.Table) -> Held:
    """What `_to_table` gave; a null is a document that holds nothing."""
    found = table["found"].combine_chunks()
    counts = pc.list_value_length(found).fill_null(0)
    sizes = table["size"].combine_chunks().fill_null(0)
    hashes = np.asarray(found.flatten())
    return Held(Shingles(hashes, np.append(0, np.cumsum(counts))), np.asarray(sizes))
