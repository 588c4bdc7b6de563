"""The index that answers are traced through: its making, its size, and a trace of 200 tokens.

The peer of its making is tokenizing the same text in the same Spark session, without which there is
nothing to index. A trace is asked in a process of its own: the first one with nothing of shards and
index in memory, then again. By default it runs over the environment's docstrings; over 1 GB with

    make bench NAME=trace BENCH_MEGABYTES=1000
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401  pyarrow would import it amid the first trace

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardSet
from artifacts.shards.span_index import SpanIndex
from benchmarks.checksums import forget
from benchmarks.corpora import FOLDER
from benchmarks.harness import Check, at_least, at_most, keep, seconds
from benchmarks.scale_text import COPIES_OF_DOCSTRINGS, FILE_MEGABYTES, write_texts
from benchmarks.tokenize_spark import clean_text, tokenizer_folder
from llm_assets.sources.settings import RawCorpusSettings
from llm_assets.sources.snapshot.snapshot import write_snapshot
from llm_assets.tracing.indexed import IndexedShard
from llm_assets.tracing.nearest import find_nearest
from llm_assets.tracing.verbatim import find_stretches
from recipes.data.trained import record_trained, trained_texts
from spark_jobs import trace_index
from spark_jobs.clean import job as clean
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import (
    CleanCorpusSettings,
    DecontaminationSettings,
    NearDuplicateSettings,
    TokenizedShardsSettings,
)
from spark_jobs.tokenize import job as tokenize

MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", "0"))
"""0 means the docstrings as they are, about 60 MB."""
HOME = FOLDER / "trace"
ANSWER_TOKENS = 200
HEADER_BYTES = 32
"""Of a cache's entry, before the index."""


