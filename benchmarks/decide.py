"""What deciding alone costs against the number of documents, by either decider.

The documents are made as they are read (`benchmarks.synthetic_documents`): exact and near-copies in
clusters of every size, of which boilerplate is a tenth of all. Spark's joins run on two executors
of one core and 2 GB each, beside a driver of 512 MB, so that what the driver holds can be told from
the work; deciding in memory runs as it does on a laptop. Each run is a process of its own.

The figures go to `benchmarks/results/decide.csv`; docs/scale.md explains them. *Processor
seconds* are those of all processes, which other work on the machine hardly changes. At the smallest
size both decide, and what they decide has to be equal to the byte. The ratio compares the documents
per second of the joins with those in memory there; below 1, the joins are slower.

BENCH_DOCUMENTS (default `1000000,10000000`) chooses other sizes:

    BENCH_DOCUMENTS=1000000,10000000,50000000 make bench NAME=decide
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from artifacts.storage.files import scratch_folder
from benchmarks.corpora import FOLDER
from benchmarks.harness import Check, at_most, record
from benchmarks.memory import PeakMemory
from benchmarks.synthetic_documents import DOCUMENTS_PER_PART, SyntheticPart
from spark_jobs.clean.decide.by_spark import SparkDecider
from spark_jobs.clean.decide.decider import DecidedDocuments, DecisionRun, write_list
from spark_jobs.clean.decide.in_memory import InMemoryDecider
from spark_jobs.clean.forgotten import ForgottenTexts
from spark_jobs.runtime.session import local_conf, local_session, prepare_environment
from spark_jobs.settings import CleanCorpusSettings

HOME = FOLDER / "decide"
SIZES = [int(size) for size in os.environ.get("BENCH_DOCUMENTS", "1000000,10000000").split(",")]
HEAP_SECONDS = FAMILY_SECONDS = 5.0
"""Between samples, which cost processor time: the kernel walks all pages of every process."""
FIGURES = ("seconds", "processor_seconds", "driver_python_gb", "driver_java_gb", "peak_gb")
"""Of one run: its time, the time of all processes, the memory of the driver's Python, the largest
heap of the driver's Java after a garbage collection, and the memory of all processes."""


def main() -> None:
    """Measure every size and record the table."""
    runs = {("by_spark", size): _measure_apart("by_spark", size) for size in SIZES}
    smallest, largest = SIZES[0], SIZES[-1]
    in_memory = _measure_apart("in_memory", smallest)
    first, last = runs["by_spark", smallest], runs["by_spark", largest]
    grown = f"at {largest:,} documents / at {smallest:,}"
    python, java = (_ratio(last, first, f"driver_{what}_gb") for what in ("python", "java"))
    per_document = last["processor_seconds"] / first["processor_seconds"] * smallest / largest
    checks: dict[str, Check] = {
        "results that differ from those in memory": at_most(
            int(first["digest"] != in_memory["digest"]), 0
        ),
        f"driver's Python memory, {grown}": at_most(python, 1.2),
        f"driver's Java memory, {grown}": at_most(java, 1.2),
        f"processor time per document, {grown}": at_most(round(per_document, 2), 1.2),
        f"peak memory of all processes, at {largest:,} documents": at_most(
            last["peak_gb"], 8, "GB"
        ),
    }
    ours, peer = ([smallest / figures["seconds"]] for figures in (first, in_memory))
    peer_name = f"in memory, at {smallest:,} documents"
    packages = ["pyspark", "numpy"]
    table = [
        ["documents", "decider", *FIGURES],
        *(
            [size, decider, *(figures[figure] for figure in FIGURES)]
            for (decider, size), figures in [(("in_memory", smallest), in_memory), *runs.items()]
        ),
    ]
    record("decide", ours, peer, "documents/s", peer_name, "higher", packages, checks, table=table)


def _ratio(one: dict[str, Any], other: dict[str, Any], figure: str) -> float:
    return round(float(one[figure]) / float(other[figure]), 2)


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
    spark = local_session("2g") if decider == "in_memory" else _session_apart()
    parts = [SyntheticPart.numbered(n) for n in range(-(-documents // DOCUMENTS_PER_PART))]
    began, processor = time.perf_counter(), _processor_seconds()
    with (
        scratch_folder(str((HOME / "scratch").absolute())) as scratch,
        PeakMemory(FAMILY_SECONDS) as memory,
        _peak_heap(spark) as heap,
    ):
        run = DecisionRun(
            spark, _report, scratch, None, CleanCorpusSettings(), None, (), ForgottenTexts()
        )
        if decider == "in_memory":
            outcome = InMemoryDecider(run, list(parts)).decide([])
        else:
            outcome = SparkDecider(run, list(parts), documents).decide([])
        write_list(run, outcome.duplicates, scratch, "duplicates")
        seconds = time.perf_counter() - began
        used = _processor_seconds() - processor
        digest = _digest(outcome, Path(scratch))
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(used, 1),
        "driver_python_gb": round(memory.own / 1e9, 3),
        "driver_java_gb": round(max(heap) / 1e9, 3),
        "peak_gb": round(memory.family / 1e9, 2),
        "digest": digest,
        "exact_copies": outcome.exact_copies,
        "near_copies": outcome.near_copies,
        "candidates": outcome.candidates,
    }


def _report(line: str) -> None:
    print(line, flush=True)


def _session_apart() -> Any:
    """Two executors of one core each, which are processes of their own, beside a small driver."""
    prepare_environment()
    from pyspark.sql import SparkSession

    conf = local_conf("512m", 4) | {
        "spark.master": "local-cluster[2,1,2048]",
        "spark.executor.memory": "2g",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
    }
    session = SparkSession.builder.config(map=conf).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def _peak_heap(spark: Any) -> Iterator[list[int]]:
    """Bytes of the driver's heap after garbage collections, some seconds apart."""
    java = spark.sparkContext._jvm.java.lang
    heap, ended = [0], threading.Event()

    def sample() -> None:
        while not ended.wait(HEAP_SECONDS):
            java.System.gc()
            runtime = java.Runtime.getRuntime()
            heap.append(runtime.totalMemory() - runtime.freeMemory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield heap
    finally:
        ended.set()
        thread.join()


def _processor_seconds() -> float:
    """Of this process and its children, those that have ended included."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in family)


def _digest(outcome: DecidedDocuments, folder: Path) -> str:
    """A hash of all that was decided."""
    digest = hashlib.sha256()
    for listed in sorted(folder.glob("duplicates-*.parquet")):
        digest.update(listed.read_bytes())
    for number, place in sorted(outcome.stay.places.items()):
        digest.update(f"{number}".encode())
        for column in place.read().columns:
            digest.update(repr(column.to_pylist()).encode())
    figures = (outcome.candidates, outcome.verified, outcome.near_copies, outcome.exact_copies)
    digest.update(repr((sorted(outcome.cluster_sizes.items()), figures)).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    HOME.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 4:
        Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
