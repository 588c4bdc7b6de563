"""A pipeline as a component of another Dagster project, by that project's own commands."""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import ComponentTree

from artifacts.errors import UserError
from llm_assets.component import LanguageModel
from llm_assets.config import load_settings
from tests.conftest import ROOT, Project

DG = str(Path(sys.executable).parent / "dg")
PROJECT = '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "team"\n'
DEFINITIONS = """
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


def dg(folder: Path, *arguments: str, **environment: str) -> str:
    """What the command prints."""
    variables = Project(folder).environment() | environment
    for name in ("LLM_ASSETS_CONFIG", "DAGSTER_MODULE_NAME"):
        if name not in environment:
            del variables[name]
    done = subprocess.run(
        [DG, *arguments], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_what_dg_scaffolds_is_a_pipeline_file_that_it_checks_and_lists(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    package = tmp_path / "src" / "team"
    (package / "defs").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "defs" / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    path = str(package.parent)
    dg(tmp_path, "scaffold", "defs", "llm_assets.LanguageModel", "manuals", PYTHONPATH=path)
    assert load_settings(package / "defs" / "manuals" / "defs.yaml").name == "manuals"
    assert "validated successfully" in dg(tmp_path, "check", "yaml", PYTHONPATH=path)
    dg(tmp_path, "check", "defs", PYTHONPATH=path)
    listed = json.loads(dg(tmp_path, "list", "defs", "--json", PYTHONPATH=path))
    keys = {asset["asset_key"] for asset in listed["assets"]}
    assert {"checkpoint", "endpoint", "sources/text"} <= keys


def write_component(project: Project, changes: dict[Any, str]) -> Path:
    attributes = yaml.safe_load(project.config.read_text()) | changes
    file = project.folder / "defs.yaml"
    file.write_text(yaml.safe_dump({"type": "llm_assets.LanguageModel", "attributes": attributes}))
    return file


def test_a_variable_of_the_environment_that_nobody_fills_in_is_refused(project: Project) -> None:
    file = write_component(project, {"store": "{{ env.STORE }}"})
    with pytest.raises(UserError, match=r"`\{\{ env.STORE \}\}` is not filled in"):
        LanguageModel(file).build_defs(ComponentTree.for_test().load_context)


def test_a_key_that_yaml_reads_as_a_date_is_named(project: Project) -> None:
    with pytest.raises(UserError, match=r"2026, 1, 1\): Keys should be strings"):
        load_settings(write_component(project, {date(2026, 1, 1): "text"}))


def test_dg_knows_this_project(project: Project) -> None:
    variables = {"LLM_ASSETS_CONFIG": str(project.config), "DAGSTER_HOME": str(project.folder)}
    assert "checkpoint" in dg(ROOT, "list", "defs", **variables)


@pytest.mark.soak
def test_dg_launches_what_dagster_materializes(with_shards: Project) -> None:
    dg(
        with_shards.folder,
        *("launch", "--assets", "*checkpoint"),
        LLM_ASSETS_CONFIG=str(with_shards.config),
        DAGSTER_MODULE_NAME="llm_assets.definitions",
    )
    launched = with_shards.record.find_current("checkpoint")
    again = with_shards.materialize("checkpoint")
    assert again.returncode == 0, again.stderr
    assert launched and f"checkpoint {launched.fingerprint} exists already" in again.stderr
