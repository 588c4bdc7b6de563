"""What deciding alone costs against the number of documents, by either decider.

Synthetic documents of sixty words with duplicate clusters as crawled text has them: four in five
are like no other, the rest are exact or near-copies in clusters of every size, of which the largest
hold some documents in a hundred. They are prepared by the job's own code first, which is not
measured; then each decider decides over them in a process of its own, with 2 GB for Spark's driver.

The figures are in `benchmarks/decide_measured.csv`; docs/scale.md explains them. Up to
`spark.documents_in_memory` documents both decide, and what they decide has to be equal to the byte.
The ratio compares the documents per second of the joins with those in memory at the largest such
size; below 1, the joins are slower.

BENCH_DOCUMENTS (default `1000000,10000000`) chooses other sizes; 50 million need 60 GB of disk:

    BENCH_DOCUMENTS=1000000,10000000,50000000 make bench NAME=decide
"""

import csv
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.corpora import FOLDER
from benchmarks.harness import Check, at_most, keep
from benchmarks.memory import PeakMemory
from spark_jobs.settings import DOCUMENTS_IN_MEMORY

HOME = FOLDER / "decide"
TABLE = Path(__file__).with_name("decide_measured.csv")
SIZES = [int(size) for size in os.environ.get("BENCH_DOCUMENTS", "1000000,10000000").split(",")]
DOCUMENTS_PER_PART = 20_000
WORDS = 60
VOCABULARY = 200_000
COPIED = 0.2
"""Share of the documents that are copies."""
FIGURES = ("seconds", "driver_gb", "peak_gb")
"""Of one run: its time, and the memory of the driver's Python and of all processes."""


def main() -> None:
    """Measure every size and keep the table."""
    runs = {("by_spark", size): _measure_apart("by_spark", size) for size in SIZES}
    in_memory = [size for size in SIZES if size <= DOCUMENTS_IN_MEMORY]
    peers = {("in_memory", size): _measure_apart("in_memory", size) for size in in_memory}
    _write_table(peers | runs)
    smallest, largest, compared = SIZES[0], SIZES[-1], in_memory[-1]
    first, last = runs["by_spark", smallest], runs["by_spark", largest]
    differing = sum(
        peers["in_memory", size]["digest"] != runs["by_spark", size]["digest"] for size in in_memory
    )
    growth = largest / smallest
    checks: dict[str, Check] = {
        "results that differ from those in memory": at_most(differing, 0),
        "driver's Python at the largest size by that at the smallest": at_most(
            round(last["driver_gb"] / first["driver_gb"], 2), 1.2
        ),
        "time per document at the largest size by that at the smallest": at_most(
            round(last["seconds"] / first["seconds"] / growth, 2), 1.2
        ),
        "all processes": at_most(last["peak_gb"], 8, "GB"),
    }
    ours, peer = (
        [compared / runs_of[decider, compared]["seconds"]]
        for decider, runs_of in (("by_spark", runs), ("in_memory", peers))
    )
    peer_name = f"in memory, at {compared:,} documents"
    packages = ["pyspark", "numpy"]
    keep("decide", ours, peer, "documents/s", peer_name, "higher", packages, checks)


def _write_table(runs: dict[tuple[str, int], dict[str, Any]]) -> None:
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["documents", "decider", *FIGURES])
        for (decider, size), figures in runs.items():
            table.writerow([size, decider, *(figures[figure] for figure in FIGURES)])


def _measure_apart(decider: str, documents: int) -> dict[str, Any]:
    """The figures of one run, measured in a process that ends afterwards."""
    result = HOME / f"{decider}-{documents}.json"
    command = [sys.executable, "-m", "benchmarks.decide", decider, str(documents), str(result)]
    subprocess.run(command, check=True)
    figures: dict[str, Any] = json.loads(result.read_text())
    print(decider, f"{documents:,}", json.dumps(figures), flush=True)
    return figures


