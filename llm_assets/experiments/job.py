"""The job `experiment`, and the asset `experiments` that holds what came of its trials."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagster import (
    AssetMaterialization,
    AssetSpec,
    Config,
    DynamicPartitionsDefinition,
    Failure,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    job,
    op,
)
from pydantic import Field

from llm_assets.assets.stage import asset_key, readable, table, user_faults
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.experiments.result import COLUMNS, TrialResult, caption, rows
from llm_assets.experiments.run import Experiment
from llm_assets.experiments.trials import plan_trials
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner

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
