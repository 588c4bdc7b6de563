"""A pipeline as a component of another Dagster project."""

from pathlib import Path

from dagster import ScaffoldRequest
from pydantic import BaseModel

import llm_assets
from llm_assets.component import LanguageModel, LanguageModelScaffolder
from llm_assets.config import COMPONENT, PipelineSettings, load_settings
from tests.conftest import Project
from tests.forked import run_command


class NoParameters(BaseModel):
    """What the command was given."""


DEFINITIONS = """
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


def test_what_is_scaffolded_is_a_pipeline_file_and_lists_its_assets(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "team"\n'
    )
    package = tmp_path / "src" / "team"
    place = package / "defs" / "manuals"
    place.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    assert llm_assets.LanguageModel is LanguageModel
    request = ScaffoldRequest(
        type_name=COMPONENT,
        target_path=place,
        scaffold_format="yaml",
        project_root=tmp_path,
        params=NoParameters(),
    )
    LanguageModelScaffolder().scaffold(request)
    assert LanguageModel.get_model_cls() is PipelineSettings
    assert load_settings(place / "defs.yaml").name == "manuals"

    environment = Project(tmp_path).environment() | {
        "DAGSTER_MODULE_NAME": "team.definitions",
        "PYTHONPATH": str(package.parent),
    }
    del environment["LLM_ASSETS_CONFIG"]
    command = ("dagster", "asset", "list", "--working-directory", str(package.parent))
    listed = run_command(command, tmp_path, environment, timeout=300)
    assert "checkpoint" in listed.stdout.split(), listed.stderr
