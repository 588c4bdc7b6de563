"""The asset `experiments`, a partition for each trial."""

import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster import (
    AssetExecutionContext,
    AssetsDefinition,
    DagsterInstance,
    DynamicPartitionsDefinition,
    MaterializeResult,
    MetadataValue,
    asset,
)

from artifacts.errors import UserError
from artifacts.store.identity import Identity, hash_json
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, layout
from llm_assets.assets.corpus import clean_corpus, raw_corpus, tokenized_shards
from llm_assets.assets.evaluation import evaluation_spec
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.stage import BuildPlan, asset_key, readable, stage, table, user_faults
from llm_assets.config import PipelineSettings, changed_settings
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.experiments.result import COLUMNS, SPLIT, TrialResult, caption, read_result, rows
from llm_assets.experiments.trials import Trial, parse_changes, plan_trials
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import (
    CODE_VERSION,
    EvaluationSettings,
    GenerationSettings,
    ModelSource,
)
from recipes.settings import package_of


# A trial is the graph up to the checkpoint, and a measurement, with a record of its own; what is
# equal among trials is made once. Neither the registry nor the endpoint is among what it makes, so
# it moves neither.
@stage(code_version=CODE_VERSION, group="model", kinds={"pytorch"}, pool="training")
def trial_metrics(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    identity: Identity,
    checkpoint: Artifact,
    base_model: Artifact,
) -> BuildPlan:
    """The trial's model, its base and the wanted version, measured on validation text."""
    settings = _alone(pipeline.settings.eval_metrics)
    shards = pipeline.record.current("tokenized_shards", needed_by="trial_metrics")
    inputs = {"tokenized_shards": shards.fingerprint}
    wanted = registry.open(pipeline).find("wanted")
    incumbent = None
    if wanted is not None:
        inputs["incumbent"] = wanted.model_fingerprint
        incumbent = ModelSource(path=wanted.model_url, fingerprint=wanted.weights)

    def build(draft: Draft) -> None:
        spec = evaluation_spec(pipeline, draft, checkpoint, shards, base_model, incumbent, settings)
        draft.stats |= training.evaluate(context, spec.model_copy(update={"split": SPLIT}))

    scoring = pipeline.settings.checkpoint.scoring()
    identity = identity.extend(
        settings=settings.content() | scoring | {"split": SPLIT},
        inputs=inputs,
        libraries=settings.libraries | package_of(pipeline.settings.checkpoint),
    )
    return BuildPlan(identity, build)


def _alone(settings: EvaluationSettings) -> EvaluationSettings:
    """The settings for the metric that decides, and nothing besides."""
    others = {
        "generation": GenerationSettings(samples=0),
        "tasks": (),
    }
    return settings.model_copy(update=others)


STAGES = (raw_corpus, clean_corpus, base_model, tokenized_shards, checkpoint, trial_metrics)
"""What a trial makes."""


class TrialPipeline(PipelineResource):
    """The pipeline with some settings changed, and what it makes on another record."""

    changes: dict[str, Any]
    """Dotted key to value."""
    trial: str

    @cached_property
    def settings_of_file(self) -> PipelineSettings:
        return changed_settings(Path(self.config_path), self.changes)

    @property
    def record(self) -> Pipeline:
        return trial_record(self, self.trial)


def trial_record(pipeline: PipelineResource, trial: str) -> Pipeline:
    """What a trial has made."""
    return Pipeline(pipeline.store, pipeline.settings.name, _record_path(pipeline, trial))


def _record_path(pipeline: PipelineResource, trial: str) -> str:
    return layout.trial_record(pipeline.settings.name, hash_json({"trial": trial}))


def run_trial(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    trial: Trial,
    resources: Mapping[str, Any],
) -> list[str]:
    """Make what a trial is about, in the step of `experiments`; the stages that were not there.

    Its record begins with what is current in the pipeline's, so held-out documents stay held out,
    and what the pipeline has made already is used.

    Args:
        resources: `spark`, `training`, `registry` and `serving` of the graph.

    Raises:
        UserError: what hinders a stage.
    """
    history = pipeline.record.history().model_dump_json(indent=2)
    pipeline.store.write_bytes(_record_path(pipeline, trial.name), history.encode())
    opened = TrialPipeline(
        config_path=pipeline.config_path, changes=trial.changes, trial=trial.name
    )
    made = []
    for made_by in STAGES:
        context.log.info(f"{made_by.name} of the trial {trial.name}")
        made_by.materialize({**resources, "context": context, "pipeline": opened}, {})
        if (context.get_output_metadata("result") or {})["made_now"]:
            made.append(made_by.name)
    return made


