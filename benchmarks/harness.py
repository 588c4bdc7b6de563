"""Measures this project and a peer alternately, prints the ratio and records the result.

A ratio above 1 is better for this project, for times and for rates alike.
"""

import csv
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import httpx

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / ".llm_assets" / "benchmarks" / "results"
"""A folder for each program; git ignores it. `python -m benchmarks NAME --keep` takes from here."""


@dataclass(frozen=True)
class Check:
    """One stated limit: the measured value against its bound."""

    value: float
    limit: str
    """The bound as people read it: `<= 360 s`."""
    held: bool


def at_most(value: float, bound: float, unit: str = "") -> Check:
    """A check that holds where the value is not above the bound."""
    return Check(value, f"<= {bound:g} {unit}".strip(), value <= bound)


def at_least(value: float, bound: float, unit: str = "") -> Check:
    """A check that holds where the value is not below the bound."""
    return Check(value, f">= {bound:g} {unit}".strip(), value >= bound)


def alternate(
    ours: Callable[[], float], peer: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Measure both in turn, so that a drift of the machine's speed meets both alike."""
    our_values, peer_values = [], []
    for _ in range(rounds):
        our_values.append(ours())
        peer_values.append(peer())
    return our_values, peer_values


@contextmanager
def crowd(count: int, turn: "Callable[[httpx.Client, int], None]", url: str) -> Iterator[None]:
    """So many threads that take their turn again and again while the block runs."""
    # The machine with the GPU, which imports this module too, has torch alone.
    import httpx

    over = threading.Event()

    def repeat(number: int) -> None:
        with httpx.Client(base_url=url, timeout=180) as http:
            while not over.is_set():
                turn(http, number)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def record(
    name: str,
    ours: list[float],
    peer: list[float],
    unit: str,
    peer_name: str,
    better: Literal["higher", "lower"],
    packages: list[str],
    checks: dict[str, Check] | None = None,
    machine: str | None = None,
    table: Sequence[Sequence[Any]] = (),
) -> None:
    """Print the medians and their ratio, and write `<name>.json` below `MEASURED`.

    A table goes beside it as `<name>.csv`; its first row is the header.
    """
    program, options = Path(sys.argv[0]).stem, " ".join(sys.argv[1:])
    our_median, peer_median = statistics.median(ours), statistics.median(peer)
    ratio = our_median / peer_median if better == "higher" else peer_median / our_median
    result = {
        "name": name,
        "ours": our_median,
        "peer": peer_median,
        "unit": unit,
        "peer_name": peer_name,
        "ratio": ratio,
        "checks": {key: check.__dict__ for key, check in (checks or {}).items()},
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
        "machine": machine or machine_name(),
        "command": f"make bench NAME={program}" + (f" ARGS={options}" if options else ""),
        "rounds": {"ours": ours, "peer": peer},
    }
    folder = MEASURED / program
    folder.mkdir(parents=True, exist_ok=True)
    if table:
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{name}: ours {our_median:.4g}, {peer_name} {peer_median:.4g} {unit}: {ratio:.2f}x")
    for key, check in (checks or {}).items():
        print(
            f"  {'held    ' if check.held else 'NOT HELD'} {key}: {check.value:.4g} {check.limit}"
        )
    sys.stdout.flush()


def machine_name() -> str:
    """Cores and processor model, as results state them."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cores, {model}"
