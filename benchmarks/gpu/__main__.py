"""Parts of at most nine minutes, each of which says at once what it found.

    make gpu-kit                                on a machine with a network, once
    make gpu [PARTS="probe trainer"]            on the machine with the GPU, without one
    make gpu PARTS='changes --only float8'      one run of a part, beside what is there of it
    python -m benchmarks.gpu --keep             puts the results into benchmarks/results/gpu

Needs torch of that machine, and what lies in the kit; `peer` also transformers and accelerate. The
parts, in the order of how much each says in a minute:

    probe       ceilings of matrix products and copies; kernels against float64
    resume      a tiny training that is ended and goes on, against one that is not
    trainer     the training program itself: reading, logging and saving, 135M and 1B
    peer        the step alone, beside the Hugging Face Trainer's
    changes     the trainer again with one setting changed at a time
    recipes     each recipe on a tiny model: its losses beside those on the processor

Without a GPU the same parts run on the processor with a tiny model: a rehearsal.
"""

import argparse
import importlib.util
import json
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from artifacts.program.lifetime import POLL_SECONDS, Child, Interruption, end_with_parent
from benchmarks.gpu import probe, recipes, trainer
from benchmarks.gpu.turns import SECONDS, Keep, in_turn
from benchmarks.harness import ROOT, machine_name
from recipes.device import device_of, local_device

PACKAGES = ("torch", "numpy", "triton", "transformers", "accelerate", "torchao")
KEPT = ROOT / "benchmarks" / "results" / "gpu"
IS_GPU = torch.cuda.is_available()
SIZES = ("1b", "135m") if IS_GPU else ("tiny",)
"""The larger one first: what it took says whether there is time for another."""


def main() -> None:
    """Run the parts that are asked for, each in a process of its own, and keep their results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--results", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most that a part may take")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="RUN",
        help="of one part this run alone, added to what the part has found before; may be repeated",
    )
    parser.add_argument("--keep", action="store_true", help="keep these results, measure nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if arguments.only and (len(arguments.parts) != 1 or arguments.parts[0] not in WITH_RUNS):
        parser.error(f"--only picks a run of one part: {', '.join(WITH_RUNS)}")
    if arguments.keep:
        keep(arguments.results)
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        end_with_parent(signal.SIGKILL)
        (part,) = arguments.parts
        path = arguments.results / f"{part}.json"
        before = found_before(path) if arguments.only else {}

        def write(found: dict[str, Any]) -> None:
            together = {"machine": machine(), "found": before | found}
            path.write_text(json.dumps(together, indent=2) + "\n")

        found = PARTS[part](arguments.seconds, write, arguments.only)
        write(found)
        sys.exit(any("failed" in run for run in found.values() if isinstance(run, dict)))
    interruption = Interruption()
    print(json.dumps(machine(), indent=2), flush=True)
    parts = arguments.parts or list(PARTS)
    failed = [part for part in parts if not _run(part, arguments, interruption)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(part: str, arguments: argparse.Namespace, interruption: Interruption) -> bool:
    """Whether a part came to its end; one that fails takes no time from the next.

    Raises:
        SystemExit: this program was told to end, as by `timeout`.
    """
    print(f"\n== {part}", flush=True)
    began = time.monotonic()
    results, seconds = str(arguments.results), arguments.seconds
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--here", "--results", results]
    command += ["--seconds", str(seconds), *(f"--only={name}" for name in arguments.only)]
    child = Child(command)
    while (code := child.poll()) is None and not interruption.requested:
        if time.monotonic() - began > seconds:
            break
        time.sleep(POLL_SECONDS)
    child.kill()
    if interruption.requested:
        sys.exit(f"ended by {interruption.signal_name}")
    took = f"{time.monotonic() - began:.0f} s"
    print(f"== {part}: {took}" if code == 0 else f"== {part} FAILED after {took}", flush=True)
    return code == 0


def found_before(path: Path) -> dict[str, Any]:
    """What a part found here before; figures of another machine do not go with this one's."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["machine"] != machine():
        sys.exit(f"{path} is of another machine or other versions. Name another --results.")
    return dict(kept["found"])


def keep(results: Path) -> None:
    """Put results of a GPU beside those of the other benchmarks; a rehearsal's are refused."""
    found = sorted(results.glob("*.json"))
    if not found:
        sys.exit(f"{results} holds no results. Measure first: make gpu")
    KEPT.mkdir(exist_ok=True)
    for result in found:
        if "cuda" not in json.loads(result.read_text())["machine"]:
            sys.exit(f"{result} was measured without a GPU, as a rehearsal.")
        shutil.copy(result, KEPT)
        print(f"kept: {KEPT.name}/{result.name}")


def machine() -> dict[str, Any]:
    """What the figures were measured on and with."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    device = device_of(local_device())
    told = {
        "device": device.name if IS_GPU else machine_name(),
        "python": platform.python_version(),
    }
    if IS_GPU:
        told |= {
            "cuda": str(torch.version.cuda),
            "memory_gb": f"{(device.memory() or 0) / 1e9:.0f}",
        }
    return told | versions


def measure_peer(seconds: float, keep: Keep, only: Collection[str]) -> dict[str, Any]:
    """The step of ours and of the Hugging Face Trainer, in turn (`benchmarks.train_gpu`)."""
    absent = [name for name in ("transformers", "accelerate") if not importlib.util.find_spec(name)]
    if absent:
        print(f"left out: {' and '.join(absent)} are not installed", flush=True)
        return {"left_out": absent}
    from benchmarks.train_gpu import measure_rounds

    return in_turn({name: partial(measure_rounds, name, 1) for name in SIZES}, seconds, keep, only)


PARTS: dict[str, Callable[[float, Keep, Collection[str]], dict[str, Any]]] = {
    "probe": lambda *_: probe.measure(),
    "resume": lambda *_: trainer.resume(),
    "trainer": partial(trainer.measure, (*SIZES, "135m-4096") if IS_GPU else SIZES),
    "peer": measure_peer,
    "changes": partial(trainer.change_one_at_a_time, SIZES[0]),
    "recipes": recipes.measure,
}
"""What each measures, given the seconds it may take, what keeps the results so far, and the names
of the runs to do."""
WITH_RUNS = ("trainer", "peer", "changes", "recipes")
"""Those of several runs, each with a name."""


if __name__ == "__main__":
    main()