def measure(decider: str, documents: int) -> dict[str, Any]:
    """Decide over so many documents: `FIGURES`, and a digest of what was decided."""
    from spark_jobs.clean.decide.by_spark.decider import SparkDecider
    from spark_jobs.clean.decide.decider import Run
    from spark_jobs.clean.decide.documents import DocumentPart, Forgotten
    from spark_jobs.clean.decide.duplicates import write_duplicates
    from spark_jobs.clean.decide.in_memory.decider import InMemoryDecider
    from spark_jobs.clean.prepare import PreparedPart
    from spark_jobs.runtime.scratch import scratch_folder
    from spark_jobs.runtime.session import local_session
    from spark_jobs.settings import CleanCorpusSettings

    settings = CleanCorpusSettings()
    spark = local_session("2g")
    urls = _prepare(spark, documents, settings)
    parts = [DocumentPart(PreparedPart(url, url, True)) for url in urls]
    began = time.perf_counter()
    with scratch_folder(str(HOME / "scratch")) as scratch, PeakMemory() as memory:
        run = Run(spark, settings, None, Forgotten(), scratch, print)
        if decider == "in_memory":
            outcome = InMemoryDecider(run, parts).decide([])
        else:
            outcome = SparkDecider(run, parts, documents).decide([])
        write_duplicates(spark, outcome.duplicates, scratch, print)
        seconds = time.perf_counter() - began
        digest = hashlib.sha256()
        for listed in sorted(Path(scratch).glob("duplicates-*.parquet")):
            digest.update(listed.read_bytes())
        for number, place in sorted(outcome.stay.places.items()):
            digest.update(f"{number} {place.read().to_pydict()}".encode())
        figures = (outcome.candidates, outcome.verified, outcome.near_copies, outcome.exact_copies)
        digest.update(repr((sorted(outcome.cluster_sizes.items()), figures)).encode())
    return {
        "seconds": round(seconds, 1),
        "driver_gb": round(memory.own / 1e9, 3),
        "peak_gb": round(memory.family / 1e9, 2),
        "digest": digest.hexdigest(),
        "exact_copies": outcome.exact_copies,
        "near_copies": outcome.near_copies,
        "candidates": outcome.candidates,
    }


def _prepare(spark: Any, documents: int, settings: Any) -> list[str]:
    """URLs of so many prepared documents, in parts; those of a smaller size are used again."""
    from functools import partial

    from spark_jobs.runtime.tasks import map_tasks

    folder = HOME / "prepared"
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    numbers = range(-(-documents // DOCUMENTS_PER_PART))
    missing = [number for number in numbers if not _url(folder, number).exists()]
    work = partial(_prepare_part, folder=str(folder), settings=settings)
    map_tasks(spark, "preparing", missing, work, print)
    return [str(_url(folder, number)) for number in numbers]


def _url(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.parquet"


def _prepare_part(number: int, folder: str, settings: Any) -> dict[str, Any]:
    from spark_jobs.clean.prepare import prepare_part
    from spark_jobs.runtime.parquet import Part, write_table

    first = number * DOCUMENTS_PER_PART
    texts = [make_text(document) for document in range(first, first + DOCUMENTS_PER_PART)]
    ids = [f"synthetic/{document:012d}" for document in range(first, first + DOCUMENTS_PER_PART)]
    raw = f"{folder}/raw/{number:05d}.parquet"
    write_table(raw, pa.table({"id": ids, "text": texts, "source": ["synthetic"] * len(ids)}))
    part = Part(raw, 0, DOCUMENTS_PER_PART)
    prepare_part((part, str(_url(Path(folder), number))), settings, None, "", None)
    os.remove(raw)
    return {}


def make_text(document: int) -> str:
    """The text of a document: its family's words; of half the copies one of the last is another."""
    generator = np.random.default_rng(document)
    family = document
    if generator.random() < COPIED:
        # One copy in twenty is of the first family; the sizes of the others have a heavy tail.
        family = 0 if generator.random() < 0.05 else int(generator.pareto(0.2)) % 10**9
    words = np.random.default_rng((family, 1)).integers(0, VOCABULARY, WORDS)
    if family != document and generator.random() < 0.5:
        words[-1 - generator.integers(3)] = generator.integers(VOCABULARY)
    return " ".join(f"w{word:x}" for word in words)


if __name__ == "__main__":
    HOME.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 4:
        Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
