"""How fast training rows are read: shuffled, with targets, positions and segments made.

Ours reads batches in the training order from a warm page cache on one core, as training
does. The peer is Hugging Face `datasets` on the same tokens with
its own shuffle: rows of token ids alone, without the targets, positions and segments that ours
makes besides. Rates are of processor time, since both keep one core busy and wait for nothing.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts.shards.format import (
    DOCUMENT_SCHEMA,
    SEGMENT,
    PackedRows,
    ShardEntry,
    ShardStats,
    write_shard,
)
from artifacts.shards.shard_set import ShardSet
from benchmarks.harness import alternate, at_least, at_most, record
from recipes.data.reader import BatchSplit, DataOrder, StepInput, read_steps

LENGTH, BATCH = 2048, 32
ROWS = 32_768
SMALL_ROWS = 1_024
DOCUMENT_TOKENS = 512
ROUNDS = 5


def write_rows(folder: Path, rows: int) -> ShardStats:
    """One shard of random tokens whose documents are cut into rows, four to a row."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    per_row = LENGTH // DOCUMENT_TOKENS
    segments = np.zeros(rows * per_row, SEGMENT)
    segments["start"] = np.tile(np.arange(per_row) * DOCUMENT_TOKENS, rows)
    segments["length"] = DOCUMENT_TOKENS
    segments["document"] = np.arange(rows * per_row)
    packed = PackedRows(
        tokens=generator.integers(0, 49_152, (rows, LENGTH), dtype=np.uint16),
        segments=segments,
        row_offsets=np.arange(rows + 1) * per_row,
    )
    documents = pa.table({field.name: pa.nulls(0, field.type) for field in DOCUMENT_SCHEMA})
    write_shard(folder, "train-00000", packed, documents)
    entry = ShardEntry(
        name="train-00000", split="train", rows=rows, tokens=rows * LENGTH, documents=0
    )
    return ShardStats(
        sequence_length=LENGTH,
        dtype="uint16",
        vocab_size=49_152,
        tokenizer_sha256="",
        start_token_id=None,
        end_token_id=0,
        shards=[entry],
    )


def read_ours(shards: ShardSet) -> float:
    """Tokens per second over one epoch in training order."""
    began = time.process_time()
    steps = _open_reader(shards)
    for _ in range(len(shards) // BATCH):
        (batch,) = next(steps).batches
        assert batch.tokens.shape == (BATCH, LENGTH)
    return len(shards) * LENGTH / (time.process_time() - began)


def _open_reader(shards: ShardSet) -> Iterator[StepInput]:
    """A reader in the middle of the second epoch, where entering costs most if it costs at all."""
    order = DataOrder(seed=0, train_rows=len(shards))
    start = len(shards) * 3 // 2
    return read_steps(shards, order, BatchSplit(BATCH, BATCH), start)


def read_peer(folder: Path) -> float:
    """The same with `datasets`: an Arrow table on disk, shuffled, as torch tensors."""
    from datasets import load_from_disk

    dataset = load_from_disk(str(folder)).shuffle(seed=0).with_format("torch")
    began = time.process_time()
    for batch in dataset.iter(batch_size=BATCH):
        assert batch["input_ids"].shape == (BATCH, LENGTH)
    return len(dataset) * LENGTH / (time.process_time() - began)


def main() -> None:
    """Measure, print and record the result."""
    from datasets import Dataset

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        stats = write_rows(folder / "shards", ROWS)
        small = write_rows(folder / "small", SMALL_ROWS)
        shards = ShardSet(folder / "shards", stats, "train")
        tokens = np.fromfile(folder / "shards" / "train-00000.tokens", np.uint16)
        table = pa.table(
            {
                "input_ids": pa.FixedSizeListArray.from_arrays(
                    pa.array(tokens.astype(np.int32)), LENGTH
                )
            }
        )
        Dataset(table).save_to_disk(folder / "peer")
        read_ours(shards)
        ours, peer = alternate(
            lambda: read_ours(shards), lambda: read_peer(folder / "peer"), ROUNDS
        )
        opening = _seconds_to_open(folder / "shards", stats)
        opening_small = _seconds_to_open(folder / "small", small)
    record(
        "shard_reader",
        ours=ours,
        peer=peer,
        unit="tokens/s",
        peer_name="Hugging Face datasets",
        better="higher",
        packages=["numpy", "torch", "datasets"],
        checks={
            "tokens per second on one core": at_least(min(ours), 100e6, "tokens/s"),
            "extra time to the first batch with 32 times the rows": at_most(
                opening - opening_small, 0.002, "s"
            ),
        },
    )


def _seconds_to_open(folder: Path, stats: ShardStats) -> float:
    """From nothing to the first batch, in the middle of a run."""
    seconds = []
    for _ in range(20):
        began = time.process_time()
        next(_open_reader(ShardSet(folder, stats, "train")))
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
