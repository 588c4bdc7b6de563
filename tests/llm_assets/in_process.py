"""The real graph and the real commands in this process, where processes would take too long.

The one runner that differs from the project's own trains here instead of in a child.
"""

import json
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
from click.testing import CliRunner, Result
from dagster import (
    AssetCheckSeverity,
    AssetExecutionContext,
    AssetSelection,
    DagsterInstance,
    Definitions,
    asset,
    define_asset_job,
)

from artifacts.errors import UserError
from artifacts.store.store import Artifact
from llm_assets.cli.main import commands
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.state import RegistryState
from llm_assets.runners.training import LocalTrainingRunner
from recipes.evaluate import run as measure
from recipes.evaluation.spec import EvaluationSpec
from recipes.spec import TrainingResult, TrainingSpec
from tests.conftest import Project


@asset
def anything() -> None: ...


ANY_JOB = Definitions([anything], jobs=[define_asset_job("any")]).resolve_job_def("any")
"""For runs that only have to be on record."""


def ask(
    project: Project,
    select: str,
    run_config: Any = None,
    tags: Mapping[str, str] | None = None,
    instance: DagsterInstance | None = None,
    partition: str | None = None,
    **resources: Any,
) -> str:
    """Materialize in this process: what the step or check that failed says, or nothing."""
    settings = load_settings(project.config)
    defs = build_definitions(settings, str(project.config))
    here = {"training": TrainingHere(), **resources}
    defs = Definitions(
        assets=defs.assets,
        asset_checks=defs.asset_checks,
        resources={
            **(defs.resources or {}),
            **{settings.resource_key(name): one for name, one in here.items()},
        },
    )
    keys = AssetSelection.from_string(select).resolve(defs.resolve_asset_graph())
    with nullcontext(instance) if instance else DagsterInstance.ephemeral() as history:
        result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            run_config=run_config,
            tags=tags,
            asset_selection=list(keys),
            instance=history,
            partition_key=partition,
            raise_on_error=False,
        )
    for event in result.filter_events(lambda event: event.is_step_failure):
        if fault := event.step_failure_data.user_failure_data:
            return str(fault.description)
        refused = [one for one in result.get_asset_check_evaluations() if not one.passed]
        blocking = [one for one in refused if one.severity == AssetCheckSeverity.ERROR]
        assert blocking, event.step_failure_data.error
        return str(blocking[0].description)
    assert result.success
    return ""


def type_in(project: Project, *arguments: str) -> Result:
    """A command typed in the project's folder, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in project.environment().items():
            patch.setenv(name, value)
        patch.chdir(project.folder)
        ended = CliRunner().invoke(commands, arguments)
    # `main` tells a user's error in a line; any other would be a traceback.
    assert isinstance(ended.exception, SystemExit | UserError | None), ended.exc_info
    return ended


def follow(project: Project, line: str) -> None:
    """Do what a message prescribes, in this process."""
    for command in line.split(" && "):
        program, *arguments = shlex.split(command)
        if program == "dagster":
            assert ask(project, arguments[-1]) == ""
        else:
            ended = CliRunner().invoke(commands, arguments)
            assert ended.exit_code == 0, ended.output


@contextmanager
def history_of(project: Project) -> Iterator[DagsterInstance]:
    """Dagster's history of what was run in a project's folder, to which its own is relative."""
    with chdir(project.folder), DagsterInstance.from_config(str(project.folder)) as instance:
        yield instance


UNPROMISED = ("metrics.jsonl", "program.log", "result.json", "spec.json")
"""Files that say how long something took."""


def content(artifact: Artifact) -> dict[str, str | None]:
    """The promised bytes of an artifact; evaluation and verdict promise figures alone."""
    if artifact.manifest.kind == "eval_metrics":
        return {"metrics": str(artifact.stats["metrics"])}
    if artifact.manifest.kind == "model_version":
        return {"promoted": str(artifact.stats["promoted"])}
    files = artifact.manifest.files
    return {entry.path: entry.sha256 for entry in files if entry.path not in UNPROMISED}


class TrainingHere(LocalTrainingRunner):
    """Training and evaluation without a child process."""

    def train(self, context: AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        from tests.recipes.conftest import train_here

        assert spec.training.placement.strategy is None, "these run on the processor"
        handlers = {number: signal.getsignal(number) for number in (SIGINT, SIGTERM)}
        try:
            return train_here(spec, context.log.info)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def evaluate(self, context: AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        Path(spec.output).mkdir(parents=True, exist_ok=True)
        measure(spec, context.log.info)
        result: dict[str, Any] = json.loads((Path(spec.output) / "result.json").read_text())
        return result


class ProjectHere:
    """A project whose graph and commands run in this process."""

    def __init__(self, project: Project) -> None:
        self.project = project

    @property
    def state(self) -> RegistryState:
        return LocalRegistry(self.project.folder / "store", "manual").state()

    @property
    def wanted(self) -> int:
        found = self.state.find("wanted")
        assert found
        return found.version

    def say(self, *arguments: str) -> str:
        """A command, as a person types it."""
        ended = type_in(self.project, *arguments)
        assert ended.exit_code == 0, ended.output
        return ended.output
