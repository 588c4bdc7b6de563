"""Without any extra: the commands that read the store work, and others say what to install."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from artifacts.errors import extra_of
from artifacts.reasons import reason_of
from llm_assets.services import PACKAGES as SERVICE_PACKAGES
from tests.conftest import ROOT, UV

PACKAGES = ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs")
ELSEWHERE = {"torch_xla"}
"""Of an environment of its own; where it is absent, `make setup-tpu` is advised."""
SIZE_LIMIT = 300_000_000


@cache
def imported_modules() -> set[str]:
    """Every module of others that the code imports anywhere; Google's with two names."""
    names: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    parts = (name.split(".") for name in names)
    tops = {".".join(part[:2] if part[0] == "google" else part[:1]) for part in parts}
    return tops - {*PACKAGES, *sys.stdlib_module_names}


@cache
def core_distributions() -> frozenset[str]:
    """What the wheel asks for without extras, and what that asks for."""
    found: set[str] = set()
    waiting = ["llm-assets"]
    while waiting:
        for line in importlib.metadata.requires(waiting.pop()) or []:
            requirement = re.match(r"[\w.-]+", line)
            assert requirement, line
            name = requirement[0].replace("_", "-").lower()
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # of another platform
            if "extra ==" not in line and name not in found:
                found.add(name)
                waiting.append(name)
    return frozenset(found)


def outside_the_core() -> set[str]:
    providers = importlib.metadata.packages_distributions()
    core = {
        module
        for module, names in providers.items()
        if {name.replace("_", "-").lower() for name in names} & core_distributions()
    }
    return (imported_modules() - core - {"google.protobuf"}) | {"dagster_postgres"}


