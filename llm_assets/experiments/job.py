"""The job `experiment`, and the asset `experiments` that holds what came of its trials."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from dagster import (
    AssetExecutionContext,
    AssetMaterialization,
    AssetSpec,
    Config,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    Definitions,
    DynamicPartitionsDefinition,
    EventLogEntry,
    ExecuteInProcessResult,
    Failure,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from artifacts.progress import Report
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, layout
from llm_assets.assets.corpus import clean_corpus, raw_corpus, tokenized_shards
from llm_assets.assets.evaluation import evaluation_spec
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.stage import (
    BuildPlan,
    asset_key,
    failure_reason,
    readable,
    stage,
    table,
    user_faults,
    was_interrupted,
)
from llm_assets.config import PipelineSettings, changed_settings
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.experiments.result import COLUMNS, SPLIT, TrialResult, caption, read_result, rows
from llm_assets.experiments.trials import Trial, plan_trials
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


# Runs an experiment's trials one after another; what is equal among them is made once.
# A trial is the graph up to the checkpoint, and a measurement, with a record of its own. Neither
# the registry nor the endpoint is among what it makes, so it moves neither.
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
    record_path: str
    """In the store."""

    @cached_property
    def settings_of_file(self) -> PipelineSettings:
        return changed_settings(Path(self.config_path), self.changes)

    @property
    def record(self) -> Pipeline:
        return Pipeline(self.store, self.settings.name, self.record_path)


@dataclass(frozen=True)
class Experiment:
    """Some trials of one pipeline, and where their work is done."""

    pipeline: PipelineResource
    resources: Mapping[str, Any]
    """`spark`, `training` and `registry` of the graph."""
    trials: Sequence[Trial]

    def run(self, report: Report, on_result: Callable[[TrialResult], None]) -> list[TrialResult]:
        """Run all trials; one that fails is a result like the others.

        Raises:
            DagsterExecutionInterruptedError: somebody ended it; what was made is kept.
        """
        results = []
        for number, trial in enumerate(self.trials, 1):
            report(f"Trial {number} of {len(self.trials)}: {trial.name}")
            result = self._run_trial(trial, report)
            results.append(result)
            on_result(result)
        return results

    def _run_trial(self, trial: Trial, report: Report) -> TrialResult:
        pipeline = self._open(trial)
        definitions = Definitions(
            assets=[stage.asset(pipeline.settings) for stage in STAGES],
            resources={**self.resources, "pipeline": pipeline},
            executor=in_process_executor,
        )
        ended = _execute(definitions, report)
        if reason := _reason(ended):
            return TrialResult(trial=trial.name, verdict="failed", reason=reason)
        settings, record = pipeline.settings, pipeline.record
        return read_result(
            trial.name,
            record.current("checkpoint", needed_by="trial_metrics"),
            record.current("trial_metrics", needed_by="experiments"),
            settings.model_version.gate,
            len(self.trials),
            settings.automation.cost_per_hour,
            _made(ended),
        )

    def _open(self, trial: Trial) -> TrialPipeline:
        """The trial's view of the store, which begins with what is current in the pipeline's.

        So held-out documents stay held out, and what the pipeline has made already is found.
        """
        pipeline = self.pipeline
        path = layout.trial_record(pipeline.settings.name, trial.fingerprint)
        history = pipeline.record.history().model_dump_json(indent=2)
        pipeline.store.write_bytes(path, history.encode())
        return TrialPipeline(
            config_path=pipeline.config_path, changes=trial.changes, record_path=path
        )


def _execute(definitions: Definitions, report: Report) -> ExecuteInProcessResult:
    """Materialize all of it; its log lines are reported, and no history is kept of it."""

    def pass_on(entry: EventLogEntry) -> None:
        if entry.dagster_event is None and entry.step_key and entry.user_message:
            report(f"{entry.step_key}: {entry.user_message}")

    run_id = str(uuid4())
    with DagsterInstance.ephemeral() as instance:
        instance.add_event_listener(run_id, pass_on)
        return definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, run_id=run_id, raise_on_error=False
        )


def _reason(ended: ExecuteInProcessResult) -> str:
    """Why a trial failed; empty where it did not."""
    for event in ended.filter_events(lambda event: event.is_step_failure):
        failure = event.step_failure_data
        if was_interrupted(failure):
            raise DagsterExecutionInterruptedError()
        return f"{event.step_key}: {failure_reason(failure)}"
    return ""


def _made(ended: ExecuteInProcessResult) -> tuple[str, ...]:
    """The stages that were not there already."""
    events = ended.get_asset_materialization_events()
    return tuple(
        event.step_key or "" for event in events if event.materialization.metadata["made_now"].value
    )


EXPERIMENT = "experiment"
ASSET = "experiments"
RESULT = "result"
"""Name of the metadata that holds a trial's whole result."""
UI_COLUMNS = ("settings", "gain", "interval", "verdict")
"""Those of the table's columns that fit the UI; the others are metadata by themselves."""


