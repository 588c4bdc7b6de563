"""A corpus that grew by 1%: from sources to shards, against a run from nothing on all of it.

What was made before is kept, so only what is new, and what it changes, is made. The splits of an
earlier corpus hold on, as they do from a pipeline's second training on. The corpus grows three
times, by a file each time; then the shards must equal those of a run from nothing after it.

Measured on text that `benchmarks.scale_text` makes, with as many copies as docstrings have, and on
the environment's docstrings themselves, where what every run costs weighs more.
BENCH_MEGABYTES (default 1000) chooses another size of the first.
"""

import json
import os
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.corpora import FOLDER, package_docs
from benchmarks.harness import Check, at_most, record, seconds
from benchmarks.scale_text import COPIES_OF_DOCSTRINGS, FILE_MEGABYTES, write_texts
from benchmarks.tokenize_spark import digest_of, tokenizer_folder
from spark_jobs.clean import job as clean
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import write_snapshot
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings
from spark_jobs.tokenize import job as tokenize

GROWTHS = 3
MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", "1000"))
HOME = FOLDER / "incremental"


@dataclass(frozen=True)
class Measured:
    """Seconds of each growth and of runs from nothing, and whether both made the same."""

    grown: list[float]
    full: list[float]
    same: bool
    of_stages: dict[str, float]
    """Of the last growth and of the run from nothing, seconds of each stage by their names."""

    @property
    def share(self) -> float:
        return statistics.median(self.grown) / statistics.median(self.full)


def main() -> None:
    """Measure both texts and record the result."""
    spark = local_session(driver_memory="4g")
    files = MEGABYTES // FILE_MEGABYTES
    write_texts(HOME / "large", files + GROWTHS, COPIES_OF_DOCSTRINGS)
    large = measure(spark, f"{HOME}/large", ".jsonl.zst", files)
    write_docstrings(HOME / "docstrings", 100 + GROWTHS)
    docstrings = measure(spark, f"{HOME}/docstrings", ".jsonl", 100)
    same = large.same and docstrings.same
    checks = {
        f"share of the full time, {MEGABYTES:,} MB": at_most(large.share, 0.05),
        "share of the full time, docstrings (54 MB)": at_most(docstrings.share, 0.15),
        "shards equal those from nothing": Check(float(same), "== 1", same),
    }
    for text, found in ((f"{MEGABYTES:,} MB", large), ("docstrings (54 MB)", docstrings)):
        for stage, taken in found.of_stages.items():
            checks[f"{stage}, {text}"] = Check(taken, "reported", True)
    peer_name = f"a run from nothing, {MEGABYTES:,} MB"
    record("incremental", large.grown, large.full, "s", peer_name, "lower", ["pyspark"], checks)


def measure(spark: SparkSession, text: str, ending: str, files: int) -> Measured:
    """Grow the text in `NNNN<ending>` from so many files on, a file at a time."""
    folder, cache = HOME / "made", HOME / "cache"
    _remove(folder, cache, HOME / "nothing")
    of_stages: dict[str, float] = {}

    def make(name: str, count: int, cache: Path, earlier: Path | None = None) -> None:
        output = folder / name
        path = f"{text}/{{0000..{count - 1:04d}}}{ending}"
        source = {"type": "files", "name": "docs", "path": path, "id_column": "id"}
        settings = RawCorpusSettings.model_validate({"sources": [source]})
        run = "from nothing" if name == "full" else "growth"
        of_stages[f"{run}, raw_corpus"] = seconds(
            lambda: write_snapshot(settings, output / "raw", _silent, str(cache))
        )
        cleaning = clean.CleanSpec(
            raw_corpus=str(output / "raw"),
            output=str(output / "clean"),
            settings=CleanCorpusSettings(),
            earlier=str(earlier / "clean") if earlier else None,
            cache=str(cache),
        )
        of_stages[f"{run}, clean_corpus"] = seconds(lambda: clean.run(spark, cleaning, _silent))
        tokenizing = tokenize.TokenizeSpec(
            clean_corpus=str(output / "clean"),
            base_model=str(tokenizer_folder()),
            output=str(output / "shards"),
            settings=TokenizedShardsSettings(),
            cache=str(cache),
        )
        of_stages[f"{run}, tokenized_shards"] = seconds(
            lambda: tokenize.run(spark, tokenizing, _silent)
        )

    earlier = folder / "first"
    make("first", files, cache)
    make("same", files, cache, earlier)
    _remove(folder / "first" / "raw", folder / "same")
    grown = []
    for count in range(files + 1, files + GROWTHS + 1):
        grown.append(_timed(f"{text}, grown", partial(make, str(count), count, cache, earlier)))
        # Else the machine's memory fills with files that nobody reads again, and making room for
        # new ones is measured, too.
        _remove(folder / str(count) / "raw", folder / str(count) / "clean")
    nothing = partial(make, "full", files + GROWTHS, HOME / "nothing", earlier)
    full = [_timed(f"{text}, from nothing", nothing)]
    grown_shards, all_shards = (folder / name / "shards" for name in (str(files + GROWTHS), "full"))
    same = digest_of(grown_shards) == digest_of(all_shards)
    _remove(folder, cache, HOME / "nothing")
    return Measured(grown, full, same, of_stages)


def write_docstrings(folder: Path, files: int) -> None:
    """The environment's docstrings as JSON lines, in files of about 1% each."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    opened = [(folder / f"{number:04d}.jsonl").open("w") for number in range(files)]
    rows = [
        row
        for part in sorted(package_docs().glob("part-*"))
        for row in pq.read_table(part, columns=["id", "text"]).to_pylist()
    ]
    for number, row in enumerate(rows):
        opened[number * files // len(rows)].write(json.dumps(row) + "\n")
    for file in opened:
        file.close()


def _timed(what: str, work: Callable[[], None]) -> float:
    # What was written before must not be on its way to the disk meanwhile.
    os.sync()
    taken = seconds(work)
    print(f"{what}: {taken:.1f} s", flush=True)
    return taken


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _silent(line: str) -> None:
    pass


if __name__ == "__main__":
    main()
