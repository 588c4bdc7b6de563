"""What the training benchmarks share: a spec on random rows, and a program run with its peak."""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.shards.format import (
    DOCUMENT_SCHEMA,
    SEGMENT,
    PackedRows,
    ShardEntry,
    ShardStats,
    token_dtype,
    write_shard,
)
from recipes.settings import RecipeSettings
from recipes.spec import TrainingSpec, read_metrics

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class ProgramRun:
    """One child process and what it left."""

    history: list[dict[str, Any]]
    """`metrics.jsonl`."""
    peak_bytes: int

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [line["loss"] for line in self.history]

    def tokens_per_second(self, tokens_per_step: int, warm_up: int) -> float:
        """Median rate of the steps after the warm-up."""
        return tokens_per_step / median(line["seconds"] for line in self.history[warm_up:])


def document_lengths(
    sequence_length: int, document_tokens: int | None, generator: np.random.Generator
) -> list[int]:
    """Tokens of the documents that fill a row, the last one cut.

    They start anywhere, as real ones do: where all start at the edges of attention's tiles, no
    kernel meets a tile of which some positions may see nothing.

    Args:
        document_tokens: in the mean, from half to one and a half times as many; absent: the row is
            one document.
    """
    if document_tokens is None:
        return [sequence_length]
    shortest, lengths = document_tokens // 2, list[int]()
    while (left := sequence_length - sum(lengths)) > 0:
        drawn = int(generator.integers(shortest, document_tokens + shortest + 1))
        lengths.append(min(drawn, left))
    return lengths


def random_rows(
    vocab_size: int,
    rows: int,
    sequence_length: int,
    document_tokens: int | None,
    generator: np.random.Generator,
) -> PackedRows:
    """Rows of random tokens in documents as `document_lengths` has them."""
    of_rows = [document_lengths(sequence_length, document_tokens, generator) for _ in range(rows)]
    places = [
        (start, length)
        for of_row in of_rows
        for start, length in zip(np.cumsum([0, *of_row[:-1]]), of_row, strict=True)
    ]
    tokens = generator.integers(0, vocab_size, (rows, sequence_length))
    return PackedRows(
        tokens=tokens.astype(token_dtype(vocab_size)),
        segments=np.array([(*place, number, 0) for number, place in enumerate(places)], SEGMENT),
        row_offsets=np.cumsum([0, *map(len, of_rows)]),
    )


def random_shards(
    folder: Path,
    vocab_size: int,
    tokenizer_sha256: str,
    rows: int,
    sequence_length: int,
    document_tokens: int | None = None,
) -> ShardStats:
    """Rows of random tokens: work like any other for a benchmark.

    Args:
        document_tokens: of a document in the mean; absent: each row is one document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    dtype = token_dtype(vocab_size)
    entries = []
    for split in ("train", "validation"):
        name = f"{split}-00000"
        packed = random_rows(vocab_size, rows, sequence_length, document_tokens, generator)
        count = len(packed.segments)
        documents = pa.table(
            {
                "id": [f"{split}/{number}" for number in range(count)],
                "cluster": [f"{split}/{number}" for number in range(count)],
                "source": ["random"] * count,
                "bytes": 4 * packed.segments["length"].astype(np.int64),
                "tokens": packed.segments["length"].astype(np.int64),
                "text_hash": [f"{split}/{number}" for number in range(count)],
                "slice": [1] * count,
            },
            DOCUMENT_SCHEMA,
        )
        write_shard(folder, name, packed, documents)
        entries.append(
            ShardEntry(
                name=name, split=split, rows=rows, tokens=rows * sequence_length, documents=count
            )
        )
    return ShardStats(
        sequence_length=sequence_length,
        dtype=dtype,
        vocab_size=vocab_size,
        tokenizer_sha256=tokenizer_sha256,
        start_token_id=None,
        end_token_id=0,
        shards=entries,
    )


def environment(**variables: str) -> dict[str, str]:
    """What a run is started with: it finds what this process finds, also in a kit's folder."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables


def refuse_skipped(history: list[dict[str, Any]]) -> None:
    """Raise RuntimeError where a run skipped steps, with the gradient norms that it did so for."""
    if skipped := {line["step"]: line["gradient_norm"] for line in history if line["skipped"]}:
        usual = median(line["gradient_norm"] for line in history)
        norms = ", ".join(f"{step} ({norm:.3g})" for step, norm in skipped.items())
        raise RuntimeError(f"skipped for their gradient norms (usual: {usual:.3g}): step {norms}")


def largest_difference(losses: Iterable[float], expected: Iterable[float]) -> float:
    """Of two courses of the same steps, relative to the second."""
    pairs = zip(losses, expected, strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


def make_spec(
    name: str, folder: Path, shards: ShardStats, base_model: Path, training: RecipeSettings
) -> TrainingSpec:
    """A run of its own under `folder`, on `folder/shards`."""
    return TrainingSpec(
        run_id=name,
        shards_folder=str(folder / "shards"),
        shards=shards,
        base_model_folder=str(base_model),
        run_folder=str(folder / "runs" / name),
        export_folder=str(folder / "exports" / name),
        training=training,
    )


def run_program(
    module: str, spec: TrainingSpec, *arguments: str, runner: str | None = None
) -> ProgramRun:
    """Run a training program on a spec in a process of its own.

    Args:
        runner: a module that runs the program.
    """
    path = Path(spec.run_folder).parent / f"{spec.run_id}.json"
    spec.write(path)
    process = subprocess.Popen(
        [sys.executable, "-m", *filter(None, (runner, module)), "--spec", str(path), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{module} ended with exit code {process.returncode}")
    return ProgramRun(read_metrics(Path(spec.run_folder)), usage.ru_maxrss * 1024)
