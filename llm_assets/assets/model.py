"""The starting weights and the trained checkpoint."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.compute as pc
from pydantic import Field

from artifacts.errors import UserError
from artifacts.progress import counted, percent
from artifacts.shards.format import SPLITS, ShardStats
from artifacts.shards.shard_set import ShardSet, list_documents
from artifacts.storage import files
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, layout
from llm_assets.assets import figures
from llm_assets.assets.stage import BuildPlan, check_files, from_here, link, materialization, stage
from llm_assets.endpoint.base import check_engine
from llm_assets.forgetting.replay import train_once_more
from llm_assets.pipeline import JUDGED_TAG, Comparison, PipelineResource
from llm_assets.preflight.held_out import held_out_obstacle
from llm_assets.registry.base import Registry
from llm_assets.registry.card import CHOSEN, number, training_cost, verify_model
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.start import START_INPUT, find_manifest, find_seen, find_start
from llm_assets.runners.training import TrainingRunner, train_into
from recipes.evaluation.settings import ModelSource
from recipes.model import base_model as base_model_recipe
from recipes.model.base_model import BASE_MODEL_CODE_VERSION, BaseModelSettings
from recipes.sections import BUDGETS
from recipes.settings import (
    RecipeSettings,
    TrainingSettings,
    WarmStartSettings,
    package_of,
    training_settings,
)
from recipes.spec import (
    CHECKPOINT_CODE_VERSION,
    MODEL_FOLDER,
    ROW_ORDER,
    TENSORBOARD_NAME,
    TrainingSpec,
    read_metrics,
    total_steps,
)

GROUP = "model"
TITLE_CHARACTERS = 8
"""Of a fingerprint, in the name of a run."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float8": 5e-2}
"""Share by which the figures of a step may differ by the versions of libraries, as they do where
sums are taken in another order, by other processors or another number of workers."""
MOST_TIMES = 8
"""Times the pipeline file's budget that reading new text may take; more text takes several runs."""


class CheckpointConfig(dg.Config):
    """How a run continues from earlier ones, beside the settings."""

    continue_from_champion: bool = Field(
        default=False,
        description="Continue from the wanted version, long enough to read the new text.",
    )
    longer: int = Field(
        default=1,
        ge=1,
        description="Multiplier of the usual length, if `continue_from_champion` is set.",
    )
    from_version: int | None = Field(
        default=None,
        description="With `continue_from_champion`: continue from this version even if the same "
        "text and settings were trained on before, which otherwise trains nothing.",
    )
    without_forgotten: int | None = Field(
        default=None,
        description="A version whose runs are repeated without what was forgotten since. "
        "Forgetting sets it; all other settings are those of its runs.",
    )


def base_model_view(artifact: Artifact) -> dict[str, Any]:
    return {"summary": f"{artifact.stats['parameters']:,} parameters", **artifact.stats}


def weights_match_their_checksums(base_model: Artifact) -> dg.AssetCheckResult:
    """Every file of the base model has the size and the checksum of its manifest."""
    return check_files(base_model)


@stage(
    code_version=BASE_MODEL_CODE_VERSION,
    group=GROUP,
    kinds={"huggingface"},
    view=base_model_view,
    blocking_checks=[weights_match_their_checksums],
)
def base_model(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    identity: Identity,
    settings: BaseModelSettings,
) -> BuildPlan:
    """The pinned starting weights and tokenizer, as a Hugging Face folder with safetensors.

    Another revision, or changed files in its folder, causes everything downstream to be rebuilt.
    """

    def build(draft: Draft) -> None:
        recipe = pipeline.settings.checkpoint
        needs = (recipe.family, recipe.needs_masked_head)
        with pipeline.hub_access():
            made = base_model_recipe.prepare(settings, draft.path, context.log.info, *needs)
        draft.stats |= made

    def compare(artifact: Artifact) -> Comparison:
        return base_model_recipe.compare_model(settings, artifact.path)

    identity = identity.extend(
        settings=base_model_recipe.identify(settings),
        libraries=base_model_recipe.libraries_of(settings),
    )
    return BuildPlan(identity, build, compare)


