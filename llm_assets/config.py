"""Typed settings of one pipeline, read from one file in `config/`.

The top-level keys are the asset names; each stage's own package defines what stands under them.
"""

import os
import re
import shlex
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from artifacts.errors import CONFIG_VARIABLE as CONFIG_VARIABLE
from artifacts.errors import PREFIX_VARIABLE, UserError
from artifacts.examples import Form
from artifacts.settings import Settings
from artifacts.storage.files import Place, is_local
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.exam.settings import ExamSettings
from llm_assets.gate.verdict import ModelVersionSettings
from llm_assets.operation_settings import (
    AutomationSettings,
    Cron,
    ForgettingSettings,
    NotificationSettings,
    RetentionSettings,
)
from llm_assets.settings_file import (
    Model,
    check_settings,
    did_you_mean,
    pipeline_files,
    read_mapping,
    read_settings_file,
)
from llm_assets.study.settings import SOURCE as STUDY_SOURCE
from llm_assets.study.settings import StudySettings
from recipes.evaluation.settings import EvaluationSettings
from recipes.model.base_model import BaseModelSettings
from recipes.settings import RecipeSettings, spell_out_strategy, training_settings
from serving.settings import QUANTIZED, EndpointSettings
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.settings import (
    COPIED_BY_PROCESS,
    DOCUMENTS_IN_MEMORY,
    HELD_OUT_IN_MEMORY,
    CleanCorpusSettings,
    TokenizedShardsSettings,
)

DEFAULT_CONFIG = "config/invented_products.yaml"

FORM_WORDS: dict[Form, str] = {
    "pretraining": "plain text",
    "conversations": "conversations",
    "pairs": "pairs of an input and a target text",
    "labeled": "labeled texts",
    "preferences": "prompts with a chosen and a rejected answer",
}

Platform = Literal["local", "google_cloud"]
TrainingPlace = Literal["local", "google_cloud", "google_batch", "tpu_vm"]


class SparkSettings(Settings):
    """Where the Spark stages run, and with which resources."""

    runner: Platform | None = None
    """Where this work runs; if unset, `platform` decides."""
    driver_memory: str = Field(default="2g", pattern=r"^[1-9]\d*[kmgtKMGT]$")
    """Heap size of the local Spark driver, in Java's notation: `512m`, `4g`."""
    partitions: int = Field(default=4, ge=1)
    """Parallel tasks of a local Spark stage; never affects the result."""
    ui: bool = True
    """Whether a local session serves Spark's own web UI while it runs, on a free port of 127.0.0.1;
    the run's log has the link."""
    copied_by_process: int = Field(default=COPIED_BY_PROCESS, ge=0)
    """Maximum size of files in buckets, in megabytes as stored there, that `raw_corpus` copies in
    its own process. Above this limit, Spark tasks copy them; the result is the same, byte for
    byte."""
    documents_in_memory: int = Field(default=DOCUMENTS_IN_MEMORY, ge=0)
    """Maximum number of documents, including those in the lineage's record, that the driver
    deduplicates and assigns to splits in memory, at 970 bytes each. Above this limit, Spark joins
    do so; the result is the same, byte for byte."""
    held_out_in_memory: int = Field(default=HELD_OUT_IN_MEMORY, ge=0)
    """Maximum size of held-out text, in megabytes, whose n-grams every task holds in memory, at 5
    bytes per byte of text. Above this limit, Spark joins them with the n-grams of the other text;
    the shards are the same, byte for byte."""


class TrainingRunnerSettings(Settings):
    """Where training and evaluation run."""

    runner: TrainingPlace | None = None
    """Where this work runs; if unset, `platform` decides. `google_cloud` is Vertex AI;
    `google_batch` creates machines in your project for each job, without a service surcharge, and
    deletes them afterward; `tpu_vm` does the same with a TPU machine for training, and evaluates
    with `google_batch`."""
    restarts: int = Field(default=3, ge=0)
    """How many times in a row a run restarts local training that was interrupted (exit code 75) or
    lost a worker; a new checkpoint resets the count. On Google Cloud, `restarts` in
    `config/google_cloud.yaml` applies instead."""


