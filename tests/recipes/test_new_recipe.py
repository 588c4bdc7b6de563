"""The page about recipes of one's own: its package is installed, and a pipeline trains with it."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT, Project, make_project
from tests.tiny_tasks import TASKS

PAGE = ROOT / "docs" / "new_recipe.md"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project whose environment has the page's package, and that asks for its recipe."""
    project = make_project(tmp_path / "project", tmp_path / "unused", documents=1)
    sections = TASKS["classification"].settings(project.folder)
    sections["checkpoint"] |= {
        "recipe": "smoothed_classification",
        "smoothing": 0.2,
        "budget": {"steps": 8},
    }
    sections["eval_metrics"] = {"general_tokens": 200}
    project.configure(**sections)
    return project


def install(folder: Path) -> None:
    """Write the page's package with its metadata, as an installer leaves them."""
    text = PAGE.read_text()
    (declared,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    settings, objective = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    package = folder / "smoothed"
    package.mkdir(parents=True)
    (package / "settings.py").write_text(settings)
    (package / "objective.py").write_text(objective)
    content = tomllib.loads(declared)["project"]
    metadata = folder / f"smoothed_classification-{content['version']}.dist-info"
    metadata.mkdir()
    named = "".join(f"{key.title()}: {content[key]}\n" for key in ("name", "version"))
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    groups = content["entry-points"].items()
    lines = [f"[{group}]\n{name} = {place}\n" for group, of in groups for name, place in of.items()]
    (metadata / "entry_points.txt").write_text("".join(lines))


def run(project: Project, *command: str, packages: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=project.folder,
        env=project.environment() | {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])},
        capture_output=True,
        text=True,
    )


@pytest.mark.soak
def test_the_pages_package_is_trained_and_measured_with_by_a_pipeline(
    project: Project, tmp_path: Path
) -> None:
    install(tmp_path / "packages")
    materialize = ("dagster", "asset", "materialize", "--select", "*eval_metrics")
    ended = run(project, *materialize, packages=tmp_path / "packages")
    assert ended.returncode == 0, ended.stderr[-4000:]

    checkpoint, measured = (
        project.record.current(kind, needed_by="test") for kind in ("checkpoint", "eval_metrics")
    )
    validation = checkpoint.stats["validation"]
    # The truth that is shared out costs at least its entropy: 0.47 bits of two classes.
    assert 0.4 < validation["end"] < validation["start"]
    exported = json.loads((checkpoint.path / "model" / "config.json").read_text())
    assert exported["id2label"] == {"0": "electrician", "1": "plumber"}
    assert checkpoint.manifest.settings["smoothing"] == 0.2
    assert measured.stats["metric"]["name"] == "accuracy"
    for artifact in (checkpoint, measured):
        assert artifact.manifest.libraries["smoothed-classification"] == "1.0"


def test_a_recipe_whose_package_is_absent_is_named_with_those_there_are(
    project: Project, tmp_path: Path
) -> None:
    ended = run(project, "llm-assets", "status", packages=tmp_path)
    assert ended.returncode == 1
    assert "checkpoint.recipe: nothing of this name is installed. Installed: classification, " in (
        ended.stderr
    )
    assert "through the entry point group llm_assets.recipes" in ended.stderr
    assert "(got 'smoothed_classification')" in ended.stderr


def test_a_key_that_no_setting_of_the_recipe_has_is_met_with_its_own(
    project: Project, tmp_path: Path
) -> None:
    install(tmp_path / "packages")
    project.configure(checkpoint={"smoothin": 0.2})
    ended = run(project, "llm-assets", "status", packages=tmp_path / "packages")
    assert "checkpoint.smoothin: unknown key; did you mean `smoothing`?" in ended.stderr
    assert "class_weights" in ended.stderr and "lora" not in ended.stderr
