"""Clean and fuzzily deduplicate: ours, datatrove's MinHash pipeline, and MLlib's MinHashLSH.

All start as programs of their own, Spark's start included, on the same Parquet files. datatrove is
measured as it comes, with spaCy's words, and once more splitting words at spaces as the others do,
which spares it three quarters of its work. Then the results on a 10 MB part are judged by the true
Jaccard similarity of every pair, and ours by planted near-copies.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpora import FOLDER, package_docs, size_of
from benchmarks.harness import Check, alternate, at_least, at_most, record
from benchmarks.memory import SAMPLE_SECONDS, family_memory

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "1"))
THRESHOLD = 0.8
PEERS = {
    "datatrove": "datatrove",
    "datatrove with words split at spaces": "datatrove_by_spaces",
    "MLlib": "mllib",
}
OUTPUT = FOLDER / "fuzzy_dedup"


def main() -> None:
    corpus = package_docs()
    megabytes = size_of(corpus) / 1e6
    memory: dict[str, float] = {}

    def measure(way: str) -> float:
        seconds, memory[way] = run_way(way, corpus)
        rate = megabytes / seconds
        print(f"{way}: {rate:.2f} MB/s, {memory[way]:.1f} GB at most", flush=True)
        return rate

    ours: list[float] = []
    peers: dict[str, list[float]] = {}
    for peer in PEERS.values():
        of_ours, peers[peer] = alternate(partial(measure, "ours"), partial(measure, peer), ROUNDS)
        ours += of_ours

    def times(peer: str) -> float:
        return float(np.median(ours) / np.median(peers[peer]))

    by_spaces = Check(times("datatrove_by_spaces"), "reported", True)
    checks: dict[str, Check] = {
        "speedup over datatrove": at_least(times("datatrove"), 6),
        "speedup over datatrove with words split at spaces": by_spaces,
        "speedup over MLlib MinHashLSH": at_least(times("mllib"), 12),
        "our peak memory, GB": at_most(memory["ours"], 6),
    }
    checks |= judge_removals() | judge_planted()
    packages = ["pyspark", "datatrove", "spacy", "numpy", "scipy"]
    name = "datatrove"
    record("fuzzy_dedup", ours, peers[name], "MB/s", name, "higher", packages, checks)


def run_way(way: str, corpus: Path) -> tuple[float, float]:
    """Run one way as a program; its seconds, and its peak memory with all its children, in GB."""
    shutil.rmtree(OUTPUT / way, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.fuzzy_dedup_ways", way, str(corpus)]
    with (FOLDER / f"fuzzy_dedup_{way}.log").open("w") as log:
        started = time.perf_counter()
        process = subprocess.Popen([*command, str(OUTPUT / way)], stdout=log, stderr=log)
        peak = 0.0
        while process.returncode is None:
            peak = max(peak, family_memory(process.pid) / 1e9)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_SECONDS)
        seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{way} failed: see {log.name}")
    return seconds, peak


def judge_removals() -> dict[str, Check]:
    """What each way removed from a 10 MB part, against the truth of every pair."""
    corpus = package_docs(10)
    table = pa.concat_tables([pq.read_table(file) for file in sorted(corpus.glob("part-*"))])
    ids, texts = table["id"].to_pylist(), table["text"].to_pylist()
    neighbors = true_neighbours(texts)
    removed = {}
    for way in ("ours", *PEERS.values()):
        run_way(way, corpus)
        kept = set(json.loads((OUTPUT / way / "kept.json").read_text()))
        removed[way] = [number for number, name in enumerate(ids) if name not in kept]
    false = {
        way: sum(not neighbors[number] for number in numbers) for way, numbers in removed.items()
    }
    missed = {way: _missed(neighbors, set(numbers)) for way, numbers in removed.items()}
    for way, numbers in removed.items():
        print(
            f"{way} removed {len(numbers)}, {false[way]} of them without a neighbor; "
            f"{missed[way]} kept documents have a neighbor that was kept too"
        )
    reported = {
        f"{what}, {name}": Check(counts[way], "reported", True)
        for what, counts in (
            ("removed without a true neighbor", false),
            ("near-copies left", missed),
        )
        for name, way in PEERS.items()
    }
    return {
        "removed without a true neighbor": at_most(false["ours"], 0),
        "near-copies left, against the best peer's": at_most(
            missed["ours"], min(missed[way] for way in PEERS.values())
        ),
        **reported,
    }


def _missed(neighbors: list[set[int]], removed: set[int]) -> int:
    return sum(
        number not in removed and bool(near - removed) for number, near in enumerate(neighbors)
    )


def true_neighbours(texts: list[str]) -> list[set[int]]:
    """For every text, those of a Jaccard similarity of at least 0.8 by its five-word n-grams."""
    from scipy.sparse import csr_matrix

    numbers: dict[tuple[str, ...], int] = {}
    rows, columns = [], []
    for row, text in enumerate(texts):
        words = text.lower().split()
        runs = {tuple(words[n : n + 5]) for n in range(max(1, len(words) - 4))}
        columns += [numbers.setdefault(run, len(numbers)) for run in runs]
        rows += [row] * len(runs)
    sets = csr_matrix((np.ones(len(rows), np.int32), (rows, columns)))
    sizes = np.asarray(sets.sum(axis=1)).ravel()
    result: list[set[int]] = []
    for first in range(0, len(texts), 500):
        common = (sets[first : first + 500] @ sets.T).tocoo()
        union = sizes[first + common.row] + sizes[common.col] - common.data
        close = common.data >= THRESHOLD * union
        near: list[set[int]] = [set() for _ in range(min(500, len(texts) - first))]
        for row, column in zip(common.row[close], common.col[close], strict=True):
            if column != first + row:
                near[row].add(int(column))
        result += near
    return result


def judge_planted() -> dict[str, Check]:
    """Recall and precision on copies of which 1 to 20% of the words were changed."""
    from tests.spark_jobs.test_duplicates import cluster, edited, similarity

    generator = random.Random(20_261_121)
    texts = []
    for _ in range(600):
        words = [f"w{generator.randrange(50_000)}" for _ in range(generator.randint(60, 600))]
        original = " ".join(words)
        texts += [original, edited(original, generator.uniform(0.01, 0.2), generator)]
    found, sets = cluster(texts)
    similarities = [similarity(sets[n], sets[n + 1]) for n in range(0, len(texts), 2)]
    together = [found.component[n] == found.component[n + 1] for n in range(0, len(texts), 2)]
    high = [bool(joined) for s, joined in zip(similarities, together, strict=True) if s > 0.85]
    low = [bool(joined) for s, joined in zip(similarities, together, strict=True) if s < 0.7]
    return {
        "planted: recall, similarity over 0.85": at_least(float(sum(high) / len(high)), 0.95),
        "planted: specificity, similarity under 0.7": at_least(
            float(1 - sum(low) / len(low)), 0.99
        ),
    }


if __name__ == "__main__":
    main()
