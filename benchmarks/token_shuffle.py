"""Tokens reach their shards through files, and through Spark's own shuffle: one job, both ways.

Tokens are cached, so that nearly all that is measured is the way that they take. The shards must
come out byte-identical. Spark's way has no list on the driver and is taken past
`spark.shuffle_ranges`; a way of our own is worth keeping while it is at least twice as quick.

BENCH_MEGABYTES (default 1000) chooses another size, for trying out.
"""

import hashlib
import os
import shutil
import statistics
from functools import partial
from pathlib import Path

from benchmarks.corpora import FOLDER
from benchmarks.harness import Check, alternate, at_least, keep, seconds
from benchmarks.scale_text import COPIES_OF_DOCSTRINGS, FILE_MEGABYTES, write_texts
from benchmarks.tokenize_spark import tokenizer_folder
from llm_assets.sources.settings import RawCorpusSettings
from llm_assets.sources.snapshot.snapshot import write_snapshot
from spark_jobs.clean import job as clean
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import (
    CleanCorpusSettings,
    DecontaminationSettings,
    NearDuplicateSettings,
    TokenizedShardsSettings,
)
from spark_jobs.tokenize import job as tokenize

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", "1000"))
HOME = FOLDER / "token_shuffle"
SETTINGS = TokenizedShardsSettings(decontamination=DecontaminationSettings(maximum_overlap=1))
BY_FILES, BY_SPARK = 10**6, 0
"""`shuffle_ranges`."""


def main() -> None:
    """Measure both ways in turn and keep the result."""
    spark = local_session(driver_memory="4g")
    write_texts(HOME / "text", MEGABYTES // FILE_MEGABYTES, COPIES_OF_DOCSTRINGS)
    path = f"{HOME}/text/{{0000..{MEGABYTES // FILE_MEGABYTES - 1:04d}}}.jsonl.zst"
    source = {"type": "files", "path": path, "id_column": "id"}
    write_snapshot(RawCorpusSettings.model_validate({"sources": [source]}), HOME / "raw")
    cleaning = clean.CleanSpec(
        raw_corpus=str(HOME / "raw"),
        output=str(HOME / "clean"),
        settings=CleanCorpusSettings(near_duplicates=NearDuplicateSettings(enabled=False)),
    )
    shutil.rmtree(HOME / "clean", ignore_errors=True)
    clean.run(spark, cleaning)
    digests = set()

    def write_shards(shuffle_ranges: int) -> None:
        shutil.rmtree(HOME / "shards", ignore_errors=True)
        spec = tokenize.TokenizeSpec(
            clean_corpus=str(HOME / "clean"),
            base_model=str(tokenizer_folder()),
            output=str(HOME / "shards"),
            settings=SETTINGS,
            cache=str(HOME / "cache"),
            shuffle_ranges=shuffle_ranges,
        )
        tokenize.run(spark, spec, lambda line: None)

    def measure(shuffle_ranges: int) -> float:
        taken = seconds(partial(write_shards, shuffle_ranges))
        digests.add(_digest(HOME / "shards"))
        print(f"at most {shuffle_ranges} ranges: {taken:.1f} s", flush=True)
        return taken

    measure(BY_FILES)  # which also fills the cache
    ours, peer = alternate(partial(measure, BY_FILES), partial(measure, BY_SPARK), ROUNDS)
    ratio = statistics.median(peer) / statistics.median(ours)
    checks = {
        "times Spark's shuffle": at_least(ratio, 2),
        "shards byte-identical": Check(len(digests), "== 1", len(digests) == 1),
    }
    peer_name = "the same job through Spark's own shuffle"
    keep("token_shuffle", ours, peer, "s", peer_name, "lower", ["pyspark", "pyarrow"], checks)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
