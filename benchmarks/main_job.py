"""The whole main job on an empty store, against the same programs started by hand.

The peer is a script that calls the stages one after another without Dagster: what it takes more or
less is the price of the orchestrator. The limits are those that `make run` is held to.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.harness import at_most, record, seconds
from benchmarks.memory import SAMPLE_SECONDS, family_memory

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Run ours twice (made, then found made) and the peer once."""
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder) / "ours")
        first, peak = watch(project, "llm-assets", "run")
        second, _ = watch(project, "llm-assets", "run")
        watch(project, "llm-assets", "stop")
        loading = seconds(
            lambda: run(project, sys.executable, "-c", "import llm_assets.definitions").wait()
        )
        by_hand = make_project(Path(folder) / "peer")
        peer = seconds(lambda: run(by_hand, sys.executable, "-m", "benchmarks.by_hand").wait())
    record(
        "main_job",
        [first],
        [peer],
        unit="s",
        peer_name="the same programs started by hand, without serving",
        better="lower",
        packages=["dagster", "pyspark", "torch", "transformers"],
        checks={
            "first run": at_most(first, 360, "s"),
            "second run": at_most(second, 20, "s"),
            "peak memory of all processes": at_most(peak / 1e9, 6, "GB"),
            "loading the definitions": at_most(loading, 4, "s"),
        },
    )


def make_project(folder: Path) -> Path:
    """A folder with the default pipeline file and a store of its own."""
    folder.mkdir()
    # Its files of facts are named from the folder where the commands run.
    shutil.copytree(ROOT / "config", folder / "config")
    settings = yaml.safe_load((folder / "config" / "invented_products.yaml").read_text())
    settings["store"] = str(folder / "store")
    settings["endpoint"] = {"port": 0}
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(settings))
    (folder / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    return folder


def run(project: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a command of the project's environment in its folder."""
    environment = os.environ | {
        "LLM_ASSETS_CONFIG": str(project / "pipeline.yaml"),
        "DAGSTER_HOME": str(project),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.Popen(command, cwd=project, env=environment)


def watch(project: Path, *command: str) -> tuple[float, float]:
    """Seconds and peak memory in bytes of a command with all its children.

    Memory is the proportional set size: what several processes map is shared out among them.
    """
    started = time.perf_counter()
    process = run(project, *command)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, family_memory(process.pid))
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - started, peak


if __name__ == "__main__":
    main()
