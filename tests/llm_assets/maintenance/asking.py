"""What messages prescribe, done in this process, and what stages leave."""

import shlex

from click.testing import CliRunner

from artifacts.store.store import Artifact
from llm_assets.cli.main import commands
from tests.conftest import Project
from tests.llm_assets.in_process import ask

UNPROMISED = ("metrics.jsonl", "program.log", "result.json", "spec.json")
"""Files that say how long something took."""


def follow(project: Project, line: str) -> None:
    """Do what a message prescribes, in this process."""
    for command in line.split(" && "):
        program, *arguments = shlex.split(command)
        if program == "dagster":
            assert ask(project, arguments[-1]) == ""
        else:
            ended = CliRunner().invoke(commands, arguments)
            assert ended.exit_code == 0, ended.output


def content(artifact: Artifact) -> dict[str, str | None]:
    """The promised bytes of an artifact; evaluation and verdict promise figures alone."""
    if artifact.manifest.kind == "eval_metrics":
        return {"metrics": str(artifact.stats["metrics"])}
    if artifact.manifest.kind == "model_version":
        return {"promoted": str(artifact.stats["promoted"])}
    files = artifact.manifest.files
    return {entry.path: entry.sha256 for entry in files if entry.path not in UNPROMISED}
