"""An index of one shard: where a stretch of tokens occurs in it, and which documents hold a token.

Two tables, built from the shard alone and mapped into memory:

- grams: of every third run of six tokens in each segment a hash and its place, ordered by hash. A
  stretch of `SHORTEST` tokens or more that stands in one segment holds at least one such run, so it
  is found, and the tokens themselves say how far it goes: document fingerprints by a fixed stride,
  see Schleimer, Wilkerson and Aiken, "Winnowing" (2003). OLMoTrace (Liu and others, 2025) finds
  them through the suffix arrays of infini-gram (Liu and others, 2024), at 7 bytes per token; here
  it is 2.7, for which shorter stretches are not looked for. A directory says where the hashes that
  begin alike stand, so a look-up touches one page of the file.
- postings: which documents hold a token, and how often, for BM25.

A wrong bit in the index can hide a stretch; it cannot invent one.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.errors import DamagedArtifact
from artifacts.numbers import GOLDEN, ends_of, lower_bounds, run_starts, spans
from artifacts.shards.shard_set import Shard

GRAM = 6
STRIDE = 3
SHORTEST = GRAM + STRIDE - 1
"""Tokens of the shortest stretch that is certain to be found."""
MOST_PLACES = 20_000
"""Places of one gram that are looked at; what occurs more often is nobody's in particular."""
_IN_BUCKET = 64
"""Grams of a bucket of the directory, about."""
_HEADER = 8
"""Numbers of eight bytes before the tables."""
_MAGIC = 0x32305350414E5358
"""The file's first eight bytes: `XSNAPS02`."""


def build_index(shard: Shard, texts: np.ndarray, vocab_size: int) -> bytes:
    """The index of a shard, as `SpanIndex` opens it. `texts` has a number for each document's text,
    of shape (documents,), uint64; token ids are below `vocab_size`."""
    grams = _grams(shard)
    directory = _directory(grams)
    offsets, documents, counts = _postings(shard, vocab_size)
    lengths = np.asarray(shard.documents(["tokens"])["tokens"].to_numpy(), np.uint32)
    sizes = [len(grams), len(directory), vocab_size, len(documents), len(texts)]
    header = np.array([_MAGIC, *sizes, lengths.sum(), 0], "<i8")
    # `SpanIndex` maps them in this order; wide values come before narrow ones, so all are aligned.
    tables = (header, grams, directory, offsets, texts, lengths, documents, counts)
    return b"".join(table.tobytes() for table in tables)


