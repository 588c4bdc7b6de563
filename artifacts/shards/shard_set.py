"""Reads packed token rows and their documents; `artifacts.shards.format` says how they lie on disk.

Files of shards are in a local folder, or in an object store behind a local cache. Documents are put
together again from their rows.
"""

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.errors import DamagedArtifact, UserError, make_command, mend_command
from artifacts.leases import local_lease
from artifacts.numbers import ends_of, sorted_unique, spans
from artifacts.shards.format import (
    ALL_SPLITS,
    SEGMENT,
    PackedRows,
    ShardEntry,
    ShardStats,
    Split,
)
from artifacts.storage import files
from artifacts.storage.files import cache_folder


class ShardFiles:
    """The files of one shards folder, each given as a local path.

    What is in an object store is copied to the cache of this machine (`artifacts.storage.files`),
    whose processes share it.
    """

    def __init__(self, url: str | Path) -> None:
        """Look at a folder, local or named by a URL such as `gs://bucket/prefix`; read no file."""
        self.url = str(url)
        self._sizes = files.list_sizes(self.url)
        if not self._sizes:
            raise DamagedArtifact(
                f"{self.url} is absent. Make it with: {make_command('tokenized_shards')}"
            )

    def check(self, name: str, expected: int | None = None) -> None:
        """Raise DamagedArtifact where the folder does not list a file, or not with the size in
        bytes that is expected of it; None where only its presence is known."""
        fault, size = "", self._sizes.get(name)
        if size is None:
            fault = "is absent, though its manifest lists it"
        elif expected not in (None, size):
            fault = f"has {size} bytes, but should have {expected}"
        if fault:
            raise DamagedArtifact(
                f"{self.url}/{name} {fault}. Set the shards aside and make them again with: "
                f"{mend_command(self.url)}"
            )

    def fetch(self, name: str) -> Path:
        """A local path of the file; what is in an object store is copied on first use, whole.
        Raises DamagedArtifact where it is absent."""
        self.check(name)
        if files.is_local(self.url):
            return Path(self.url.removeprefix("file://"), name)
        cache = cache_folder() / "shards" / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        local = cache / name
        filesystem, path = files.resolve(f"{self.url}/{name}")
        # A copy carries its object's time of modification: forgetting rewrites an object and keeps
        # its size.
        state = self._sizes[name], int(filesystem.modified(path).timestamp())
        # One of this machine's processes downloads the file; the others wait, and find its copy.
        with local_lease(cache / f"{name}.lock"):
            status = local.stat() if local.exists() else None
            if status is None or (status.st_size, int(status.st_mtime)) != state:
                files.download(f"{self.url}/{name}", local)
                # If this process is killed before, the copy has another time and is fetched again.
                os.utime(local, (state[1], state[1]))
        return local


