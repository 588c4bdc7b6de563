"""Runs one benchmark: `python -m benchmarks NAME`. Its result goes to a folder that git ignores.

With `--keep` the result takes the place of the one in `benchmarks/results`, with the machine that
it was measured on, and docs/benchmarks.md is written again. Further arguments are the benchmark's.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import MEASURED, ROOT
from scripts.write_reference import benchmarks_page


def main() -> None:
    """Run it in a process of its own; exits as that one does, and keeps nothing of a failed one."""
    folder = Path(__file__).parent
    modules = sorted(folder.glob("[a-z]*.py"))
    names = [module.stem for module in modules if "    record(" in module.read_text()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False)
    parser.add_argument("name", choices=names)
    parser.add_argument("--keep", action="store_true", help="replace the result in the docs")
    arguments, own = parser.parse_known_args()

    measured = MEASURED / arguments.name
    shutil.rmtree(measured, ignore_errors=True)  # so that no earlier result is taken for this run's
    ended = subprocess.run([sys.executable, "-m", f"benchmarks.{arguments.name}", *own])
    if ended.returncode:
        sys.exit(ended.returncode)
    for result in sorted(measured.glob("*")):
        if arguments.keep:
            shutil.copy(result, folder / "results")
        print(f"{'kept' if arguments.keep else 'result'}: {result.relative_to(ROOT)}")
    if arguments.keep:
        (ROOT / "docs" / "benchmarks.md").write_text(benchmarks_page(folder))


if __name__ == "__main__":
    main()