def checkpoint_view(artifact: Artifact) -> dict[str, Any]:
    stats = artifact.stats
    run = f"{artifact.store.root}/{layout.run(artifact.fingerprint)}"
    records = read_metrics(artifact.url)
    losses = [(record["step"], record["loss"]) for record in records]
    unit = stats["validation_unit"]
    before, after = (stats["validation"][end] for end in ("start", "end"))
    return {
        "summary": f"{counted(stats['steps'], 'step')}, {before:.4f} -> {after:.4f} {unit} on "
        f"validation text; {percent(stats['coverage'])} of the training text read so far",
        "loss": figures.loss_line(records),
        "coverage": stats["coverage"],
        "tokens_seen_before": stats["tokens_seen_before"],
        "steps": stats["steps"],
        "tokens_seen": stats["tokens_seen"],
        "final_loss": stats["final_loss"],
        "tokens_per_second": stats["tokens_per_second"],
        f"validation_{unit.replace(' ', '_')}": after,
        "validation_before": before,
        "loss_curve": figures.curve("Training loss", "step", "loss", {"loss": losses}),
        "run_folder": link(run),
        "tensorboard": f"tensorboard --logdir {from_here(run)}/{TENSORBOARD_NAME}",
    }


def loss_is_finite_and_falls(checkpoint: Artifact) -> dg.AssetCheckResult:
    """Every step's loss is a number, and the validation loss ends lower than it started.

    This check does not block: a candidate that diverged gets the gate's verdict, with its reasons.
    """
    losses = [record["loss"] for record in read_metrics(checkpoint.url)]
    stats = checkpoint.stats
    start, end = (stats["validation"][place] for place in ("start", "end"))
    faulty = sum(loss is None or not math.isfinite(loss) for loss in losses)
    falls = None not in (start, end) and end < start
    text = "Every loss is a number." if not faulty else f"{faulty} losses are not finite numbers."
    return dg.AssetCheckResult(
        passed=not faulty and falls and not stats["diverged"],
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{stats['diverged'] or text} On validation text, {stats['validation_unit']}: "
        f"{number(start)} before, {number(end)} after.",
        metadata={"losses_not_finite": faulty, "validation_falls": falls},
    )


