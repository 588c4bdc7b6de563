"""What the corpus engine costs against the size of the text: 1, 10 and 100% of 1 GB.

Each size is made from the sources to the shards in a process of its own, with 4 GB for Spark's
driver. The figures of every stage are in `benchmarks/results/scale.csv`; docs/scale.md explains
them. The ratio compares the rate at the full size with that at a tenth of it.

BENCH_MEGABYTES (default `10,100,1000`) chooses other sizes, for trying out.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.corpora import FOLDER
from benchmarks.harness import Check, at_most, record
from benchmarks.memory import PeakMemory
from benchmarks.scale_text import FILE_MEGABYTES, MANY_COPIES, write_texts

HOME = FOLDER / "scale"
SIZES = [int(size) for size in os.environ.get("BENCH_MEGABYTES", "10,100,1000").split(",")]
FIGURES = ("seconds", "peak_gb", "driver_gb", "documents")
"""Of a stage: its time, the memory of all processes and of the driver's Python, documents made."""
DRIVER_MEMORY = "4g"
DRIVER_LIMIT_GB = 4


def main() -> None:
    """Measure every size and record the table."""
    write_texts(HOME / "text", max(SIZES) // FILE_MEGABYTES, MANY_COPIES)
    sizes = {megabytes: _measure_apart(megabytes) for megabytes in SIZES}
    largest, before = sizes[SIZES[-1]], sizes[SIZES[-2]]
    rates = [SIZES[-1] / largest["seconds"], SIZES[-2] / before["seconds"]]
    driver = max(stage["driver_gb"] for stage in largest["stages"].values())
    checks: dict[str, Check] = {
        "peak memory of the driver's Python process": at_most(driver, DRIVER_LIMIT_GB, "GB"),
        "peak memory of all processes": at_most(largest["peak_gb"], 2 * DRIVER_LIMIT_GB, "GB"),
    }
    peer_name = f"the same at {SIZES[-2]:,} MB"
    table = [
        ["megabytes", "stage", *FIGURES],
        *(
            [megabytes, name, *(stage[figure] for figure in FIGURES)]
            for megabytes, figures in sizes.items()
            for name, stage in figures["stages"].items()
        ),
    ]
    packages = ["pyspark", "numpy"]
    record(
        "scale", rates[:1], rates[1:], "MB/s", peer_name, "higher", packages, checks, table=table
    )


def _measure_apart(megabytes: int) -> dict[str, Any]:
    """The figures of one size, measured in a process that ends afterwards."""
    result = HOME / f"{megabytes}.json"
    command = [sys.executable, "-m", "benchmarks.scale", str(megabytes), str(result)]
    subprocess.run(command, check=True)
    figures: dict[str, Any] = json.loads(result.read_text())
    print(json.dumps(figures), flush=True)
    return figures


def measure(megabytes: int) -> dict[str, Any]:
    """Make every artifact of so much text; `{"seconds", "peak_gb", "stages"}`."""
    from benchmarks.tokenize_spark import tokenizer_folder
    from spark_jobs.clean import job as clean
    from spark_jobs.read.settings import RawCorpusSettings
    from spark_jobs.read.snapshot import write_snapshot
    from spark_jobs.runtime.session import local_session
    from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings
    from spark_jobs.tokenize import job as tokenize

    model = tokenizer_folder()
    output = HOME / str(megabytes)
    shutil.rmtree(output, ignore_errors=True)
    files = f"{HOME}/text/{{0000..{megabytes // FILE_MEGABYTES - 1:04d}}}.jsonl.zst"
    source = {"type": "files", "name": "docs", "path": files, "id_column": "id"}
    settings = RawCorpusSettings.model_validate({"sources": [source]})
    cleaning = clean.CleanSpec(
        raw_corpus=f"{output}/raw", output=f"{output}/clean", settings=CleanCorpusSettings()
    )
    tokenizing = tokenize.TokenizeSpec(
        clean_corpus=f"{output}/clean",
        base_model=str(model),
        output=f"{output}/shards",
        settings=TokenizedShardsSettings(sequence_length=2_048),
    )

    def session() -> Any:
        return local_session(driver_memory=DRIVER_MEMORY)

    work: dict[str, Callable[[], dict[str, Any]]] = {
        "raw_corpus": lambda: write_snapshot(settings, output / "raw", lambda line: None),
        "clean_corpus": lambda: clean.run(session(), cleaning, print),
        "tokenized_shards": lambda: tokenize.run(session(), tokenizing, print),
    }
    stages = {name: _watch(make) for name, make in work.items()}
    shutil.rmtree(output)
    return {
        "seconds": round(sum(stage["seconds"] for stage in stages.values()), 1),
        "peak_gb": max(stage["peak_gb"] for stage in stages.values()),
        "stages": stages,
    }


def _watch(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.perf_counter()
    with PeakMemory() as memory:
        stats = make()
    documents = stats["documents"]
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "peak_gb": round(memory.family / 1e9, 2),
        "driver_gb": round(memory.own / 1e9, 2),
        "documents": sum(documents.values()) if isinstance(documents, dict) else documents,
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(json.dumps(measure(int(sys.argv[1]))))
    else:
        main()
