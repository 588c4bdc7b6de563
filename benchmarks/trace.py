"""The index that answers are traced through: its making, its size, and a trace of 200 tokens.

The peer of its making is tokenizing the same text in the same Spark session, without which there is
nothing to index. A trace is what `llm-assets trace` and its page do, from the manifests to the
licenses, asked in a process of its own: the first one with nothing of shards, index and corpus in
memory, then again as the page does.

BENCH_MEGABYTES (default 1000) chooses another size; 0 takes the docstrings as they are, some 50 MB.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401  pyarrow would import it amid the first trace
from tokenizers import Tokenizer

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardFiles, ShardSet
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from benchmarks.corpora import FOLDER, package_docs
from benchmarks.harness import Check, at_least, at_most, record, seconds
from benchmarks.scale_text import COPIES_OF_DOCSTRINGS, FILE_MEGABYTES, write_texts
from benchmarks.tokenize_spark import clean_text, tokenizer_folder
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.trace import Tracer
from llm_assets.tracing.training_text import index_keys
from recipes.data.records import TRAINED_NAME, record_trained
from recipes.spec import MODEL_FOLDER
from spark_jobs.clean import job as clean
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import write_snapshot
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import (
    CleanCorpusSettings,
    DecontaminationSettings,
    NearDuplicateSettings,
    TokenizedShardsSettings,
)
from spark_jobs.tokenize import job as tokenize
from spark_jobs.trace_index import build_indexes

MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", "1000"))
HOME = FOLDER.absolute() / "trace"
ANSWER_TOKENS = 200
ROWS_OF_A_STEP = 32


def main() -> None:
    spark = local_session(driver_memory="3g")
    raw, corpus, megabytes = text_of_docstrings(spark) if not MEGABYTES else generated_text(spark)
    tokenizing = [tokenize_seconds(spark, corpus) for _ in range(2)][1:]
    shutil.rmtree(HOME / "store", ignore_errors=True)
    shards = enter(Store(str(HOME / "store")), raw, corpus)
    indexing = [index_seconds(spark, shards)]
    train = ShardSet(shards.url, ShardStats.model_validate(shards.stats), "train")
    (HOME / "answer.txt").write_text(make_answer(train))
    asked = ask(raw)
    size = sum(path.stat().st_size for path in Path(shards.store.cache).iterdir())
    tokens = sum(entry.tokens for entry in train.entries)
    print(f"{megabytes:,.0f} MB, {tokens:,} tokens, {len(train.entries)} shards: {asked}")
    ratio = statistics.median(tokenizing) / statistics.median(indexing)
    checks: dict[str, Check] = {
        "speed of indexing / of tokenizing": at_least(ratio, 1),
        "size of the index": at_most(size / tokens, 8, "bytes per token"),
        "time of the first trace": at_most(asked["cold"], 1, "s"),
        "time of a later trace": at_most(asked["warm"], 0.1, "s"),
        "memory of a trace": at_most(asked["megabytes"], 500, "MB beyond the imports"),
    }
    packages = ["numpy", "pyspark", "pyarrow"]
    peer_name = f"tokenizing the same {megabytes:,.0f} MB"
    record("trace", indexing, tokenizing, "s", peer_name, "lower", packages, checks)


def text_of_docstrings(spark: Any) -> tuple[Path, Path, float]:
    """Raw corpus, clean corpus and megabytes of the environment's docstrings."""
    return package_docs().absolute(), *clean_text(spark)


def generated_text(spark: Any) -> tuple[Path, Path, float]:
    """The same of about `MEGABYTES`, docstrings with words exchanged."""
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
    return raw, output, clean.run(spark, spec)["bytes"] / 1e6


