"""One tick of the text sensor over 10,000 files, against one that hashes every file.

Each tick runs in a process of its own, as Dagster's daemon starts code servers again and again, so
what is known of the files comes from the disk. Timed is the tick alone; its memory is the peak
above what the process held once the definitions were loaded.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.harness import at_most, record

FILES = 10_000
FILE_BYTES = 8_000
ROUNDS = 3
SETTLE_SECONDS = 3.0
MEGABYTE = 1024


def main() -> None:
    """Measure, print and record the result."""
    with tempfile.TemporaryDirectory(prefix="sensor-tick-") as scratch:
        config = _project(Path(scratch))
        time.sleep(SETTLE_SECONDS)
        first = _tick(config)
        ours, peer, memory, loading = [], [], [], []
        for _ in range(ROUNDS):
            found = _tick(config)
            ours.append(found["seconds"])
            loading.append(found["definitions"])
            memory.append(found["megabytes"])
            for known in (Path(scratch) / "store" / "cache" / "digests").iterdir():
                known.unlink()
            peer.append(_tick(config)["seconds"])
    print(f"first tick {first['seconds']:.2f} s")
    checks = {
        "seconds of a tick after the first": at_most(sorted(ours)[len(ours) // 2], 1.0, "s"),
        "memory that a tick needs beyond the definitions": at_most(max(memory), 200, "MB"),
        "seconds to load the definitions": at_most(sorted(loading)[len(loading) // 2], 2.0, "s"),
    }
    record("sensor_tick", ours, peer, "s", "hashing every file", "lower", ["dagster"], checks)


def _project(folder: Path) -> Path:
    text = folder / "text"
    for number in range(FILES):
        place = text / f"{number // 100:03d}" / f"{number:05d}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"# Page {number}\n" + "The valve opens. " * (FILE_BYTES // 17))
    settings = {
        "name": "ticked",
        "store": str(folder / "store"),
        "raw_corpus": {"sources": [{"type": "files", "name": "text", "path": str(text)}]},
        "base_model": {"folder": str(folder)},
        "automation": {"quiet_minutes": 60},
    }
    config = folder / "ticked.yaml"
    config.write_text(yaml.safe_dump(settings))
    return config


def _tick(config: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.sensor_tick", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _tick_here(config: Path) -> None:
    began = time.perf_counter()
    from dagster import DagsterInstance, build_sensor_context

    from llm_assets.config import load_settings
    from llm_assets.definitions import build_definitions

    defs = build_definitions(load_settings(config), str(config))
    definitions = time.perf_counter() - began
    sensor = defs.resolve_sensor_def("source_text_changed")
    keys = ("llm_assets__pipeline", "llm_assets__registry")
    resources = {key: defs.resources[key] for key in keys}
    with DagsterInstance.ephemeral() as instance:
        context = build_sensor_context(instance=instance, definitions=defs, resources=resources)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        data = sensor.evaluate_tick(context)
        seconds = time.perf_counter() - began
    assert "waiting until it is unchanged" in (data.skip_message or "")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = (peak - before) / MEGABYTE
    print(json.dumps({"seconds": seconds, "megabytes": megabytes, "definitions": definitions}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _tick_here(Path(sys.argv[1]))
    else:
        main()