EXAM_FIGURES = "exam_"
"""Prefix of an exam's metrics."""
LONGEST_NAME = 63
"""Longest value of Dagster's tags, and longest id of a model or endpoint on Vertex AI
(`UploadModelRequest.model_id`, `endpoint_id`)."""


def name_from(text: str, otherwise: str) -> str:
    """A pipeline's name made from what people call something.

    Accents are dropped, so that `Bücher` is `bucher`; other signs part words.

    Args:
        otherwise: the name where nothing is left of the text, and its start where that begins with
            a digit.
    """
    signs = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(sign for sign in signs if not unicodedata.combining(sign))
    name = re.sub(r"[^a-z0-9]+", "_", letters).strip("_")
    if not name[:1].isalpha():
        name = f"{otherwise}_{name}"
    # Cut after an underscore, it would be refused on Google Cloud.
    return name[:LONGEST_NAME].rstrip("_")


def check_name(name: str) -> str:
    """A pipeline's name, if it is one; raises ValueError otherwise."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"a pipeline's name is at most {LONGEST_NAME} lowercase letters, digits and "
            f"underscores, and begins with a letter, such as {name_from(name, 'text')!r}"
        )
    return name


OWNER = re.compile(r"\b[\w.%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,7}\b|team:.+", re.ASCII)
"""What Dagster accepts as an owner."""


def _check_owner(name: str) -> str:
    if not OWNER.fullmatch(name):
        raise ValueError(f"{name!r} is no e-mail address; for a team, write `team:{name}`")
    return name


Owner = Annotated[str, AfterValidator(_check_owner)]


class PipelineSettings(Settings):
    """All settings of a pipeline file."""

    name: Annotated[str, AfterValidator(check_name)]
    """The pipeline's name: at most 63 lowercase letters, digits and underscores; with `platform:
    google_cloud`, no underscore at the end."""
    description: str = ""
    """A one-sentence description for people."""
    platform: Platform = "local"
    """Where the work is done: this machine, or Google Cloud."""
    store: Place = ".llm_assets/store"
    """Root of all artifacts: a folder, or `gs://bucket/prefix`."""
    key_prefix: str | None = Field(default=None, pattern=r"^([a-zA-Z_][a-zA-Z0-9_]*)?$")
    """Prefix of the asset keys and, followed by `__`, of the names of jobs, steps, sensors,
    schedules and resources, for running a second pipeline beside the first: letters, digits and
    underscores, with no digit first."""
    owners: tuple[Owner, ...] = ()
    """Who is responsible for the assets: e-mail addresses, or `team:name`."""
    retrain_cron: Cron = "0 3 * * 1"
    """When the schedule retrains, as a cron expression in `automation.time_zone`. The schedule is
    off until you turn it on in the UI."""

    raw_corpus: RawCorpusSettings
    clean_corpus: CleanCorpusSettings = CleanCorpusSettings()
    tokenized_shards: TokenizedShardsSettings = TokenizedShardsSettings()
    base_model: BaseModelSettings
    checkpoint: RecipeSettings = Field(default_factory=lambda: training_settings({}))
    exam: ExamSettings | None = None
    """Questions about facts in the text, to test whether a model knows what it has read. If unset,
    the graph has no `exam` asset."""
    study: StudySettings | None = None
    """Text made from the training documents, in many forms, to train on in addition to them. If
    unset, the graph has no `study` asset."""
    eval_metrics: EvaluationSettings = EvaluationSettings()
    model_version: ModelVersionSettings = ModelVersionSettings()
    endpoint: EndpointSettings = EndpointSettings()
    retention: RetentionSettings = RetentionSettings()
    forgetting: ForgettingSettings = ForgettingSettings()
    automation: AutomationSettings = AutomationSettings()
    notifications: NotificationSettings = NotificationSettings()

    spark: SparkSettings = SparkSettings()
    training: TrainingRunnerSettings = TrainingRunnerSettings()
    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of your own stages, by asset name (docs/new_stage.md)."""

    def stage(self, name: str, model: type[Model]) -> Model:
        """The section of a stage; raises UserError where that of one of your own is wrong."""
        if name in type(self).model_fields:
            return getattr(self, name)
        values = self.stages.get(name, {})
        return check_settings(values, model, f"`stages.{name}` of the pipeline {self.name}")

    def dagster_name(self, name: str) -> str:
        """What a step, job, sensor or schedule of the pipeline is called in Dagster."""
        return f"{self.key_prefix}__{name}" if self.key_prefix else name

    def resource_key(self, name: str) -> str:
        """The key of a resource, unique in a code location that has resources of others."""
        return f"{self.key_prefix or 'llm_assets'}__{name}"

    @property
    def training_place(self) -> TrainingPlace:
        """Where training and evaluation run: with all else, unless a place of their own is set."""
        return self.training.runner or self.platform

    @property
    def uses_cloud(self) -> bool:
        """Whether any work runs as jobs of Google Cloud."""
        places = (self.platform, self.spark.runner, self.training_place)
        return any(place not in (None, "local") for place in places)

    def leaves_out(self, name: str) -> bool:
        """Whether the graph has no such stage, because the file has no section for it."""
        return name in type(self).model_fields and getattr(self, name) is None

    @property
    def form(self) -> Form:
        """What the corpus consists of, apart from plain text beside conversations."""
        return self.checkpoint.form

    @property
    def measured(self) -> EvaluationSettings:
        """How models are measured: on at least as many documents as the gate needs, since with
        fewer it would never judge. An exam's gate needs facts instead."""
        gate = self.model_version.gate
        needed = 0 if gate.metric == "exam" else gate.minimum_documents
        least = max(needed, self.eval_metrics.minimum_documents)
        return self.eval_metrics.model_copy(update={"minimum_documents": least})

    @model_validator(mode="after")
    def _fits_the_cloud(self) -> Self:
        if self.platform == "google_cloud" and self.name.endswith("_"):
            raise ValueError(
                f"Vertex AI names its model and endpoint after `name`, {self.name!r}, which may "
                "not end with an underscore there: take it out"
            )
        if self.uses_cloud and "://" not in self.store:
            raise ValueError(
                f"jobs on Google Cloud cannot read `store`, {self.store!r}, on this machine: set "
                "`store: gs://BUCKET/PREFIX`, in the bucket that the cloud project's file names"
            )
        return self

    @model_validator(mode="after")
    def _sources_fit_the_recipe(self) -> Self:
        replayed = self.clean_corpus.split.replayed
        if replayed and self.checkpoint.form not in ("pretraining", "conversations"):
            raise ValueError(
                f"the recipe {self.checkpoint.recipe} learns from "
                f"{FORM_WORDS[self.checkpoint.form]}, beside which no plain text can be replayed; "
                f"take the assignments to `replay` ({', '.join(sorted(replayed))}) out of "
                "`clean_corpus.split.sources`"
            )
        form, places = self.checkpoint.form, self.clean_corpus.split.sources
        for name, held in self.raw_corpus.forms.items():
            place, is_text = places.get(name), held == "pretraining"
            is_beside = is_text and place == "train" and form == "conversations"
            if is_beside or held == ("pretraining" if place == "replay" else form):
                continue
            way_out = "set its `examples` to the columns of an example"
            if place == "replay":
                way_out = "it can replay plain text alone: take the source out of `replay`"
            elif is_text and form == "conversations":
                way_out += (
                    ", or assign it to `train` in `clean_corpus.split.sources`, where all of its "
                    "text is learned beside them"
                )
            elif is_text:
                way_out += ", or take it out: no plain text is learned beside them"
            raise ValueError(
                f"the recipe {self.checkpoint.recipe} learns from {FORM_WORDS[form]}, but "
                f"the source {name!r} contains {FORM_WORDS[held]}; {way_out}"
            )
        return self

    @model_validator(mode="after")
    def _named_sources_exist(self) -> Self:
        sources, split = list(self.raw_corpus.forms), self.clean_corpus.split.sources
        mixing = self.tokenized_shards.mixing
        mixed = [*sources, STUDY_SOURCE] if self.study is not None else sources
        for key, names, allowed in (
            ("clean_corpus.split.sources", split, sources),
            ("tokenized_shards.mixing", mixing, mixed),
        ):
            for name in names:
                if name not in allowed:
                    raise ValueError(
                        f"`{key}` names the source {name!r}, which is not among "
                        f"`raw_corpus.sources`; {did_you_mean(name, allowed)}"
                        f"Sources: {', '.join(allowed)}"
                    )
        for name in mixing:
            # A source that is not assigned has text in every split.
            if split.get(name, "train") != "train":
                raise ValueError(
                    f"`tokenized_shards.mixing` names the source {name!r}, which has no training "
                    f"text, since `clean_corpus.split.sources` assigns it to `{split[name]}`; take "
                    "it out of one of them"
                )
        if self.checkpoint.replay_share and not self.clean_corpus.split.replayed:
            raise ValueError(
                f"`checkpoint.replay_share` is {self.checkpoint.replay_share:g}, but no source has "
                "text to replay; assign one of general text to `replay` in "
                f"`clean_corpus.split.sources`, or set the share to 0. Sources: "
                f"{', '.join(self.raw_corpus.forms)}"
            )
        return self

    @model_validator(mode="after")
    def _gate_asks_what_is_measured(self) -> Self:
        """Refuse a metric or floor that no model is measured by: it would prevent every
        promotion."""
        gate = self.model_version.gate
        tasks = tuple(f"{task.name}_" for task in self.eval_metrics.lm_eval_tasks)
        by_exam = ["model_version.gate.metric"] if gate.metric == "exam" else []
        by_task: list[str] = []
        for name in gate.floors:
            if name.startswith((EXAM_FIGURES, *tasks)):
                # A task's name may begin like the exam's metrics.
                group = by_task if name.startswith(tasks) else by_exam
                group.append(f"model_version.gate.floors.{name}")
            elif self.checkpoint.answers_questions and not name.startswith(
                ("held_out_", "general_")
            ):
                raise ValueError(
                    f"`model_version.gate.floors.{name}` is no metric of this pipeline, so nothing "
                    "could be promoted: `eval_metrics.tasks` has no task whose name it begins with"
                )
        # With such a recipe the exam is not taken, so the section alone does no harm.
        if not self.checkpoint.answers_questions and (by_exam or by_task):
            keys = " and ".join(f"`{key}`" for key in [*by_exam, *by_task])
            raise ValueError(
                f"with the recipe {self.checkpoint.recipe} and its settings, models are measured "
                "by scores of held-out examples and answer no questions, so nothing could be "
                f"promoted; take out {keys}, so that held-out examples decide"
            )
        if by_exam and self.exam is None:
            raise ValueError(
                f"`{by_exam[0]}` asks for an exam, but there is no section `exam`, so nothing "
                "could be promoted; add one (docs/knowledge.md), or take the key out, so that "
                "held-out text decides"
            )
        return self

    @model_validator(mode="after")
    def _gate_judges_what_serves(self) -> Self:
        by_exam = self.model_version.gate.metric == "exam"
        # An engine with quantized weights gives bits of text alone; answers and other metrics are
        # measured on the weights as trained.
        if self.endpoint.weights not in QUANTIZED or (
            self.checkpoint.is_judged_in_bits and not by_exam
        ):
            return self
        reason = (
            "`model_version.gate.metric` is `exam`" if by_exam else "the recipe's metric is no loss"
        )
        raise ValueError(
            f"{reason}, so the gate tests the unquantized weights, but `endpoint.weights` serves "
            f"{self.endpoint.weights}; leave it out"
        )

    @model_validator(mode="after")
    def _text_can_be_read_on(self) -> Self:
        if not self.automation.least_coverage:
            return self
        if self.checkpoint.starts_from == "random":
            raise ValueError(
                f"the recipe {self.checkpoint.recipe} begins with random weights, so no run reads "
                "what the one before left; take out `automation.least_coverage`"
            )
        if not self.automation.continue_from_champion:
            raise ValueError(
                "`automation.least_coverage` needs runs that continue from one another; take it "
                "out, or set `automation.continue_from_champion: true`"
            )
        return self


