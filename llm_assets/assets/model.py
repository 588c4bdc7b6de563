"""The starting weights and the trained checkpoint."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, Config, MaterializeResult
from pydantic import Field, ValidationError

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, layout
from llm_assets.assets import figures
from llm_assets.assets.corpus import tokenized_shards
from llm_assets.assets.stage import folder_link, from_here, materialization, stage
from llm_assets.assets.training_plan import continue_from_champion, training_cost, training_estimate
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.forgetting.replay import train_once_more
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.integrity import verify_model
from llm_assets.registry.lineage import CHOSEN
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.start import find_seen, find_start, with_start
from llm_assets.runners.checkpoint import train_into
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import ModelSource
from recipes.model import base_model as base_model_recipe
from recipes.settings.recipe import (
    BASE_MODEL_CODE_VERSION,
    CHECKPOINT_CODE_VERSION,
    RecipeSettings,
    training_settings,
)
from recipes.settings.sections import BUDGETS
from recipes.spec import MODEL_FOLDER, TENSORBOARD_NAME, TrainingSpec, read_metrics

GROUP = "model"


class CheckpointOverrides(Config):
    """Changes to the pipeline file's `checkpoint` settings, for one run."""

    steps: int | None = Field(default=None, description="Optimizer steps of the whole run.")
    learning_rate: float | None = Field(default=None, description="Peak learning rate.")
    seed: int | None = Field(default=None, description="Decides the order of the data.")
    continue_from_champion: bool = Field(
        default=False,
        description="Go on from the model that serves, long enough to read what arrived last.",
    )
    longer: int = Field(
        default=1, ge=1, description="Times the usual training, where it goes on from the champion."
    )

    without_forgotten: int | None = Field(
        default=None,
        description="A version: its runs are made once more without what was forgotten since. "
        "`llm-assets forget` asks for it; all other settings are those of its runs.",
    )

    def apply(self, settings: RecipeSettings) -> RecipeSettings:
        """The settings with the given changes; raises UserError on a bad one.

        Steps given here take the place of whatever budget the pipeline file has.
        """
        values = settings.model_dump()
        if self.steps is not None:
            values["budget"] |= dict.fromkeys(BUDGETS) | {"steps": self.steps}
        if self.learning_rate is not None:
            values["optimizer"]["learning_rate"] = self.learning_rate
        if self.seed is not None:
            values["seed"] = self.seed
        try:
            return training_settings(values)
        except ValidationError as error:
            faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
            raise UserError(f"The changes to `checkpoint` are wrong: {faults}") from None


@stage(group_name=GROUP, kinds={"huggingface"}, code_version=BASE_MODEL_CODE_VERSION)
def base_model(context: AssetExecutionContext, pipeline: PipelineResource) -> MaterializeResult:
    """The pinned starting weights and tokenizer, as a Hugging Face folder with safetensors.

    Another revision, or other files in its folder, has all that follows made again.
    """
    settings = pipeline.settings.base_model
    identity = Identity(
        kind="base_model",
        code_version=BASE_MODEL_CODE_VERSION,
        settings=base_model_recipe.identify(settings),
    )

    def build(draft: Draft) -> None:
        with pipeline.hub_access():
            draft.stats |= base_model_recipe.prepare(
                settings, draft.path, context.log.info, pipeline.settings.checkpoint.family
            )

    artifact = pipeline.make(context, identity, build)
    summary = f"{artifact.stats['parameters']:,} parameters"
    return materialization(artifact, {"summary": summary} | artifact.stats)


