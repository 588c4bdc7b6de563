"""The pipeline in force, as the commands use it outside Dagster."""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from artifacts.errors import DamagedArtifact, UserError, shown
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings, config_path, load_settings, refuse_second_file
from llm_assets.history import make_history_private, other_home
from llm_assets.registry.base import LocalRegistry, Registry

if TYPE_CHECKING:
    from llm_assets.endpoint.base import ServingPlatform


@dataclass(frozen=True)
class Session:
    """Settings, store and registry of one pipeline, and the platform that serves its champion.

    What needs Dagster is opened when it is asked for: its import takes longer than most commands.
    """

    settings: PipelineSettings
    path: Path
    """The pipeline file."""

    # A frozen dataclass permits this: the value goes into the instance's `__dict__` without an
    # assignment to an attribute.
    @cached_property
    def record(self) -> Pipeline:
        """Which artifact of each asset is current."""
        return Pipeline(Store(self.settings.store), self.settings.name)

    @cached_property
    def registry(self) -> Registry:
        """The registry of the pipeline's model versions."""
        if self.settings.platform == "local":
            return LocalRegistry.of(self.record)
        return self._resources["registry"].open(self._resources["pipeline"])

    @property
    def serving(self) -> "ServingPlatform":
        return self._resources["serving"]

    @cached_property
    def _resources(self) -> dict[str, Any]:
        from llm_assets.platform import build_resources

        return build_resources(self.settings, str(self.path))


def open_session() -> Session:
    """Open the pipeline named by `LLM_ASSETS_CONFIG`, or the default one."""
    path = config_path()
    session = Session(load_settings(path), path)
    # Commands that need the record report this themselves; the board starts without it.
    with suppress(DamagedArtifact, OSError):
        refuse_second_file(path, session.settings, session.record)
    return session


def use_this_folders_history() -> None:
    """Have Dagster read dagster.yaml of this folder; raises UserError where it is no project."""
    if not Path("dagster.yaml").exists():
        raise UserError(
            "There is no dagster.yaml here. Run this in the project's folder, or make this folder "
            "one with: llm-assets init FOLDER_OF_TEXT"
        )
    tell_of_other_home()
    # In the environment, since programs that are started from here need the same history.
    os.environ["DAGSTER_HOME"] = os.getcwd()
    make_history_private()


def tell_of_other_home() -> None:
    """Warn on standard error if DAGSTER_HOME names another history than this folder's."""
    if message := other_home(Path.cwd()):
        click.echo(shown(message), err=True)