def config_path() -> Path:
    """The pipeline file in force: `LLM_ASSETS_CONFIG`, else the default one or the only one."""
    value = os.environ.get(CONFIG_VARIABLE)
    if value is not None and not value.strip():
        raise UserError(
            f"{CONFIG_VARIABLE} is set, but empty. Set it to a pipeline file, or for the default "
            f"one, {DEFAULT_CONFIG}: unset {CONFIG_VARIABLE}"
        )
    if value or Path(DEFAULT_CONFIG).exists():
        return Path(value or DEFAULT_CONFIG)
    # In a project without config/, the pipeline file lies beside the project files.
    paths = pipeline_files()
    # Of several nobody knows which is meant; the message about an absent default names them.
    return paths[0] if len(paths) == 1 else Path(DEFAULT_CONFIG)


def command() -> str:
    """What a message begins a command with: `llm-assets`, and the pipeline file if one is named."""
    path = os.environ.get(CONFIG_VARIABLE)
    return f"llm-assets --config {shlex.quote(path)}" if path else "llm-assets"


def say_how_found(path: str | Path) -> str:
    """How commands that are advised find a pipeline file that they would not find by themselves."""
    line = f"export {CONFIG_VARIABLE}={shlex.quote(str(path))}"
    return f"For such a command to use this pipeline file, first: {line}"