def main() -> None:
    spark = local_session(driver_memory="3g")
    corpus, megabytes = clean_text(spark) if not MEGABYTES else generated_text(spark)
    shards = HOME / "shards"
    tokenizing = [tokenize_seconds(spark, corpus, shards) for _ in range(2)][1:]
    stats = ShardStats.model_validate_json((HOME / "stats.json").read_text())
    indexing = [index_seconds(spark, shards, stats)]
    train = ShardSet(shards, stats, "train")
    rows = np.arange(len(train))
    record_trained(train, rows, 1 + rows // 32, str(HOME / "trained.parquet"))
    np.save(HOME / "answer.npy", make_answer(train))
    asked = ask()
    size = sum(path.stat().st_size for path in (HOME / "index").iterdir())
    tokens = sum(entry.tokens for entry in train.entries)
    print(f"{megabytes:,.0f} MB, {tokens:,} tokens, {len(train.entries)} shards: {asked}")
    ratio = statistics.median(tokenizing) / statistics.median(indexing)
    checks: dict[str, Check] = {
        "speed beside tokenizing": at_least(ratio, 1),
        "size": at_most(size / tokens, 8, "bytes per token"),
        "first trace": at_most(asked["cold"], 1, "s"),
        "later trace": at_most(asked["warm"], 0.1, "s"),
        "memory": at_most(asked["megabytes"], 500, "MB beyond the imports"),
    }
    packages = ["numpy", "pyspark", "pyarrow"]
    peer_name = f"tokenizing the same {megabytes:,.0f} MB"
    keep("trace", indexing, tokenizing, "s", peer_name, "lower", packages, checks)


def generated_text(spark: Any) -> tuple[Path, float]:
    """Clean text of about `MEGABYTES`, docstrings with words exchanged."""
    count = MEGABYTES // FILE_MEGABYTES
    write_texts(HOME / "text", count, COPIES_OF_DOCSTRINGS)
    files = f"{HOME}/text/{{0000..{count - 1:04d}}}.jsonl.zst"
    source = {"type": "files", "name": "docs", "path": files, "id_column": "id"}
    settings = RawCorpusSettings.model_validate({"sources": [source]})
    raw, output = HOME / "raw", HOME / "clean"
    for folder in (raw, output):
        shutil.rmtree(folder, ignore_errors=True)
    write_snapshot(settings, raw, lambda line: None)
    cleaning = CleanCorpusSettings(near_duplicates=NearDuplicateSettings(enabled=False))
    spec = clean.CleanSpec(raw_corpus=str(raw), output=str(output), settings=cleaning)
    return output, clean.run(spark, spec)["bytes"] / 1e6


def tokenize_seconds(spark: Any, corpus: Path, shards: Path) -> float:
    """Seconds of tokenizing and packing; the shards' stats are kept."""
    shutil.rmtree(shards, ignore_errors=True)
    settings = TokenizedShardsSettings(
        sequence_length=2_048,
        shard_bytes=16 * 1024 * 1024,
        decontamination=DecontaminationSettings(maximum_overlap=1),
    )
    spec = tokenize.TokenizeSpec(
        clean_corpus=str(corpus),
        base_model=str(tokenizer_folder()),
        output=str(shards),
        settings=settings,
    )
    began = time.perf_counter()
    stats = tokenize.run(spark, spec, lambda line: None)
    taken = time.perf_counter() - began
    (HOME / "stats.json").write_text(ShardStats.model_validate(stats).model_dump_json())
    return taken


def index_seconds(spark: Any, shards: Path, stats: ShardStats) -> float:
    """Seconds of indexing all shards that are trained on."""
    shutil.rmtree(HOME / "index", ignore_errors=True)
    keys = {e.name: e.name for e in stats.shards if e.split == "train" and e.rows}
    spec = trace_index.TraceIndexSpec(
        shards=str(shards), stats=stats, keys=keys, cache=str(HOME / "index")
    )
    return seconds(lambda: trace_index.run(spark, spec, lambda line: None))


def ask() -> dict[str, float]:
    """The figures of `trace_here`, in a process whose files the kernel has forgotten."""
    for folder in (HOME / "shards", HOME / "index"):
        forget(folder)
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.trace", "ask"],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def trace_here() -> dict[str, float]:
    """Trace 200 tokens, half of them from the text: `cold` and `warm` seconds, `megabytes` more."""
    stats = ShardStats.model_validate_json((HOME / "stats.json").read_text())
    # Forget the peak of the imports: from here on it is the trace's.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_megabytes()

    def trace() -> None:
        opened = ShardSet(HOME / "shards", stats, "train")
        shards = [IndexedShard(shard, index_of(shard)) for shard in opened.shards]
        record = str(HOME / "trained.parquet")
        found = find_stretches(shards, answer, [record])
        near = find_nearest(shards, answer, trained_texts(record), 5)
        assert found[0].length >= ANSWER_TOKENS // 2 and near

    answer = np.load(HOME / "answer.npy")
    cold = seconds(trace)
    warm = statistics.median(seconds(trace) for _ in range(5))
    return {"cold": cold, "warm": warm, "megabytes": peak_megabytes() - before}


def peak_megabytes() -> float:
    """The most memory that this process has held, what it maps of files included."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1_024 / 1e6


def make_answer(train: ShardSet) -> np.ndarray:
    """100 tokens out of the middle of a long document, and 100 of a row in an order of chance."""
    row = train.read(np.array([len(train) // 2]))
    longest = row.segments[int(np.argmax(row.segments["length"]))]
    first = int(longest["start"] + longest["length"] // 4)
    half = row.tokens[0, first : first + ANSWER_TOKENS // 2]
    chance = np.random.default_rng(0).permutation(row.tokens[0])[: ANSWER_TOKENS - len(half)]
    return np.concatenate([half, chance]).astype(np.int64)


def index_of(shard: Shard) -> SpanIndex:
    """The index that was built of a shard."""
    return SpanIndex(HOME / "index" / shard.entry.name, HEADER_BYTES)


if __name__ == "__main__":
    if sys.argv[1:] == ["ask"]:
        print(json.dumps(trace_here()))
    else:
        main()
