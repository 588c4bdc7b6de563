"""Typed settings of one pipeline, read from one file in `config/`.

The top-level keys are the asset names; each stage's own package defines what stands under them.
"""

import difflib
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from artifacts.errors import PREFIX_VARIABLE, UserError
from artifacts.examples import Form
from artifacts.settings import Settings
from artifacts.storage.files import is_local
from artifacts.yaml_files import read_yaml
from llm_assets.gate.settings import ModelVersionSettings
from llm_assets.operation_settings import (
    AutomationSettings,
    ForgettingSettings,
    NotificationSettings,
    RetentionSettings,
)
from recipes.evaluation.settings import EvaluationSettings
from recipes.settings.recipe import (
    RECIPES,
    BaseModelSettings,
    ContinuedPretrainingSettings,
    RecipeSettings,
)
from serving.settings import EndpointSettings
from spark_jobs.read.settings import Files, RawCorpusSettings
from spark_jobs.settings import (
    COPIED_BY_PROCESS,
    DOCUMENTS_IN_MEMORY,
    HELD_OUT_IN_MEMORY,
    CleanCorpusSettings,
    TokenizedShardsSettings,
)

CONFIG_VARIABLE = "LLM_ASSETS_CONFIG"
DEFAULT_CONFIG = "config/smollm2_package_docs.yaml"
OTHER_FILES = ("dagster.yaml", "workspace.yaml")

FORM_WORDS: dict[Form, str] = {
    "pretraining": "plain text",
    "conversations": "conversations",
    "pairs": "pairs of a text and what to write for it",
    "labeled": "labeled texts",
    "preferences": "prompts with a chosen and a rejected answer",
}

Platform = Literal["local", "google_cloud"]

Model = TypeVar("Model", bound=BaseModel)


class RunnerSettings(Settings):
    """Sets where one kind of work runs, apart from the platform."""

    runner: Platform | None = None
    """Where this work runs; the platform decides where absent."""


class SparkSettings(RunnerSettings):
    """Where the Spark stages run, and with how much."""

    driver_memory: str = "2g"
    """Heap of the local Spark driver, as Spark writes sizes."""
    partitions: int = Field(default=4, ge=1)
    """Parallel tasks of a local Spark stage; never changes what is made."""
    ui: bool = True
    """Whether a local session serves Spark's own pages while it runs, on a free port of 127.0.0.1;
    the run's log has the link."""
    copied_by_process: int = Field(default=COPIED_BY_PROCESS, ge=0)
    """Most megabytes of files in buckets, as they are stored, that `raw_corpus` copies in its own
    process; past it tasks of Spark copy them, with the same result to the byte."""
    documents_in_memory: int = Field(default=DOCUMENTS_IN_MEMORY, ge=0)
    """Most documents, those of the lineage's record included, that are decided over in the driver's
    Python, at 970 bytes each; past it Spark's joins decide the same, to the byte."""
    held_out_in_memory: int = Field(default=HELD_OUT_IN_MEMORY, ge=0)
    """Most held-out text, in megabytes, whose n-grams every task holds, at 5 bytes for each of the
    text; past it Spark joins them with the other text's, with the same shards to the byte."""


class TrainingRunnerSettings(RunnerSettings):
    """Where training and evaluation run."""

    restarts: int = Field(default=3, ge=0)
    """How often an interrupted training (exit code 75) is started again within one run."""


class PipelineSettings(Settings):
    """Everything one pipeline file may say."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The pipeline's name: lower-case letters, digits and underscores."""
    description: str = ""
    """One sentence for people."""
    platform: Platform = "local"
    """Where the work is done: this machine, or Google Cloud."""
    store: str = ".llm_assets/store"
    """Root of all artifacts: a folder, or `gs://bucket/prefix`."""
    key_prefix: str | None = None
    """Prefix of the asset keys, for a second pipeline beside the first."""
    owners: tuple[str, ...] = ()
    """Who answers for the assets: e-mail addresses, or `team:name`."""
    retrain_cron: str = "0 3 * * 1"
    """When the schedule retrains, as a cron line in `automation.time_zone`."""

    raw_corpus: RawCorpusSettings
    clean_corpus: CleanCorpusSettings = CleanCorpusSettings()
    tokenized_shards: TokenizedShardsSettings = TokenizedShardsSettings()
    base_model: BaseModelSettings
    checkpoint: RecipeSettings = ContinuedPretrainingSettings()
    eval_metrics: EvaluationSettings = EvaluationSettings()
    model_version: ModelVersionSettings = ModelVersionSettings()
    endpoint: EndpointSettings = EndpointSettings()
    retention: RetentionSettings = RetentionSettings()
    forgetting: ForgettingSettings = ForgettingSettings()
    automation: AutomationSettings = AutomationSettings()
    notifications: NotificationSettings = NotificationSettings()

    spark: SparkSettings = SparkSettings()
    training: TrainingRunnerSettings = TrainingRunnerSettings()

    @property
    def form(self) -> Form:
        """What the corpus consists of, text to replay aside."""
        return self.checkpoint.form

    @model_validator(mode="after")
    def _sources_fit_the_recipe(self) -> Self:
        replayed = self.clean_corpus.split.replayed
        for name, form in self.raw_corpus.forms.items():
            wanted = "pretraining" if name in replayed else self.checkpoint.form
            if form != wanted:
                raise ValueError(
                    f"the recipe {self.checkpoint.recipe} learns from {FORM_WORDS[wanted]}, but "
                    f"the source {name!r} gives {FORM_WORDS[form]}; its key `examples` says which "
                    "columns are an example"
                )
        return self

    @model_validator(mode="after")
    def _jobs_reach_what_is_pinned(self) -> Self:
        for source in self.raw_corpus.sources:
            is_here = isinstance(source, Files) and source.pin and is_local(source.path)
            if is_here and (self.spark.runner or self.platform) == "google_cloud":
                raise ValueError(
                    f"the source {source.name!r} pins files of this machine, which Spark on Google "
                    "Cloud cannot read; leave out `pin`, or put them into a bucket"
                )
        return self

    @model_validator(mode="after")
    def _platform_copies_requests(self) -> Self:
        if self.platform == "google_cloud" and 0 in self.endpoint.rollout.steps:
            raise ValueError(
                "`endpoint.rollout.steps` begins with copies of requests (a share of 0), which "
                "Vertex AI does not make; shares there are above 0"
            )
        return self