def load_settings(path: Path) -> PipelineSettings:
    """Read and check a pipeline file; raises UserError listing every fault.

    From then on, messages name asset keys with its prefix, also in programs started from here.
    """
    settings = read_settings_file(path, PipelineSettings, CONFIG_VARIABLE)
    os.environ[PREFIX_VARIABLE] = settings.key_prefix or ""
    return settings


def refuse_second_file(path: Path, settings: PipelineSettings, record: Pipeline) -> None:
    """Raise UserError where another pipeline file of this name has the same store.

    A file that is gone, or has another name or store by now, was moved or changed.
    """
    other = Path(record.history().file or path.resolve())
    # For a file in another user's folder, `os.path.exists` is False where `Path.exists` may raise.
    if other == path.resolve() or not os.path.exists(other):
        return
    try:
        other_settings = read_settings_file(other, PipelineSettings, CONFIG_VARIABLE)
    except UserError:
        return
    root: str | None = other_settings.store.rstrip("/")
    if is_local(other_settings.store):
        # `store` is relative to where commands run: the project's folder, which has the file in it
        # or in config/, or the current folder.
        folders = (other.parent, other.parent.parent, Path())
        roots = (Store(str(folder / other_settings.store)).root for folder in folders)
        # If a project's folder was copied as a whole, each copy has a store with the record in it.
        root = next(
            (store_root for store_root in roots if os.path.exists(f"{store_root}/{record.path}")),
            None,
        )
    if other_settings.name == settings.name and record.store.root == root:
        raise UserError(
            f"{path.resolve()} and {other} have the same `name` ({settings.name}) and the same "
            f"`store` ({record.store.root}), so each would build on the other's artifacts and "
            "decisions. Give one of them another `name`. If one replaces the other, remove or "
            "rename the old file; nothing else is needed."
        )


def changed_settings(path: Path, changes: Mapping[str, Any]) -> PipelineSettings:
    """A pipeline file's settings with some of them replaced.

    Args:
        changes: dotted key, such as `checkpoint.budget.steps`, to value.

    Raises:
        UserError: as `load_settings`; also where a key leads through a value that has no keys.
    """
    content = read_mapping(path, PipelineSettings, CONFIG_VARIABLE)
    checkpoint = content.get("checkpoint")
    names_strategy = any(f"{key}.".startswith("checkpoint.placement.strategy.") for key in changes)
    if names_strategy and isinstance(checkpoint, dict):
        # Its short form, the strategy's own name, has no place for the key that is set.
        checkpoint["placement"] = spell_out_strategy(checkpoint.get("placement"))
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
    # The message has no values: one may be a secret in the wrong place.
    names = ", ".join(changes)
    return check_settings(content, PipelineSettings, f"{path} with another {names}")