@stage(
    deps=[tokenized_shards, base_model],
    group_name=GROUP,
    kinds={"pytorch"},
    code_version=CHECKPOINT_CODE_VERSION,
    pool="training",
)
def checkpoint(
    context: AssetExecutionContext,
    config: CheckpointOverrides,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    serving: ServingPlatform,
) -> MaterializeResult:
    """The trained model: resumable state under `runs/`, and an exported Hugging Face folder.

    `validation_...` says what it has learnt (`validation_before` is where it began), `coverage`
    which share of the text it and the models before it have read. The launchpad of the job
    `retraining` changes steps, learning rate and seed for one run.
    """
    if config.without_forgotten is not None:
        artifact = train_once_more(
            pipeline.record,
            registry.open(pipeline).state(),
            config.without_forgotten,
            partial(training.train, context),
            context.log.info,
        )
        return materialization(artifact, _checkpoint_metadata(artifact, pipeline))
    settings = training.resolve(config.apply(pipeline.settings.checkpoint))
    chosen = config.model_dump() | {"settings": settings.content()}
    shards = pipeline.record.current("tokenized_shards", needed_by="checkpoint")
    if config.continue_from_champion:
        models = registry.open(pipeline)
        settings = continue_from_champion(settings, shards, models, config.longer)
    base = pipeline.record.current("base_model", needed_by="checkpoint")
    identity, start = _identify(settings, shards, base, pipeline, registry)

    def build(draft: Draft) -> None:
        shards.verify()
        # What is being made is another checkpoint than the one that it starts from.
        verify_model(pipeline.record, start.path, made_again=["base_model"])
        serving.check(pipeline.settings, Path(start.path), context.log.info)
        if estimate := training_estimate(training, settings, shards, base):
            context.log.info(f"Expected for {estimate}")
        spec = _training_spec(draft, settings, shards, start, pipeline)
        train_into(pipeline.store, draft, spec, partial(training.train, context))
        draft.stats[CHOSEN] = chosen

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, _checkpoint_metadata(artifact, pipeline))


def _identify(
    settings: RecipeSettings,
    shards: Artifact,
    base: Artifact,
    pipeline: PipelineResource,
    registry: RegistryResource,
) -> tuple[Identity, ModelSource]:
    """What the checkpoint is, and the weights that its training starts with."""
    identity = Identity(
        kind="checkpoint",
        code_version=CHECKPOINT_CODE_VERSION,
        settings=settings.content(),
        inputs={"tokenized_shards": shards.fingerprint, "base_model": base.fingerprint},
    )
    start = ModelSource(path=base.url, fingerprint=base.fingerprint)
    if settings.starts_from != "champion":
        return identity, start
    start = find_start(pipeline.record, registry.open(pipeline), identity, start)
    return with_start(identity, start), start


def _training_spec(
    draft: Draft,
    settings: RecipeSettings,
    shards: Artifact,
    start: ModelSource,
    pipeline: PipelineResource,
) -> TrainingSpec:
    """A training that exports into the draft; its resumable state is the run's, not the draft's."""
    run_id = draft.identity.fingerprint
    return TrainingSpec(
        run_id=run_id,
        shards_folder=shards.url,
        shards=ShardStats.model_validate(shards.stats),
        base_model_folder=start.path,
        run_folder=f"{pipeline.store.root}/{layout.run(run_id)}",
        export_folder=f"{draft.url}/{MODEL_FOLDER}",
        training=settings,
        seen=find_seen(start),
        inputs=draft.identity.inputs,
    )


def _checkpoint_metadata(artifact: Artifact, pipeline: PipelineResource) -> dict[str, Any]:
    stats = artifact.stats
    run = f"{pipeline.store.root}/{layout.run(artifact.fingerprint)}"
    losses = [(record["step"], record["loss"]) for record in read_metrics(artifact.url)]
    finite = [math.nan if loss is None else loss for _, loss in losses]
    unit = stats["validation_unit"]
    before, after = (stats["validation"][end] for end in ("start", "end"))
    return {
        "summary": f"{stats['steps']} steps, {before:.4f} -> {after:.4f} {unit} on validation "
        f"text; {stats['coverage']:.1%} of the training text read so far",
        "loss": f"{finite[0]:.3f} {figures.sparkline(finite)} {finite[-1]:.3f}",
        "coverage": stats["coverage"],
        "tokens_seen_before": stats["tokens_seen_before"],
        "steps": stats["steps"],
        "tokens_seen": stats["tokens_seen"],
        "final_loss": stats["final_loss"],
        "tokens_per_second": stats["tokens_per_second"],
        f"validation_{unit.replace(' ', '_')}": after,
        "validation_before": before,
        "loss_curve": figures.curve("Training loss", "step", "loss", {"loss": losses}),
        "run_folder": folder_link(run),
        "tensorboard": f"tensorboard --logdir {from_here(run)}/{TENSORBOARD_NAME}",
    } | training_cost(stats, pipeline.settings.automation.cost_per_hour)