def hash_grams(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Shape (places,), uint64 below 2**32: a hash of the `GRAM` tokens from each place on."""
    hashes = np.zeros(len(places), np.uint64)
    for within in range(GRAM):
        # Plus one, or leading tokens with the id 0 would leave the hash at zero.
        hashes = (hashes + tokens[places + within].astype(np.uint64) + np.uint64(1)) * GOLDEN
        hashes ^= hashes >> np.uint64(29)
    return hashes >> np.uint64(32)


def _grams(shard: Shard) -> np.ndarray:
    tokens = shard.tokens.reshape(-1)
    starts = first_places(shard, np.arange(len(shard.segments)))
    counts = np.maximum(0, (shard.segments["length"].astype(np.int64) - GRAM) // STRIDE + 1)
    within = spans(np.zeros_like(counts), counts)
    places = np.repeat(starts, counts) + within * STRIDE
    # Hash and place as one number: sorting moves half the memory that two arrays would.
    # A place fits 32 bits, since a shard aims at 1 GiB of tokens at most (`shard_bytes`).
    return np.sort((hash_grams(tokens, places) << np.uint64(32)) | places.astype(np.uint64))


def _directory(grams: np.ndarray) -> np.ndarray:
    """Shape (buckets + 1,): where the grams whose hashes begin with the same bits begin."""
    # By the first bits of the hash, which are even: buckets are about equally full.
    bits = max(1, (len(grams) // _IN_BUCKET).bit_length())
    bounds = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    return np.append(np.searchsorted(grams, bounds), len(grams)).astype("<i8")


def first_places(shard: Shard, segments: np.ndarray) -> np.ndarray:
    """Where some segments, by their numbers in any shape, begin among all tokens of the shard; of
    the same shape."""
    rows = np.searchsorted(shard.row_offsets, segments, side="right") - 1
    return np.asarray(rows * shard.tokens.shape[1] + shard.segments["start"][segments])


def _segments_at(shard: Shard, places: np.ndarray) -> np.ndarray:
    """The last segment that begins at each place or before it in the place's row.

    Only the rows of the places are looked at, so that a shard's file is not read whole.
    """
    rows, within = np.divmod(places, shard.tokens.shape[1])
    first, last = shard.row_offsets[rows], shard.row_offsets[rows + 1]
    return lower_bounds(shard.segments["start"], within + 1, first, last) - 1


def _postings(shard: Shard, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each token's documents begin, the documents in order, and how often each holds it.

    The documents' tokens are the rows of a sparse matrix, whose columns are found by counting:
    sorting pairs of token and document takes twice as long.
    """
    from scipy.sparse import csr_array

    order = np.argsort(shard.segments["document"], kind="stable")
    owners, lengths = (shard.segments[name][order] for name in ("document", "length"))
    starts, stored = first_places(shard, order), shard.tokens.reshape(-1)
    stretches = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    tokens = np.concatenate([stored[first:last] for first, last in stretches], dtype=np.int32)
    ends = ends_of(np.bincount(owners, lengths)).astype(np.int32)
    entries = np.ones(len(tokens), np.uint8), tokens, ends
    # scipy keeps repeated entries, and those of a column in the order of the rows: so the
    # occurrences of a token in one document lie side by side.
    by_token = csr_array(entries, (len(ends) - 1, vocab_size)).tocsc()
    documents, bounds = by_token.indices, by_token.indptr
    is_start = run_starts(documents)
    # The document that ends one token's entries may begin the next one's.
    is_start[bounds[:-1][np.diff(bounds) > 0]] = True
    starts = np.flatnonzero(is_start)
    # A byte will do: BM25 hardly tells 255 of a word from more.
    counts = np.minimum(np.diff(starts, append=len(documents)), 255).astype(np.uint8)
    return np.searchsorted(starts, bounds).astype("<i8"), documents[starts].astype("<u4"), counts


@dataclass(frozen=True)
class Matches:
    """Stretches that a text and a shard have in common; arrays of one length."""

    first: np.ndarray
    """Of the text: the first token, and how many."""
    length: np.ndarray
    place: np.ndarray
    """Where it stands among all tokens of the shard."""
    segment: np.ndarray
    """The segment that it stands in."""


class SpanIndex:
    """An index of a shard on disk; opening it costs the same at any size."""

    def __init__(self, path: Path, skipped: int = 0) -> None:
        """Map what `build_index` made, in a file after some bytes that are skipped; raises
        DamagedArtifact where it is cut, or no index."""
        size = path.stat().st_size - skipped
        header = np.fromfile(path, "<i8", _HEADER, offset=skipped) if size >= 64 else np.zeros(8)
        grams, buckets, vocab_size, pairs, documents, self.tokens = map(int, header[1:7])
        # A document has a text (8 bytes) and a length (4), a pair a document (4) and a count (1).
        expected = 8 * (_HEADER + grams + buckets + vocab_size + 1) + 12 * documents + 5 * pairs
        if int(header[0]) != _MAGIC or size != expected:
            raise DamagedArtifact(f"{path} is cut or no index. Remove it: it is rebuilt.")
        # The mapping outlives the open file and its name, which cleaning may remove meanwhile.
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # What is looked up stands here and there: the pages beside it are not wanted.
        mapped.madvise(mmap.MADV_RANDOM)
        at = skipped + 8 * _HEADER

        def table(kind: str, count: int) -> np.ndarray:
            nonlocal at
            where, at = at, at + count * np.dtype(kind).itemsize
            return np.frombuffer(mapped, kind, count, where)

        self.grams, self.directory = table("<u8", grams), table("<i8", buckets)
        self.offsets = table("<i8", vocab_size + 1)
        self.texts, self.lengths = table("<u8", documents), table("<u4", documents)
        self.documents, self.counts = table("<u4", pairs), table("u1", pairs)

    def matches(self, tokens: np.ndarray, shard: Shard) -> Matches:
        """All stretches of `SHORTEST` tokens or more that stand in one segment of the shard."""
        firsts, places = self._candidates(tokens)
        # A hash by chance, or a wrong bit, may give a place at the very end.
        sound = places + GRAM <= shard.tokens.size
        firsts, places = firsts[sound], places[sound]
        segment = _segments_at(shard, places)
        begins = first_places(shard, segment)
        ends = begins + shard.segments["length"][segment]
        sound = (begins <= places) & (places + GRAM <= ends)
        firsts, places, segment = firsts[sound], places[sound], segment[sound]
        stored = shard.tokens.reshape(-1)
        left, right = _extend(tokens, stored, firsts, places, begins[sound], ends[sound])
        stretches = np.column_stack((firsts - left, left + right, places - left, segment))
        # Every gram of a stretch has found the same stretch: it is kept once.
        stretches = np.unique(stretches[left + right >= SHORTEST], axis=0)
        return Matches(*stretches.T)

    def _candidates(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = len(tokens) - GRAM + 1
        if count <= 0 or not len(self.grams):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        hashes = hash_grams(tokens, np.arange(count))
        # The directory has 2**bits buckets, and the end of the last one.
        bits = (len(self.directory) - 1).bit_length() - 1
        bucket = hashes >> np.uint64(32 - bits)
        begin, end = self.directory[bucket], self.directory[bucket + np.uint64(1)]
        # As in the table, whose entries have the hash above the place.
        hashes <<= np.uint64(32)
        first = lower_bounds(self.grams, hashes, begin, end)
        last = lower_bounds(self.grams, hashes | np.uint64(0xFFFFFFFF), first, end)
        counts = np.minimum(last - first, MOST_PLACES)
        entries = self.grams[spans(first, counts)]
        places = (entries & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return np.repeat(np.arange(count), counts), places


def _extend(
    tokens: np.ndarray,
    stored: np.ndarray,
    firsts: np.ndarray,
    places: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """How far to the left of each pair of places, and from it to the right, both are equal."""
    sides = []
    for direction, offset in ((-1, -1), (1, 0)):
        reach = np.zeros(len(firsts), np.int64)
        alive = np.arange(len(firsts))
        while len(alive):
            step = offset + direction * reach[alive]
            of_text, of_shard = firsts[alive] + step, places[alive] + step
            inside = (of_text >= 0) & (of_text < len(tokens))
            inside &= (of_shard >= begins[alive]) & (of_shard < ends[alive])
            alive, of_text, of_shard = alive[inside], of_text[inside], of_shard[inside]
            equal = tokens[of_text] == stored[of_shard]
            alive = alive[equal]
            reach[alive] += 1
        sides.append(reach)
    return sides[0], sides[1]
