"""How much a text and texts that must not be trained on have in common, by n-grams of words.

The measure is the n-gram overlap of "Language Models are Few-Shot Learners" (Brown and others,
2020), appendix C, taken both ways: a document may be made of reference text for the most part, or
may hold nearly all of a shorter one. The hashes are those of `spark_jobs.text`. What overlaps too
much is left out, and listed.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.numbers import run_starts, spans
from artifacts.storage import files
from spark_jobs.runtime.parquet import list_files, read_table, write_table
from spark_jobs.settings import DecontaminationSettings
from spark_jobs.text import Shingles, WordSums, fold, mix, shingle, sum_words

COMMON_TEXTS = 100
"""An n-gram that more reference texts than this hold is a set phrase: it tells of none of them."""


class Lookup:
    """Different hashes, to look others up among."""

    def __init__(self, ordered: np.ndarray) -> None:
        self.ordered = ordered
        """uint64, in order."""

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Which hashes are among these: shape (hashes,)."""
        if not len(self.ordered):
            return np.zeros(len(hashes), bool)
        # Nearly all are not, which a table of their lowest bits tells without a search: 0.13 s in
        # place of 2.9 s for 2 million hashes among 8 million, 10 s in place of 230 s for 1 GB.
        table, mask = self._lowest_bits
        # All places are within the table: `clip` only spares a look at each, a third of the time.
        found = np.take(table, (hashes & mask).view(np.int64), mode="clip")
        candidates = np.flatnonzero(found)
        # In order, neighbors are looked up in memory that was just read.
        candidates = candidates[np.argsort(hashes[candidates])]
        wanted = hashes[candidates]
        found[candidates] = self.ordered[self.place(wanted)] == wanted
        return found

    def place(self, hashes: np.ndarray) -> np.ndarray:
        """Where the hashes are that are among these; anywhere for others."""
        return np.minimum(np.searchsorted(self.ordered, hashes), len(self.ordered) - 1)

    @cached_property
    def _lowest_bits(self) -> tuple[np.ndarray, np.uint64]:
        bits = max(22, len(self.ordered).bit_length() + 3)
        mask = np.uint64((1 << bits) - 1)
        table = np.zeros(1 << bits, bool)
        table[self.ordered & mask] = True
        return table, mask


@dataclass(frozen=True)
class NGrams:
    """The word n-grams of reference texts."""

    hashes: np.ndarray
    """uint64, sorted; an n-gram that stands in several texts comes once for each."""
    texts: np.ndarray
    """int64: the text of each n-gram, by number."""
    sizes: np.ndarray
    """int64: different n-grams in each text."""
    url: str | None = None
    """Where they were read from; the last part of it follows from them."""

    @property
    def name(self) -> str | None:
        """Equal for equal n-grams; None where they were not read from a file."""
        return self.url.rpartition("/")[2] if self.url else None

    @cached_property
    def lookup(self) -> Lookup:
        """Each n-gram once."""
        return Lookup(self.hashes[self._starts[:-1]])

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each different n-gram begins, and the end."""
        return np.append(np.flatnonzero(run_starts(self.hashes)), len(self.hashes))

    def text_keys(self) -> np.ndarray:
        """A hash of each text's n-grams: uint64, shape (texts,)."""
        keys = np.zeros(len(self.sizes), np.uint64)
        np.add.at(keys, self.texts, mix(self.hashes))
        return keys

    @property
    def is_set_phrase(self) -> np.ndarray:
        """Shape (n-grams,): whether more texts than `COMMON_TEXTS` have the n-gram."""
        times = np.diff(self._starts)
        return np.repeat(times > COMMON_TEXTS, times)

    def overlap(self, shingles: Shingles) -> np.ndarray:
        """The larger of both shares, for each document."""
        held = self.lookup.find(shingles.hashes)
        document, text, common = self._common(shingles, held)
        covered = np.zeros(len(shingles.offsets) - 1)
        np.maximum.at(covered, document, common / self.sizes[text])
        return np.maximum(_share(shingles, held), covered)

    def common(self, shingles: Shingles) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs of a document and a text of which it holds n-grams, and how many different ones.

        Set phrases count for none: arrays of shape (pairs,), in the order of the documents.
        """
        return self._common(shingles, self.lookup.find(shingles.hashes))

    def _common(
        self, shingles: Shingles, held: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        hashes, documents = _each_once(shingles.hashes[held], _owners(shingles)[held])
        place = self.lookup.place(hashes)
        first = self._starts[place]
        counts = self._starts[place + 1] - first
        counts[counts > COMMON_TEXTS] = 0
        texts = self.texts[spans(first, counts)]
        codes = np.repeat(documents, counts) * len(self.sizes) + texts
        codes, common = np.unique(codes, return_counts=True)
        return codes // len(self.sizes), codes % len(self.sizes), common


def ngrams_of(texts: WordSums, size: int) -> Shingles:
    """The hashes of all n-grams of texts; a text of fewer words has none."""
    shingles = shingle(texts, size)
    is_long = texts.sizes >= size
    counts = np.where(is_long, np.diff(shingles.offsets), 0)
    if is_long.all():
        return shingles
    hashes = shingles.hashes[np.repeat(is_long, np.diff(shingles.offsets))]
    return Shingles(hashes, np.concatenate([[0], np.cumsum(counts)]))


def text_ngrams(texts: list[str], size: int) -> NGrams:
    """The n-grams of reference texts; shorter texts give none."""
    return group_ngrams(ngrams_of(sum_words(list(map(fold, texts))), size))


def group_ngrams(ngrams: Shingles) -> NGrams:
    """The n-grams of reference texts, from those of each text (`ngrams_of`)."""
    hashes, owners = _each_once(ngrams.hashes, _owners(ngrams))
    return NGrams(hashes, owners, np.bincount(owners, minlength=len(ngrams.offsets) - 1))


def _share(shingles: Shingles, held: np.ndarray) -> np.ndarray:
    """Of each document's n-grams, the share that stands in any reference text."""
    return np.add.reduceat(held.astype(np.int64), shingles.offsets[:-1]) / np.diff(shingles.offsets)


