"""The page about stages of one's own: its example, applied to a copy of the code, is made."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from artifacts.errors import UserError
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from recipes.installed import installed
from tests.conftest import ROOT, Project

PAGE = ROOT / "docs" / "new_stage.md"
MATERIALIZE = ("dagster", "asset", "materialize", "--select")


class Copy:
    """The code with the page's module and line in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for package in ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs"):
            shutil.copytree(
                ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        (module,), (line,) = (
            re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
            for language in ("python", "diff")
        )
        (folder / "llm_assets" / "assets" / "word_counts.py").write_text(module)
        subprocess.run(["git", "apply", "-"], cwd=folder, input=line, text=True, check=True)

    def run(self, project: Project, *command: str) -> str:
        """What a program of the copy says."""
        ended = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=project.environment(),
            capture_output=True,
            text=True,
        )
        return ended.stdout + ended.stderr


def test_the_pages_example_is_made_shown_and_made_again_for_a_named_setting(
    with_shards: Project, tmp_path: Path
) -> None:
    project = with_shards
    (section,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    project.configure(**yaml.safe_load(section))
    copy = Copy(tmp_path / "code")

    said = copy.run(project, *MATERIALIZE, "*word_counts")

    assert "RUN_SUCCESS" in said, said
    counts = project.current("word_counts")
    words = json.loads((counts.path / "words.json").read_text())
    assert len(words) == counts.stats["words"] > 10 and min(words.values()) >= 3
    assert counts.manifest.settings == {"minimum": 3}
    corpus = project.current("clean_corpus")
    assert counts.manifest.inputs == {"clean_corpus": corpus.fingerprint}
    assert "some_words_are_left" in said

    project.configure(stages={"word_counts": {"minimum": 1}})
    said = copy.run(project, *MATERIALIZE, "word_counts")
    assert "word_counts is made again because of settings.minimum: 3 -> 1" in said
    assert project.current("word_counts").stats["words"] > len(words)

    project.configure(stages={"word_counts": {"minimun": 1}})
    said = copy.run(project, *MATERIALIZE, "word_counts")
    assert "`stages.word_counts` of the pipeline manual has invalid settings" in said
    assert "minimun: unknown key; did you mean `minimum`?" in said


def test_a_package_of_ones_own_declares_its_stages(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module,), (declared,) = (
        re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for language in ("python", "toml")
    )
    ((group, places),) = tomllib.loads(declared)["project"]["entry-points"].items()
    ((name, place),) = places.items()
    file = tmp_path / f"{place.replace('.', '/')}.py"
    file.parent.mkdir()
    file.write_text(module)
    about = tmp_path / "own_stages-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-stages\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {place}\n")
    monkeypatch.syspath_prepend(tmp_path)
    project.configure(stages={"word_counts": {"minimum": 3}})
    installed.cache_clear()
    try:
        defined = build_definitions(load_settings(project.config), str(project.config))
    finally:
        installed.cache_clear()
    assets = defined.resolve_asset_graph()
    (key,) = (key for key in assets.get_all_asset_keys() if key.path[-1] == "word_counts")
    assert [parent.path[-1] for parent in assets.get(key).parent_keys] == ["clean_corpus"]


@pytest.mark.parametrize("name", ["word_counts", "exam"])
def test_a_section_that_no_stage_of_ones_own_has_is_refused(project: Project, name: str) -> None:
    project.configure(stages={name: {"minimum": 3}})
    with pytest.raises(UserError, match=rf"`stages.{name}` is the section of no stage of your own"):
        build_definitions(load_settings(project.config), str(project.config))