class Shard:
    """One shard's rows, memory-mapped. A file is fetched when first asked for, so who needs no
    tokens moves none."""

    def __init__(self, files: ShardFiles, entry: ShardEntry, stats: ShardStats) -> None:
        self.entry = entry
        self._files, self._stats = files, stats

    @cached_property
    def tokens(self) -> np.ndarray:
        """Shape (rows, sequence_length)."""
        dtype = np.dtype(self._stats.dtype).newbyteorder("<")
        shape = self.entry.rows, self._stats.sequence_length
        return self._map("tokens", dtype, shape[0] * shape[1]).reshape(shape)

    @cached_property
    def targets(self) -> np.ndarray | None:
        """uint8, of the tokens' shape: which are learnt; None where all are."""
        if self._stats.form == "pretraining":
            return None
        marks = self._map("targets", np.dtype(np.uint8), self.tokens.size)
        return marks.reshape(self.tokens.shape)

    @cached_property
    def row_offsets(self) -> np.ndarray:
        """Shape (rows + 1,): where each row's segments begin."""
        return self._map("rows", np.dtype("<i8"), self.entry.rows + 1)

    @cached_property
    def segments(self) -> np.ndarray:
        """`SEGMENT` records in row order."""
        return self._map("segments", SEGMENT, int(self.row_offsets[-1]))

    def documents(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The shard's documents, in the order that segments count them; by default whole."""
        path = self._files.fetch(f"{self.entry.name}.documents.parquet")
        # Not `pq.read_table`, whose datasets import pandas: half a second of every training.
        return pq.ParquetFile(path).read(columns)

    def _map(self, suffix: str, dtype: np.dtype, count: int) -> np.ndarray:
        name = f"{self.entry.name}.{suffix}"
        self._files.check(name, count * dtype.itemsize)
        # An empty file cannot be mapped.
        if count == 0:
            return np.empty(0, dtype)
        # A plain view: numpy's memmap class does work of its own at every access.
        return np.asarray(np.memmap(self._files.fetch(name), dtype, mode="r", shape=(count,)))


def open_shards(folder: str, stats: ShardStats) -> Iterator[Shard]:
    """Every shard that has rows, whatever its split."""
    opened = ShardFiles(folder)
    return (Shard(opened, entry, stats) for entry in stats.shards if entry.rows)


class ShardSet(Sequence[tuple[np.ndarray, np.ndarray]]):
    """All rows of one split, or of several one after another, addressed by one global index.

    Opening it takes one listing of the folder; a shard is opened when one of its rows is read.
    """

    def __init__(self, folder: str | Path, stats: ShardStats, *splits: Split) -> None:
        """Find the splits' shards in a folder, which is local or in an object store.

        Raises UserError where a split has no rows, and DamagedArtifact where a file is absent or of
        the wrong size.
        """
        self.stats = stats
        self._files = ShardFiles(folder)
        self.entries: list[ShardEntry] = []
        for split in splits:
            entries = [entry for entry in stats.shards if entry.split == split and entry.rows]
            if not entries:
                raise UserError(_describe_empty(folder, split))
            # By name, whatever the order in the manifest: the numbers of all rows go by it.
            self.entries += sorted(entries, key=lambda entry: entry.name)
        row_bytes = stats.sequence_length * np.dtype(stats.dtype).itemsize
        for entry in self.entries:
            self._files.check(f"{entry.name}.tokens", entry.rows * row_bytes)
            self._files.check(f"{entry.name}.rows", 8 * (entry.rows + 1))
            # Their number is in `.rows`, which is not read yet.
            self._files.check(f"{entry.name}.segments")
        self.ends = np.cumsum([entry.rows for entry in self.entries])
        """Shape (shards,): the first row past each shard."""
        self._opened: dict[int, Shard] = {}

    @property
    def shards(self) -> Iterator[Shard]:
        """Every shard, in the order of the rows."""
        return map(self.shard, range(len(self.entries)))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        """`(tokens of shape (sequence_length,), SEGMENT records)` of one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self.read(np.array([index]))
        return row.tokens[0], row.segments

    def locate(self, index: int) -> tuple[ShardEntry, int]:
        """The shard that a row is in, and the row's number there."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        entry = self.entries[number]
        return entry, index - int(self.ends[number]) + entry.rows

    def read(self, rows: np.ndarray) -> PackedRows:
        """Copies of some rows, in the order asked for."""
        numbers = np.searchsorted(self.ends, rows, side="right")
        shards = [(number, self.shard(number)) for number in sorted_unique(numbers).tolist()]

        def gather(column: str, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
            """Values of the shards' arrays, by the number of a shard and the place in it."""
            arrays = [(number, getattr(shard, column)) for number, shard in shards]
            array = arrays[0][1]
            if len(arrays) == 1:
                return array[places]
            values = np.empty((len(places), *array.shape[1:]), array.dtype)
            for number, array in arrays:
                is_there = numbers == number
                values[is_there] = array[places[is_there]]
            return values

        places = rows - np.append(0, self.ends)[numbers]
        # A row's segments end where the next row's begin, and the last row has such an offset, too.
        first, last = (gather("row_offsets", numbers, places + n) for n in (0, 1))
        counts = last - first
        return PackedRows(
            gather("tokens", numbers, places),
            gather("segments", np.repeat(numbers, counts), spans(first, counts)),
            ends_of(counts),
            None if self.stats.form == "pretraining" else gather("targets", numbers, places),
        )

    def shard(self, number: int) -> Shard:
        """One shard, by its place in `entries`."""
        if number not in self._opened:
            self._opened[number] = Shard(self._files, self.entries[number], self.stats)
        return self._opened[number]


def _describe_empty(folder: str | Path, split: Split) -> str:
    if split == "replay":
        return (
            f"The shards in {folder} hold no rows to replay. Assign a source of general text to "
            "`replay` in `clean_corpus.split.sources`, or set `checkpoint.replay_share` to 0."
        )
    share = "" if split == "train" else f", or a larger `clean_corpus.split.{split}`"
    return f"The shards in {folder} hold no {split} rows. Give the corpus more text{share}."


class MaskedShardSet(ShardSet):
    """A shard set in which some texts are masked in place: their tokens become padding.

    Every row keeps its number and every other text its place in it, so a run over masked rows takes
    the same rows in the same order as one over the rows as they were.
    """

    def __init__(
        self, folder: str | Path, stats: ShardStats, masked: Collection[str], *splits: Split
    ) -> None:
        """Open the splits' shards; `masked` are texts by their `text_hash`."""
        super().__init__(folder, stats, *splits)
        self._masked = frozenset(masked)
        self._documents: dict[int, np.ndarray] = {}
        """Shard to the numbers of its masked documents, of the shards that were read."""

    def read(self, rows: np.ndarray) -> PackedRows:
        packed = super().read(rows)
        # These rows are copies, so masking them leaves the shards as they are.
        row_of = np.repeat(np.arange(len(rows)), np.diff(packed.row_offsets))
        numbers = np.searchsorted(self.ends, rows, side="right")[row_of]
        mask = np.zeros(len(row_of), bool)
        for number in np.unique(numbers).tolist():
            if number not in self._documents:
                hashes = self.shard(number).documents(["text_hash"])["text_hash"].to_pylist()
                places = [place for place, text in enumerate(hashes) if text in self._masked]
                self._documents[number] = np.array(places, np.int64)
            is_masked = np.isin(packed.segments["document"], self._documents[number])
            mask |= is_masked & (numbers == number)
        for row, segment in zip(row_of[mask].tolist(), packed.segments[mask], strict=True):
            first = int(segment["start"])
            # Padding is what no segment covers, so below the segment goes, too.
            packed.tokens[row, first : first + int(segment["length"])] = self.stats.end_token_id
        stay = np.concatenate([[0], np.cumsum(~mask)])
        offsets = stay[packed.row_offsets]
        return PackedRows(packed.tokens, packed.segments[~mask], offsets, packed.targets)


CLUSTERS_AT_A_TIME = 2_000_000
"""Held in memory where two splits are compared."""


def list_documents(shards: ShardSet) -> pa.Table:
    """The documents of all shards, with `shard` and `number`: where `read_tokens` finds them.

    Those that were erased are left out.
    """
    tables = []
    for place, shard in enumerate(shards.shards):
        table = shard.documents()
        table = table.append_column("shard", pa.array([place] * len(table), pa.int64()))
        tables.append(table.append_column("number", pa.array(range(len(table)), pa.int64())))
    documents = pa.concat_tables(tables)
    erased = pc.is_in(documents["text_hash"], pa.array(shards.stats.erased, pa.string()))
    return documents.filter(pc.invert(erased))


def read_tokens(
    shards: ShardSet, documents: pa.Table, wanted: Literal["tokens", "targets"] = "tokens"
) -> list[np.ndarray]:
    """The tokens of some documents that `list_documents` listed, or their marks, in their order.

    Of the shards, and of their rows, only those are read that hold one.
    """
    arrays: list[np.ndarray] = [np.empty(0)] * len(documents)
    shard_of = documents["shard"].to_numpy()
    for place in np.unique(shard_of):
        rows = np.flatnonzero(shard_of == place)
        numbers = documents["number"].to_numpy()[rows]
        parts = tokens_of(shards.shard(int(place)), numbers, wanted)
        for row, tokens in zip(rows.tolist(), parts, strict=True):
            arrays[row] = tokens
    return arrays


def tokens_of(
    shard: Shard, numbers: np.ndarray, wanted: Literal["tokens", "targets"] = "tokens"
) -> list[np.ndarray]:
    """The tokens, or their marks, of documents of a shard, in the order of their numbers in it."""
    places = np.flatnonzero(np.isin(shard.segments["document"], numbers))
    # A document that was cut over several rows is put together in the order of its own tokens.
    places = places[
        np.lexsort((shard.segments["offset"][places], shard.segments["document"][places]))
    ]
    row_of = np.searchsorted(shard.row_offsets, places, side="right") - 1
    values = getattr(shard, wanted)
    parts: dict[int, list[np.ndarray]] = {int(number): [] for number in numbers}
    for position, row in zip(places.tolist(), row_of.tolist(), strict=True):
        start, length, document, _ = shard.segments[position]
        parts[int(document)].append(values[row, start : start + length])
    return [np.concatenate(parts[int(number)]) for number in numbers]


@dataclass(frozen=True)
class Occurrence:
    """Rows of one shard that hold a document."""

    document: str
    source: str
    split: Split
    shard: str
    rows: list[int]
    """Counted within the shard."""


def find_occurrences(folder: str, stats: ShardStats, document: str) -> list[Occurrence]:
    """Every row that holds a document, by its id, training rows first."""
    occurrences = []
    for shard in open_shards(folder, stats):
        documents, entry = shard.documents(["id", "source"]), shard.entry
        for number in np.flatnonzero(pc.equal(documents["id"], document)):
            segments = np.flatnonzero(shard.segments["document"] == number)
            rows = np.unique(np.searchsorted(shard.row_offsets, segments, side="right") - 1)
            source = documents["source"][number].as_py()
            occurrences.append(Occurrence(document, source, entry.split, entry.name, rows.tolist()))
    return sorted(occurrences, key=lambda place: (ALL_SPLITS.index(place.split), place.shard))


def find_shared_clusters(folder: str, stats: ShardStats) -> list[str]:
    """Ids of the clusters that have documents in two splits, in order.

    The clusters of the smaller splits are held, some at a time, against those of the larger ones,
    shard by shard. Of the shards' files those alone are read that list documents.
    """
    sizes = {
        split: sum(entry.documents for entry in stats.shards if entry.split == split)
        for split in ALL_SPLITS
    }
    splits = sorted((split for split in ALL_SPLITS if sizes[split]), key=sizes.__getitem__)
    shared: set[str] = set()
    for place, small in enumerate(splits[:-1]):
        for batch in _batches(_clusters(folder, stats, small)):
            for large in splits[place + 1 :]:
                for clusters in _clusters(folder, stats, large):
                    is_shared = pc.is_in(clusters, batch)
                    shared.update(clusters.filter(is_shared).to_pylist())
    return sorted(shared)


def _clusters(folder: str, stats: ShardStats, split: Split) -> Iterator[pa.ChunkedArray]:
    for shard in ShardSet(folder, stats, split).shards:
        yield shard.documents(["cluster"])["cluster"]


def _batches(parts: Iterator[pa.ChunkedArray]) -> Iterator[pa.Array]:
    """The parts joined until they hold `CLUSTERS_AT_A_TIME`, each value once."""
    chunks: list[pa.Array] = []
    for part in parts:
        chunks += part.chunks
        if sum(map(len, chunks)) >= CLUSTERS_AT_A_TIME:
            yield pc.unique(pa.chunked_array(chunks))
            chunks = []
    if chunks:
        yield pc.unique(pa.chunked_array(chunks))


def text_numbers(hashes: Sequence[str]) -> np.ndarray:
    """Shape (texts,), uint64: a number for each `text_hash`, the same in all shards ever made."""
    digests = (hashlib.blake2b(text_hash.encode(), digest_size=8).digest() for text_hash in hashes)
    return np.frombuffer(b"".join(digests), np.uint64)
