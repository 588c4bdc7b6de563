"""Artifacts of the store as inputs of your own Dagster assets."""

from pathlib import Path
from typing import Any

from dagster import ConfigurableIOManager, InputContext, OutputContext

from artifacts.errors import UserError, make_command
from artifacts.store.store import Artifact
from llm_assets.assets.stage import asset_key, user_faults
from llm_assets.pipeline import PipelineResource
from recipes.evaluation.settings import SCORES_NAME
from recipes.spec import MODEL_FOLDER

TABLES = ("part-*.parquet", "*.documents.parquet", SCORES_NAME, "**/*.parquet")
"""Which files are an artifact's table, the first that are there: beside documents and scores lie
lists of other things."""


class ArtifactIOManager(ConfigurableIOManager):
    """Loads the current artifact of an asset as whatever an input is annotated as.

    An `Artifact` (or no annotation) gives its folder, manifest and figures; a `Path` its folder on
    this machine; a `pyarrow.Table` or a `pandas.DataFrame` its documents, or its scores; a class of
    transformers, such as `PreTrainedModel` or `PreTrainedTokenizerBase`, what the folder of a
    `checkpoint` or `base_model` holds. Files are compared with their checksums before.
    docs/automation.md has an example.
    """

    config_path: str
    """The pipeline file."""

    def load_input(self, context: InputContext) -> Any:
        pipeline = PipelineResource(config_path=self.config_path)
        with user_faults(pipeline):
            name = context.asset_key.path[-1]
            if context.asset_key != asset_key(pipeline.settings, name):
                raise UserError(
                    f"{self.config_path} has no asset {context.asset_key.to_user_string()}; its "
                    f"assets begin with the `key_prefix`, {pipeline.settings.key_prefix!r}."
                )
            artifact = pipeline.record.find_current(name)
            if artifact is None:
                raise UserError(
                    f"`{name}` is not in {pipeline.store.root}. Make it, where {self.config_path} "
                    f"is the pipeline file, with: {make_command(name)}"
                )
            artifact.verify()
            return _loaded(artifact, context.dagster_type.typing_type)

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        # Not called for a stage, which returns no value.
        raise UserError(
            f"{context.asset_key.to_user_string()}: the store's artifacts are made by the pipeline "
            "alone. Give an asset of your own an IO manager of yours, by its `io_manager_key`."
        )


def _loaded(artifact: Artifact, annotation: Any) -> Any:
    """An artifact as a type; raises UserError where it cannot be given as that."""
    if annotation in (Artifact, Any):
        return artifact
    if annotation is Path:
        return artifact.path
    # The package's name is enough, and imports none of these packages until an input asks for it.
    package = getattr(annotation, "__module__", "").partition(".")[0]
    kind = artifact.manifest.kind
    found = (sorted(artifact.path.glob(name)) for name in TABLES)
    tables = next(filter(None, found), [])
    if package in ("pyarrow", "pandas") and tables:
        from pyarrow import dataset

        table = dataset.dataset(tables).to_table()
        return table.to_pandas() if package == "pandas" else table
    folder = artifact.path / MODEL_FOLDER if kind == "checkpoint" else artifact.path
    if package == "transformers" and (folder / "config.json").exists():
        import transformers

        if issubclass(annotation, transformers.PreTrainedTokenizerBase):
            return transformers.AutoTokenizer.from_pretrained(folder)
        (architecture,) = transformers.AutoConfig.from_pretrained(folder).architectures
        return getattr(transformers, architecture).from_pretrained(folder, dtype="auto")
    raise UserError(
        f"`{kind}` cannot be given as {annotation}: annotate the input as Artifact, Path"
        + (", pyarrow.Table or pandas.DataFrame" if tables else "")
        + (" or a class of transformers." if (folder / "config.json").exists() else ".")
    )