def experiments_spec(settings: PipelineSettings) -> AssetSpec:
    """The asset of all trials, a partition each; the job `experiment` makes it."""
    return AssetSpec(
        asset_key(settings, ASSET),
        deps=[asset_key(settings, name) for name in ("raw_corpus", "base_model")],
        description="Models of other settings, measured on validation text against the version "
        "that is wanted; a partition each. `llm-assets experiment` or the job `experiment` tries "
        "some; nothing of it is promoted or served.",
        group_name=ASSET,
        kinds={"pytorch"},
        partitions_def=_partitions(settings),
    )


def _partitions(settings: PipelineSettings) -> DynamicPartitionsDefinition:
    return DynamicPartitionsDefinition(name=f"{settings.name}_trials")


class ExperimentConfig(Config):
    """What is tried."""

    settings: dict[str, Any] = Field(
        description="Keys of the pipeline file, such as `checkpoint.optimizer.learning_rate`, each "
        "with a list of values; all combinations are tried."
    )


@op(pool="training")
def trials(
    context: OpExecutionContext,
    config: ExperimentConfig,
    pipeline: PipelineResource,
    spark: SparkRunner,
    training: TrainingRunner,
    registry: RegistryResource,
    serving: ServingPlatform,
) -> None:
    """Train and measure a model for each combination; the log and `experiments` have the table."""
    settings = pipeline.settings
    with user_faults(pipeline):
        planned = plan_trials(Path(pipeline.config_path), config.settings)
        resources = {
            "spark": spark,
            "training": training,
            "registry": registry,
            "serving": serving,
        }
        done: list[TrialResult] = []

        def enter(result: TrialResult) -> None:
            done.append(result)
            partitions = _partitions(settings)
            context.instance.add_dynamic_partitions(str(partitions.name), [result.trial])
            context.log_event(
                AssetMaterialization(
                    asset_key(settings, ASSET), partition=result.trial, metadata=_metadata(done)
                )
            )

        Experiment(pipeline, resources, planned).run(context.log.info, enter)
    if failed := [one for one in done if one.verdict == "failed"]:
        said = " ".join(f"{one.trial}: {one.reason}" for one in failed)
        raise Failure(f"{len(failed)} of {len(done)} trials failed. {said}", allow_retries=False)


def _metadata(done: list[TrialResult]) -> dict[str, Any]:
    """Of the newest result, with the table of all so far."""
    result = done[-1]
    figures = {
        name: getattr(result, name)
        for name in ("score", "gain", "gain_low", "gain_high", "training_seconds", "cost")
    }
    return {
        "verdict": result.verdict,
        "trials": table(UI_COLUMNS, map(_shown, rows(done))),
        "measured": caption(done),
        **readable({name: value for name, value in figures.items() if value is not None}),
        RESULT: MetadataValue.json(result.model_dump(mode="json")),
    }


def _shown(row: Sequence[str]) -> list[str]:
    """A row's cells for the UI, which breaks them at spaces."""
    return [row[COLUMNS.index(name)].replace("=", " = ") for name in UI_COLUMNS]


def build_experiment(settings: PipelineSettings) -> JobDefinition:
    """The job, filled in with the learning rate of the pipeline file and a third of it."""
    rate = settings.checkpoint.optimizer.learning_rate
    tried = {"checkpoint.optimizer.learning_rate": [rate, float(f"{rate / 3:.2g}")]}

    @job(
        name=EXPERIMENT,
        config=experiment_config(tried),
        description="Tries other settings side by side and shows which is better, on validation "
        "text; nothing is promoted or served. What is equal among the trials is made once.",
    )
    def experiment() -> None:
        trials()

    return experiment


def experiment_config(tried: dict[str, Any]) -> dict[str, Any]:
    """Run config that has some settings tried."""
    return {"ops": {trials.name: {"config": {"settings": tried}}}}