def _owners(shingles: Shingles) -> np.ndarray:
    """The number of the text that each shingle belongs to."""
    return np.repeat(np.arange(len(shingles.offsets) - 1), np.diff(shingles.offsets))


def _each_once(hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different pairs, ordered by hash."""
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    new = run_starts(hashes) | run_starts(owners)
    return hashes[new], owners[new]


def join_ngrams(groups: Iterable[NGrams]) -> NGrams:
    """The n-grams of several groups of texts as those of one."""
    groups = list(groups)
    firsts = np.cumsum([0, *(len(one.sizes) for one in groups)])
    hashes = np.concatenate([one.hashes for one in groups])
    texts = np.concatenate([one.texts + first for one, first in zip(groups, firsts, strict=False)])
    order = np.argsort(hashes, kind="stable")
    return NGrams(hashes[order], texts[order], np.concatenate([one.sizes for one in groups]))


def overlaps(ngrams: Shingles, references: NGrams) -> np.ndarray:
    """How much each text has in common with the reference texts, from 0 to 1.

    The larger of two shares: of the text's n-grams that stand in reference texts, and of one
    reference text's that stand in it. Texts without n-grams have 0.

    Args:
        ngrams: of `ngrams_of`.
    """
    found = np.zeros(len(ngrams.offsets) - 1)
    has_some = np.diff(ngrams.offsets) > 0
    if len(references.hashes) and has_some.any():
        offsets = np.append(ngrams.offsets[:-1][has_some], ngrams.offsets[-1])
        found[has_some] = references.overlap(Shingles(ngrams.hashes, offsets))
    return found


def save_ngrams(folder: str, ngrams: NGrams) -> str:
    """Write n-grams where tasks find them, under a name that follows from them; gives the URL."""
    content = io.BytesIO()
    np.savez(content, hashes=ngrams.hashes, texts=ngrams.texts, sizes=ngrams.sizes)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    url = f"{folder}/ngrams-{digest[:32]}.npz"
    files.write(url, content.getvalue(), sync=False)
    return url


@lru_cache(maxsize=2)
def load_ngrams(url: str) -> NGrams:
    """N-grams that were written; a worker reads them once."""
    return read_ngrams(io.BytesIO(files.read(url)), url)


def read_ngrams(content: io.BytesIO, url: str | None = None) -> NGrams:
    """N-grams from what `save_ngrams` wrote."""
    with np.load(content) as arrays:
        return NGrams(arrays["hashes"], arrays["texts"], arrays["sizes"], url)


def pack_ngrams(texts: list[str], size: int) -> pa.Array:
    """The hashes of each text's n-grams as one binary value."""
    found = ngrams_of(sum_words(list(map(fold, texts))), size)
    offsets = pa.py_buffer((found.offsets * found.hashes.itemsize).astype(np.int32))
    content = pa.py_buffer(np.ascontiguousarray(found.hashes))
    return pa.Array.from_buffers(pa.binary(), len(texts), [None, offsets, content])


def unpack_ngrams(packed: pa.ChunkedArray) -> Shingles:
    """What `pack_ngrams` packed."""
    column = packed.combine_chunks()
    column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
    content = np.frombuffer(column.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    hashes = content.view(np.uint64)
    return Shingles(hashes, (offsets - offsets[0]) // hashes.itemsize)


def save_evaluation_ngrams(
    urls: list[str], folder: str, settings: DecontaminationSettings
) -> str | None:
    """Write the n-grams of evaluation texts where tasks find them (`overlap.save_ngrams`).

    Returns:
        Where they are, or None where there are no evaluation texts.

    Raises:
        UserError: a file is absent or not of the form that its ending says.
    """
    if not urls:
        return None
    texts = [text for url in urls for text in read_texts(url)]
    return save_ngrams(folder, text_ngrams(texts, settings.ngram_size))


def read_texts(url: str) -> list[str]:
    """The texts of a `.txt` file (one) or a `.jsonl` file (one a line, under `text`)."""
    try:
        content = files.read(url).decode()
        if not url.endswith(".jsonl"):
            return [content]
        return [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise UserError(f"The evaluation text {url} does not exist.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The evaluation text {url} is not JSON lines with a `text` each, in UTF-8 ({error})."
        ) from error


DOCUMENTS_PER_LIST = 20_000_000
"""Of the corpus; of the default one, 1.3 % are left out."""

LISTED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("cluster", pa.string()),
        ("bytes", pa.int64()),
        ("split", pa.string()),
        ("overlap", pa.float64()),
    ]
)
"""A document that is left out, and the share of it that is reference text."""


def write_list(number: int, removed: pa.Table, folder: str) -> dict[str, int]:
    """Write documents as `overlaps_held_out-NNNNN.parquet` beside the shards, by id.

    Returns:
        The split that they were of, to how many.
    """
    listed = removed.sort_by("id")
    write_table(f"{folder}/overlaps_held_out-{number:05d}.parquet", listed)
    return dict(Counter(listed["split"].to_pylist()))


def find_overlap(folder: str, identifier: str) -> float | None:
    """The share of a document that is reference text, where it was left out for that."""
    for url in list_files(folder, "overlaps_held_out*.parquet"):
        removed = read_table(url, ["id", "overlap"])
        row = pc.index(removed["id"], pa.scalar(identifier)).as_py()
        if row >= 0:
            return float(removed["overlap"][row].as_py())
    return None