def config_path() -> Path:
    """The pipeline file in force: `LLM_ASSETS_CONFIG`, else the default one or the only one."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named is not None and not named.strip():
        raise UserError(
            f"{CONFIG_VARIABLE} is set, but empty. Set it to a pipeline file, or for the default "
            f"one, {DEFAULT_CONFIG}: unset {CONFIG_VARIABLE}"
        )
    if named or Path(DEFAULT_CONFIG).exists():
        return Path(named or DEFAULT_CONFIG)
    # In a project of its own, the pipeline file lies beside these.
    found = _pipeline_files()
    return found[0] if len(found) == 1 else Path(DEFAULT_CONFIG)


def load_settings(path: Path) -> PipelineSettings:
    """Read and check a pipeline file; raises UserError listing every fault.

    From then on messages name its asset keys, here and in the programs that are started.
    """
    settings = read_settings_file(path, PipelineSettings, CONFIG_VARIABLE)
    os.environ[PREFIX_VARIABLE] = settings.key_prefix or ""
    return settings


def changed_settings(path: Path, changes: Mapping[str, Any]) -> PipelineSettings:
    """A pipeline file's settings with others in the place of some.

    Args:
        changes: dotted key, such as `checkpoint.budget.steps`, to value.

    Raises:
        UserError: as `load_settings`; also where a key leads through a value that has no keys.
    """
    content = _read_mapping(path, PipelineSettings, CONFIG_VARIABLE)
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = content
        for section in sections:
            if inner.get(section) is None:
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                raise UserError(f"{key}: in {path}, `{section}` has no keys of its own.")
        inner[name] = value
    said = ", ".join(f"{key}={value}" for key, value in changes.items())
    return _validate(content, PipelineSettings, f"{path} with {said}")


def read_settings_file(path: Path, model: type[Model], variable: str) -> Model:
    """Read a YAML file, which the environment variable names, into a settings model.

    Raises:
        UserError: the file is absent, is not YAML, or has wrong settings. All faults are listed at
            once, each with its key and, for an unknown key, the nearest valid name.
    """
    return _validate(_read_mapping(path, model, variable), model, str(path))


def _read_mapping(path: Path, model: type[BaseModel], variable: str) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except FileNotFoundError as error:
        raise UserError(
            f"There is no settings file {path}. Set {variable} to one of: "
            + (
                ", ".join(map(str, _pipeline_files()))
                or "a YAML file (`llm-assets init` writes one)"
            )
        ) from error
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read as a settings file: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        keys = ", ".join(list(model.model_fields)[:6])
        raise UserError(f"{path} must be a YAML mapping; its top-level keys are {keys}, ...")
    return content


def _validate(content: dict[str, Any], model: type[Model], source: str) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = [_describe(fault, model) for fault in error.errors()]
        raise UserError(f"{source} has wrong settings:\n  " + "\n  ".join(faults)) from error


def _pipeline_files() -> list[Path]:
    here = [path for path in Path().glob("*.yaml") if path.name not in OTHER_FILES]
    return sorted([*Path("config").glob("*.yaml"), *here])


def _describe(fault: Any, model: type[BaseModel]) -> str:
    # A source's tag tells which of several is meant; there is one recipe.
    location = [str(part) for part in fault["loc"] if part not in RECIPES]
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        names = _field_names(model, fault["loc"][:-1])
        nearest = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.0)
        hint = f"did you mean `{nearest[0]}`? " if nearest else ""
        return f"{key}: unknown key; {hint}Valid here: {', '.join(names)}."
    return f"{key}: {fault['msg']} (got {fault['input']!r})"


def _field_names(model: Any, location: tuple[Any, ...]) -> list[str]:
    """The keys that are valid at a location of the settings tree."""
    models = models_in(model)
    for part in location:
        inner: list[type[BaseModel]] = []
        for candidate in models:
            if part in candidate.model_fields:
                inner += models_in(candidate.model_fields[part].annotation)
        # A list index changes nothing; a union's tag names the variant by its `type` or `recipe`.
        models = inner or [m for m in models if _tag(m) == part] or models
    return sorted({name for candidate in models for name in candidate.model_fields})


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The settings models that a field's annotation holds, inside lists and unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, list, dict, Annotated):
        return [model for argument in get_args(annotation) for model in models_in(argument)]
    return []


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("type") or model.model_fields.get("recipe")
    return get_args(field.annotation)[0] if field and get_args(field.annotation) else None