ASSET = "experiments"
RESULT = "result"
"""Name of the metadata that holds a trial's whole result."""
UI_COLUMNS = ("settings", "gain", "interval", "verdict")
"""Those of the table's columns that fit the UI; the others are metadata by themselves."""


def build_experiments(settings: PipelineSettings) -> AssetsDefinition:
    """The asset of all trials; whoever materializes a partition runs that trial."""

    @asset(
        name=ASSET,
        deps=[asset_key(settings, name) for name in ("raw_corpus", "base_model")],
        description="Models of other settings, measured on validation text against the version "
        "that is wanted; nothing of it is promoted or served. A partition is a trial and says what "
        "is changed, such as `checkpoint.optimizer.learning_rate=3e-5`: add some and materialize "
        "them, or use `llm-assets experiment`.",
        group_name=ASSET,
        kinds={"pytorch"},
        pool="training",
        partitions_def=partitions(settings),
    )
    def experiments(
        context: AssetExecutionContext,
        pipeline: PipelineResource,
        spark: SparkRunner,
        training: TrainingRunner,
        registry: RegistryResource,
        serving: ServingPlatform,
    ) -> MaterializeResult:
        with user_faults(pipeline):
            name = context.partition_key
            trial = read_trial(pipeline, name)
            resources = {
                "spark": spark,
                "training": training,
                "registry": registry,
                "serving": serving,
            }
            made = run_trial(context, pipeline, trial, resources)
            done = _results(context.instance, pipeline, name)
            return MaterializeResult(metadata=_metadata(done[name], done, made))

    return experiments


def partitions(settings: PipelineSettings) -> DynamicPartitionsDefinition:
    """A pipeline's trials, by their names."""
    return DynamicPartitionsDefinition(name=f"{settings.name}_trials")


def read_trial(pipeline: PipelineResource, name: str) -> Trial:
    """The trial that a partition is named by; raises UserError where it cannot be tried."""
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise UserError(f"{name!r}: {error}. Name a partition KEY=VALUE KEY=VALUE.") from error
    trials = plan_trials(Path(pipeline.config_path), parse_changes(words))
    if [trial.name for trial in trials] != [name]:
        raise UserError(
            f"The partition {name!r} is another way to write {trials[0].name!r}, or holds more "
            "than one trial. Delete it, and add one for each trial."
        )
    return trials[0]


def _results(
    instance: DagsterInstance, pipeline: PipelineResource, newest: str
) -> dict[str, TrialResult]:
    """The results of all trials measured against what the newest was, the table's rows.

    Their intervals hold together, whichever of the partitions was the best by chance.
    """
    settings = pipeline.settings
    names = instance.get_dynamic_partitions(str(partitions(settings).name))
    found, references = {}, {}
    for name in names:
        record = trial_record(pipeline, name)
        checkpoint, measured = map(record.find_current, ("checkpoint", "trial_metrics"))
        if checkpoint and measured:
            cost = settings.automation.cost_per_hour
            gate = settings.model_version.gate
            found[name] = read_result(name, checkpoint, measured, gate, len(names), cost)
            references[name] = measured.manifest.inputs.get("incumbent")
    return {name: found[name] for name in found if references[name] == references[newest]}


def _metadata(
    result: TrialResult, done: Mapping[str, TrialResult], made: Sequence[str]
) -> dict[str, Any]:
    """Of one result, with the table of all so far."""
    figures = {
        name: getattr(result, name)
        for name in ("score", "gain", "gain_low", "gain_high", "training_seconds", "cost")
    }
    return {
        "summary": f"{result.trial}: {result.verdict}",
        "verdict": result.verdict,
        "trials": table(UI_COLUMNS, map(_shown, rows(done.values()))),
        "measured": caption(done.values()),
        "made": ", ".join(made) or "nothing; all was there",
        **readable({name: value for name, value in figures.items() if value is not None}),
        RESULT: MetadataValue.json(result.model_dump(mode="json")),
    }


def _shown(row: Sequence[str]) -> list[str]:
    """A row's cells for the UI, which breaks them at spaces."""
    return [row[COLUMNS.index(name)].replace("=", " = ") for name in UI_COLUMNS]