def tokenize_seconds(spark: Any, corpus: Path) -> float:
    """Seconds of tokenizing and packing; the shards' stats are kept."""
    shards = HOME / "shards"
    shutil.rmtree(shards, ignore_errors=True)
    settings = TokenizedShardsSettings(
        sequence_length=2_048, decontamination=DecontaminationSettings(maximum_overlap=1)
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


def enter(store: Store, raw: Path, corpus: Path) -> Artifact:
    """Enter text, shards and a checkpoint that was trained on all of it; returns the shards."""
    stats = ShardStats.model_validate_json((HOME / "stats.json").read_text())
    made, shards = None, HOME / "shards"
    for kind, folder in (
        ("raw_corpus", raw),
        ("clean_corpus", corpus),
        ("tokenized_shards", shards),
    ):
        identity = following(made, kind)
        of_shards = stats.model_dump() if kind == "tokenized_shards" else {}
        made, _ = store.make(identity, partial(linked, folder, of_shards))
    assert made is not None
    train = ShardSet(shards, stats, "train")
    rows = np.arange(len(train))

    def checkpoint(draft: Draft) -> None:
        record_trained(train, rows, 1 + rows // ROWS_OF_A_STEP, str(draft.path / TRAINED_NAME))
        shutil.copytree(tokenizer_folder(), draft.path / MODEL_FOLDER)

    trained, _ = store.make(following(made, "checkpoint"), checkpoint)
    (HOME / "checkpoint.txt").write_text(trained.fingerprint)
    return made


def linked(folder: Path, stats: dict[str, Any], draft: Draft) -> None:
    """The files of a folder, under second names."""
    shutil.copytree(folder, draft.path, copy_function=os.link, dirs_exist_ok=True)
    draft.stats.update(stats)


def following(before: Artifact | None, kind: str) -> Identity:
    """The identity of what is made of an artifact alone."""
    inputs = {before.manifest.kind: before.fingerprint} if before else {}
    return Identity(kind=kind, code_version="1", inputs=inputs)


def index_seconds(spark: Any, shards: Artifact) -> float:
    """Seconds of indexing all shards that are trained on."""
    stats = ShardStats.model_validate(shards.stats)
    files, keys, cache = ShardFiles(shards.url), index_keys(shards, stats), shards.store.cache
    return seconds(lambda: build_indexes(spark, files, stats, keys, cache, lambda line: None))


def ask(raw: Path) -> dict[str, float]:
    """The figures of `trace_here`, in a process whose files the kernel has forgotten."""
    for folder in (raw, HOME / "shards", HOME / "store" / "cache"):
        forget(folder)
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.trace", "ask"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def forget(folder: Path) -> None:
    """Have the kernel read the files from the disk when they are next asked for."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def trace_here() -> dict[str, float]:
    """Trace 200 tokens, half of them from the text: `cold` and `warm` seconds, `megabytes` more."""
    store, answer = Store(str(HOME / "store")), (HOME / "answer.txt").read_text()
    version = ModelVersion(
        version=1,
        weights="",
        model_fingerprint=(HOME / "checkpoint.txt").read_text(),
        model_url="",
        license="",
        lineage={},
    )
    tracer, state = Tracer(store, print), RegistryState(versions=[version])
    # Forget the peak of the imports: from here on it is the trace's.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_megabytes()

    def trace() -> None:
        found = tracer.trace(state, version, answer)
        assert found.verbatim[0].tokens >= 0.4 * ANSWER_TOKENS and found.near, found.share

    cold = seconds(trace)
    warm = statistics.median(seconds(trace) for _ in range(5))
    return {"cold": cold, "warm": warm, "megabytes": peak_megabytes() - before}


def peak_megabytes() -> float:
    """The most memory that this process has held, what it maps of files included."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1_024 / 1e6


def make_answer(train: ShardSet) -> str:
    """100 tokens out of the middle of a long document, and 100 of a row in an order of chance."""
    row = train.read(np.array([len(train) // 2]))
    longest = row.segments[int(np.argmax(row.segments["length"]))]
    first = int(longest["start"] + longest["length"] // 4)
    half = row.tokens[0, first : first + ANSWER_TOKENS // 2]
    chance = np.random.default_rng(0).permutation(row.tokens[0])[: ANSWER_TOKENS - len(half)]
    tokenizer = Tokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    text: str = tokenizer.decode(np.concatenate([half, chance]).tolist())
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["ask"]:
        print(json.dumps(trace_here()))
    else:
        main()