@stage(
    code_version=CHECKPOINT_CODE_VERSION,
    group=GROUP,
    kinds={"pytorch"},
    pool="training",
    view=checkpoint_view,
    checks=[loss_is_finite_and_falls],
)
def checkpoint(
    context: dg.AssetExecutionContext,
    config: CheckpointConfig,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    identity: Identity,
    settings: RecipeSettings,
    tokenized_shards: Artifact,
    base_model: Artifact,
) -> BuildPlan | dg.MaterializeResult:
    """The trained model: resumable state under `runs/`, and an exported Hugging Face folder.

    `validation_...` shows what it has learned (`validation_before` is where it started), and
    `coverage` the share of the training text that it and the models before it have read.
    """
    store, shards, models = pipeline.store, tokenized_shards, registry.open(pipeline)
    train = partial(training.train, context)

    def cost(artifact: Artifact) -> dict[str, float]:
        return training_cost(artifact.stats, pipeline.settings.automation.cost_per_hour)

    if config.without_forgotten is not None:
        # This makes an artifact for each run that is repeated and enters the last one as current,
        # so there is no single identity to plan.
        version = config.without_forgotten
        record, state = pipeline.record, models.state()
        artifact = train_once_more(record, state, version, train, context.log.info)
        return materialization(artifact, checkpoint_view(artifact) | cost(artifact))
    # Before the identity: the precision that `auto` means here decides the weights.
    settings = training.resolve(settings)
    # The version arrives with the state of the registry; nobody chooses it to be another attempt.
    choices = config.model_dump(exclude={"from_version"}) | {"settings": settings.content()}
    if config.continue_from_champion:
        settings = continue_from_champion(settings, shards, models, config.longer)
    identity = identity.extend(
        settings=settings.content(), libraries=settings.libraries | package_of(settings)
    )
    start = ModelSource(path=base_model.url, fingerprint=base_model.fingerprint)
    if settings.starts_from == "champion":
        start = find_start(pipeline.record, models, identity, start, config.from_version)
        identity = identity.extend(inputs={START_INPUT: start.fingerprint})

    run = f"{store.root}/{layout.run(identity.fingerprint)}"

    def spec(run_folder: str, output: str, settings: RecipeSettings) -> TrainingSpec:
        """A training that exports into `output` and keeps its resumable state in `run_folder`."""
        return TrainingSpec(
            run_id=identity.fingerprint,
            title=f"{pipeline.settings.name}-{identity.fingerprint[:TITLE_CHARACTERS]}",
            shards_folder=shards.url,
            shards=ShardStats.model_validate(shards.stats),
            # This is what the run starts from: the base model only if it continues from no version.
            base_model_folder=start.path,
            run_folder=run_folder,
            export_folder=f"{output}/{MODEL_FOLDER}",
            training=settings,
            seen=find_seen(start),
            row_order=ROW_ORDER,
            libraries=identity.libraries,
            inputs=identity.inputs,
        )

    def build(draft: Draft) -> None:
        # Only runs that end in a verdict: checked before the training, which would be in vain
        # otherwise.
        if JUDGED_TAG in context.run.tags:
            _need_held_out(pipeline, shards)
        # What is being made is another checkpoint than the one that it starts from.
        verify_model(pipeline.record, start.path, made_again=["base_model"])
        check_engine(pipeline.settings, Path(start.path), context.log.info)
        if estimate := training_estimate(training, settings, shards, base_model):
            context.log.info(f"Expected for {estimate}")
        train_into(store, draft, spec(run, draft.url, settings), train)
        # For `card.procedure`: what people chose, without what follows from the text.
        draft.stats[CHOSEN] = choices

    def compare(artifact: Artifact) -> Comparison:
        # Where nothing is compared, `PipelineResource.find` has the model trained again.
        if not settings.has_first_step:
            return
        folder = f"{run}-sample"
        sample = spec(folder, folder, _first_step(settings))
        # In a folder of its own, so that the sample does not touch the resumable state of the run.
        train(sample.model_copy(update={"title": f"{sample.title}-sample"}))
        stored, now = (read_metrics(url)[0] for url in (artifact.url, folder))
        files.remove(folder)
        for name in ("loss", "gradient_norm"):
            # `find` asks whether both figures are equal, so one within the tolerance is given as
            # the stored one.
            is_close = math.isclose(stored[name], now[name], rel_tol=TOLERANCE[settings.precision])
            yield f"{name} of the first step", stored[name], stored[name] if is_close else now[name]

    def finish(artifact: Artifact) -> dict[str, float]:
        # The run's state is kept under the name of its checkpoint, which is another where the
        # content decided it.
        place = f"{store.root}/{layout.run(artifact.fingerprint)}"
        if files.list_names(run) and not files.list_names(place):
            files.move(run, place)
        return cost(artifact)

    return BuildPlan(identity, build, compare, finish)


def _need_held_out(pipeline: PipelineResource, shards: Artifact) -> None:
    """Raise UserError where the gate could not judge a model of these shards."""
    stats = ShardStats.model_validate(shards.stats)
    clusters = {
        split: pc.count_distinct(
            list_documents(ShardSet(shards.url, stats, split))["cluster"]
        ).as_py()
        for split in SPLITS
    }
    # This holds even if that checkpoint was deleted: what a model has read stays in its split.
    is_trained = pipeline.record.recorded("checkpoint") is not None
    divisible = 0 if is_trained else sum(clusters.values())
    if obstacle := held_out_obstacle(clusters["held_out"], divisible, pipeline.settings):
        raise UserError(obstacle)


