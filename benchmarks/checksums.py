"""What checking every byte costs: a cold check against reading alone, and its share of a whole run.

The share counts the seconds of all threads of all processes, so it is an upper bound. The files lie
in the temporary folder: `TMPDIR` says on which disk.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from artifacts.storage.files import FileEntry, list_files
from artifacts.store.manifest import find_faults
from benchmarks.harness import at_most, record, seconds
from benchmarks.main_job import make_project, run

FILES = 8
FILE_BYTES = 256 * 2**20
ROUNDS = 3
SLOWER_THAN_THE_DISK = 1.1
"""What counts as the disk's own speed."""
LOG_VARIABLE = "CHECKSUM_SECONDS"
HOOK = f"""
import atexit, os, threading, time
def count():
    from artifacts.storage import files
    read, taken = files._read, []
    def timed(url):
        began = time.perf_counter()
        try:
            return read(url)
        finally:
            taken.append(time.perf_counter() - began)
    files._read = timed
    def write():
        with open(os.environ["{LOG_VARIABLE}"], "a") as file:
            file.write(f"{{sum(taken)}}\\n")
    atexit.register(write)
if "{LOG_VARIABLE}" in os.environ:
    count()
"""
"""Read by every Python process of the run at its start."""


def main() -> None:
    """Check files that are not in memory, then run the whole job with a stop-watch in it."""
    with tempfile.TemporaryDirectory() as scratch:
        ours, peer = cold_checks(Path(scratch) / "files")
        spent, whole = share_of_a_run(Path(scratch))
    record(
        "checksums",
        ours,
        peer,
        unit="s",
        peer_name=f"reading the same {FILES * FILE_BYTES / 1e9:.1f} GB with cat",
        better="lower",
        packages=[],
        checks={
            "share of the whole job": at_most(spent / whole, 0.03, "of its time"),
            "cold check against the disk": at_most(
                median(ours) / median(peer), SLOWER_THAN_THE_DISK, "times as long as reading alone"
            ),
        },
    )


def cold_checks(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of our check and of `cat`, in turn, each on files that the kernel has forgotten."""
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.bin").write_bytes(os.urandom(FILE_BYTES))
    (folder / "sums.json").write_text(
        json.dumps([entry.model_dump() for entry in list_files(str(folder))])
    )
    ours, peer = [], []
    for _ in range(ROUNDS):
        forget(folder)
        checked = subprocess.run(
            [sys.executable, "-c", CHECK], cwd=folder, check=True, capture_output=True, text=True
        )
        ours.append(float(checked.stdout))
        forget(folder)
        peer.append(seconds(lambda: subprocess.run(["sh", "-c", CAT], cwd=folder, check=True)))
    return ours, peer


CAT = "cat *.bin > /dev/null"
CHECK = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from benchmarks.checksums import check
check()
"""


def check() -> None:
    """Compare the files of this folder with their sums, and print the seconds that took."""
    entries = [FileEntry.model_validate(one) for one in json.loads(Path("sums.json").read_text())]
    began = time.perf_counter()
    assert not list(find_faults(os.getcwd(), entries)), "a file has changed"
    print(time.perf_counter() - began)


def forget(folder: Path) -> None:
    """Have the kernel read the files from the disk when they are next asked for."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def share_of_a_run(folder: Path) -> tuple[float, float]:
    """Seconds of all checksums of the main job on an empty store, and of the whole job."""
    hook, log = folder / "hook", folder / "seconds.txt"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    os.environ |= {"PYTHONPATH": str(hook), LOG_VARIABLE: str(log)}
    project = make_project(folder / "project")
    began = time.perf_counter()
    code = run(project, "llm-assets", "run").wait()
    whole = time.perf_counter() - began
    run(project, "llm-assets", "stop").wait()
    assert code == 0, "the main job failed"
    return sum(map(float, log.read_text().splitlines())), whole


if __name__ == "__main__":
    main()
