"""Fixtures shared by the whole suite."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import yaml

from artifacts.program.lifetime import importing
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from serving.endpoint import stop as stop_endpoint
from tests.forked import ForkedProcess, Surroundings, run_command, start_command
from tests.needs import EVERYTHING, LEFT_TO_CI, leaves_to_ci, not_tried
from tests.tiny import tiny_base_model, tiny_texts

pytest_plugins = ["tests.stand_ins.fixtures", "tests.distribution"]

ROOT = Path(__file__).parent.parent
UV = f'eval "$({sys.executable} {ROOT}/scripts/pip_settings.py)"; {Path(sys.executable).parent}/uv'
"""For bash: the installer, which takes packages from where pip does on this machine."""

# Images for containers often set it, and then every process compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tiny models are faster on one thread. Whatever tests start inherits it.
os.environ["OMP_NUM_THREADS"] = "1"

# No test fails since the machine is busy with other work.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports all that tests use."""
    with importing():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with what was not tried, and why."""
    lines = not_tried(skip_reasons(terminalreporter))
    if leaves_to_ci(terminalreporter.config):
        lines += [f"Left to .ci/run: {', '.join(LEFT_TO_CI)}", f"All: {EVERYTHING}=1 make test"]
    if lines:
        terminalreporter.section("not tried")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where everything was to be tried, and was not."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and os.environ.get(EVERYTHING) and skip_reasons(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def skip_reasons(reporter: pytest.TerminalReporter) -> list[str]:
    return [report.longrepr[2] for report in reporter.stats.get("skipped", [])]


@pytest.fixture(scope="session")
def for_all_workers(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all workers of this test session share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a two-layer model; tests read it only."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_base_model(folder)
    return folder


@dataclass
class Project:
    """A user's folder: a pipeline file, source text, and the store that grows in it."""

    folder: Path

    @property
    def record(self) -> Pipeline:
        return Pipeline(Store(str(self.folder / "store")), "manual")

    @property
    def config(self) -> Path:
        return self.folder / "manual.yaml"

    def current(self, asset: str) -> Artifact:
        """What the asset is now; fails where it was not made."""
        return self.record.current(asset, needed_by="test")

    def configure(self, **sections: dict[str, object]) -> None:
        """Change sections of the pipeline file, key by key."""
        settings = yaml.safe_load(self.config.read_text())
        for name, values in sections.items():
            settings[name] = settings.get(name, {}) | values
        self.config.write_text(yaml.safe_dump(settings))

    def adopt(self, other: "Project", *kinds: str) -> None:
        """Copy artifacts of a project with the same text, which need not be made again then."""
        for kind in kinds:
            shutil.copytree(other.folder / "store" / kind, self.folder / "store" / kind)

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "LLM_ASSETS_CONFIG": str(self.config),
            "DAGSTER_HOME": str(self.folder),
            "DAGSTER_MODULE_NAME": "llm_assets.definitions",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
        }

    def materialize(self, select: str, **run_config: object) -> subprocess.CompletedProcess[str]:
        """Run `dagster asset materialize --select ...` as a user types it."""
        config = ("--config-json", json.dumps(run_config)) if run_config else ()
        return self.run("dagster", "asset", "materialize", "--select", select, *config)

    def fork(self, *command: str) -> ForkedProcess:
        """Start an installed command, in a process group of its own.

        Its output goes to `output.txt` in the folder.
        """
        output = self.folder / "output.txt"
        return start_command(command, Surroundings(self.folder, self.environment(), output))

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run an installed command to its end."""
        return run_command(command, self.folder, self.environment(), timeout=timeout)

    def run_well(self, *command: str, timeout: float = 300) -> str:
        """All that an installed command prints, which has to end well."""
        ended = self.run(*command, timeout=timeout)
        printed = ended.stdout + ended.stderr
        assert ended.returncode == 0, printed
        return printed

    def stop(self) -> None:
        """End the endpoint, if one runs."""
        stop_endpoint(self.folder / "store" / layout.endpoint("manual"))


def make_project(folder: Path, base_model: Path, documents: int = 240) -> Project:
    """A project whose whole graph runs in well under a minute."""
    (folder / "text").mkdir(parents=True)
    for number, text in enumerate(tiny_texts(documents)):
        (folder / "text" / f"{number:04d}.txt").write_text(text)
    settings = {
        "name": "manual",
        "store": str(folder / "store"),
        "raw_corpus": {
            "sources": [{"type": "files", "name": "manual", "path": str(folder / "text")}]
        },
        "clean_corpus": {
            "minimum_characters": 40,
            "split": {"validation": 0.1, "held_out": 0.25},
        },
        "tokenized_shards": {"sequence_length": 64},
        "base_model": {"folder": str(base_model)},
        "checkpoint": {
            "budget": {"steps": 12},
            "optimizer": {"learning_rate": 0.01},
            "validation": {"every_steps": 6},
            "checkpointing": {"every_steps": 4},
        },
        # A model this small forgets its English at once, and nobody would mind.
        "model_version": {"gate": {"general_tolerance": 10.0}},
        "endpoint": {"port": 0, "rollout": {"step_seconds": 0.2}},
        "spark": {"partitions": 2},
    }
    (folder / "manual.yaml").write_text(yaml.safe_dump(settings))
    (folder / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    return Project(folder)


@pytest.fixture
def project(tmp_path: Path, tiny_model_folder: Path) -> Iterator[Project]:
    """A fresh project; its endpoint, if any, is ended afterwards."""
    made = make_project(tmp_path / "project", tiny_model_folder)
    yield made
    made.stop()