def without(modules: set[str], folder: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a process where these modules cannot be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({sorted(modules)!r}));"
    return subprocess.run(
        [sys.executable, "-c", f"{hide} {program}"],
        cwd=folder,
        env=os.environ | {"DAGSTER_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def llm_assets(
    folder: Path, *arguments: str, absent: set[str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command where these modules, or all outside the core, cannot be imported."""
    program = (
        f"sys.argv = {['llm-assets', *arguments]!r}; import llm_assets.cli.main as cli; cli.main()"
    )
    return without(absent or outside_the_core(), folder, program)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_ASSETS_CONFIG", "config/smollm2_package_docs.yaml")
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    (tmp_path / "config").mkdir()
    for name in ("smollm2_package_docs", "google_cloud", "llama_bigquery"):
        shutil.copy(ROOT / "config" / f"{name}.yaml", tmp_path / "config")
    return tmp_path


def test_every_module_that_the_code_imports_is_of_the_core_or_of_an_extra() -> None:
    assert {name for name in outside_the_core() if extra_of(name) is None} == ELSEWHERE


def test_torch_spark_and_google_are_outside_the_core() -> None:
    assert {"torch", "transformers", "pyspark", "pyarrow", "google.cloud"} <= outside_the_core()


def test_the_core_answers_what_it_needs_the_store_alone_for(project: Path) -> None:
    told = {
        "--help": "Keep a language model current",
        "status": "running       nothing",
        "status --json": '"artifacts": {}',
        "versions": "Nothing is registered yet.",
        "versions --json": "[]\nended 0",
    }
    program = (
        "import llm_assets.cli.main as cli\n"
        f"for sys.argv in {[['llm-assets', *command.split()] for command in told]}:\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: print('ended', ended.code)"
    )
    done = without(outside_the_core(), project, program)
    assert done.stdout.count("ended 0") == len(told) and not done.stderr, done.stderr
    assert [done.stdout.count(answer) for answer in told.values()] == [1] * len(told)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [(["run"], "spark"), (["--config", "config/llama_bigquery.yaml", "check"], "google")],
)
def test_the_core_says_once_what_to_install(
    project: Path, arguments: list[str], extra: str
) -> None:
    done = llm_assets(project, *arguments)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and said.count(f"install 'llm-assets[{extra}]'\n") == 1, said
    assert "Traceback" not in said


@pytest.mark.parametrize("absent", SERVICE_PACKAGES)
def test_services_say_that_they_need_the_extra_of_the_ui(project: Path, absent: str) -> None:
    done = llm_assets(project, "up", absent={absent})
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"Error: This needs {absent}, which is not installed here. Install the extra that brings "
        "it: pip install 'llm-assets[ui]'"
    ]


def test_a_history_in_postgresql_names_its_extra(project: Path) -> None:
    settings = {"storage": {"postgres": {"postgres_url": "postgresql+psycopg2://127.0.0.1:1/x"}}}
    (project / "dagster.yaml").write_text(json.dumps(settings))
    done = llm_assets(project, "status")
    assert done.returncode == 0 and "pipeline " in done.stdout
    assert "pip install 'llm-assets[postgres]' What to do" in done.stdout


def test_definitions_say_which_extra_the_graph_needs(project: Path) -> None:
    done = without(outside_the_core(), project, "import llm_assets.definitions")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("pip install 'llm-assets[spark]'")
    assert "Traceback" not in done.stderr


def test_the_graph_loads_with_the_extra_of_the_corpus_alone(project: Path) -> None:
    others = {name for name in outside_the_core() if extra_of(name) != "spark"}
    assert {"torch", "transformers", "google.cloud", "openvino"} <= others
    done = without(others, project, "from llm_assets.definitions import defs; defs()")
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_pipes_clients_need_the_extra_of_google_alone(tmp_path: Path) -> None:
    others = {name for name in outside_the_core() if extra_of(name) != "google"}
    assert {"pyspark", "torch"} <= others
    program = (
        "import llm_assets.pipes as pipes; [getattr(pipes, name) for name in pipes.__all__]; "
        "from google.cloud import aiplatform_v1, batch_v1, dataproc_v1, storage, tpu_v2; "
        "own = 'artifacts', 'llm_assets', 'recipes', 'serving', 'spark_jobs'; "
        "print(*(one for one in sys.modules if one.split('.')[0] in own))"
    )
    done = without(others, tmp_path, program)
    assert done.returncode == 0, done.stderr[-2000:]
    needed = {name for name in done.stdout.split() if "." in name} - {"llm_assets.pipes"}
    ours = {name for name in needed if not name.startswith("llm_assets.pipes.")}
    assert ours == {"artifacts.errors", "artifacts.reasons"}


def test_an_engine_that_is_absent_is_named_with_its_extra(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    program = f"""
from pathlib import Path
from serving.engine.program import choose_engine
from serving.settings import EndpointSettings
settings = EndpointSettings(engine="openvino", weights="f32")
choose_engine(Path({str(tiny_model_folder)!r}), settings, Path("cache"))
"""
    serving = {name for name in outside_the_core() if extra_of(name) == "serve"}
    done = without(serving, tmp_path, program)
    assert "artifacts.errors.UserError: `endpoint.engine` is openvino" in done.stderr
    assert "Install the extra that brings it: pip install 'llm-assets[serve]'" in done.stderr


def test_a_module_tried_by_a_library_is_not_taken_for_the_reason() -> None:
    tried = ModuleNotFoundError("No module named 'torch'", name="torch")
    fault = ValueError("a fault of its own")
    fault.__context__ = tried
    assert reason_of(fault) is None
    fault.__cause__ = tried
    assert "llm-assets[train]" in str(reason_of(fault))
    # Of no extra, it keeps its traceback.
    assert reason_of(ModuleNotFoundError("No module named 'nowhere'", name="nowhere")) is None


def processor_seconds(folder: Path, *command: object) -> float:
    """What a command that succeeds takes of a processor, which other work does not change."""
    before = os.times()
    subprocess.run(command, cwd=folder, env=os.environ | {"DAGSTER_HOME": "."}, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


@pytest.mark.soak
def test_the_wheel_without_extras_is_small_and_answers(project: Path) -> None:
    environment, wheels = project / "venv", project / "wheels"
    subprocess.run(["bash", "-c", f"{UV} build --wheel --out-dir {wheels}"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (wheel,) = wheels.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install")
    assert processor_seconds(project, *pip, "--quiet", wheel) < 30
    installed = [path for path in environment.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in installed) < SIZE_LIMIT
    command = environment / "bin" / "llm-assets"
    for argument in ("--help", "status", "versions"):
        assert processor_seconds(project, command, argument) < 1
    refused = subprocess.run([command, "run"], cwd=project, capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr.endswith("pip install 'llm-assets[spark]'\n")