def _first_step(settings: RecipeSettings) -> RecipeSettings:
    """The settings for a single step: no learning rate affects its loss and gradient."""
    budget = settings.budget.model_copy(update=dict.fromkeys(BUDGETS) | {"steps": 1})
    update = {
        "budget": budget,
        # A warm-up that is longer than the run is refused, and this run has one step.
        "schedule": settings.schedule.model_copy(update={"warmup_steps": None}),
        "validation": settings.validation.model_copy(update={"rows": 1}),
    }
    return settings.model_copy(update=update)


def continue_from_champion(
    settings: RecipeSettings, shards: Artifact, registry: Registry, longer: int = 1
) -> RecipeSettings:
    """The settings with the wanted model as the start and a budget in steps.

    The budget is the configured one or, if longer, one pass over the documents that arrived since
    the wanted model was trained, plus the rows that are replayed or seen again beside them. A
    recipe that starts from random weights keeps its start.
    """
    stats = ShardStats.model_validate(shards.stats)
    usual = total_steps(settings, stats)
    # The corpus counts documents by slice, but the shards count rows in all: so the share of
    # documents stands for that of rows.
    rows = new_share(shards, registry) * shards.stats["rows"]["train"]
    # Rows that are replayed or seen again take their share of every step beside the new ones.
    unseen_share = (1 - settings.replay_share) * (1 - settings.order.seen_share)
    steps_needed = math.ceil(rows / (unseen_share * settings.budget.global_batch_size))
    values = settings.model_dump()
    steps = longer * max(usual, min(steps_needed, MOST_TIMES * usual))
    # The other units are emptied, since a budget has exactly one.
    values["budget"] |= dict.fromkeys(BUDGETS) | {"steps": steps}
    if isinstance(settings, WarmStartSettings):
        values["initialize"] = "champion"
    return training_settings(values)


def new_share(shards: Artifact, registry: Registry) -> float:
    """Share of the training documents that arrived since the wanted model was trained.

    0 where that is the base model, or its corpus is no longer on record.
    """
    store = shards.store
    wanted = registry.find("wanted")
    fingerprint = wanted.lineage.get("clean_corpus") if wanted else None
    earlier_manifest = find_manifest(store, "clean_corpus", fingerprint) if fingerprint else None
    now = find_manifest(store, "clean_corpus", shards.manifest.inputs["clean_corpus"])
    if earlier_manifest is None or now is None:
        return 0.0
    last_slice = max(map(int, earlier_manifest.stats["slices"]), default=0)
    # Slices are numbered in the order in which text arrived.
    counts = {int(key): documents.get("train", 0) for key, documents in now.stats["slices"].items()}
    new_documents = sum(count for key, count in counts.items() if key > last_slice)
    return new_documents / max(1, sum(counts.values()))


def training_estimate(
    training: TrainingRunner, settings: TrainingSettings, shards: Artifact, base: Artifact
) -> str | None:
    """Such as `checkpoint: about 2.3 h, 9.70 USD`; None where the runner costs nothing.

    Which rows the champion has seen is known only when training begins, so passes over the unseen
    rows are estimated at their maximum.

    Raises:
        UserError: the runner's machines are too small for the model.
    """
    training.check_state(settings, base.stats["parameters"])
    stats = ShardStats.model_validate(shards.stats)
    steps, is_most = total_steps(settings, stats), False
    if settings.starts_from == "champion" and settings.budget.epochs is not None:
        # With all rows unseen, `total_steps` would leave out those that are seen again beside them.
        all_but_one = shards.stats["rows"]["train"] - 1
        steps, is_most = max(steps, total_steps(settings, stats, all_but_one)), True
    tokens = steps * settings.budget.global_batch_size * stats.sequence_length
    expected = training.estimate(tokens, base.stats["parameters"])
    if expected and is_most:
        expected += ", at most, as rows that the champion has seen are left out"
    return expected
