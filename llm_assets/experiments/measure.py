"""How good a trial's model is, on text that the gate never looks at."""

from dagster import AssetExecutionContext, MaterializeResult

from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.assets.evaluation import evaluation_spec
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.stage import materialization, stage
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import (
    CODE_VERSION,
    EvaluationSettings,
    GenerationSettings,
    ModelSource,
    MultipleChoiceSettings,
)

SPLIT = "validation"
"""Whoever picks the best of several models picks chance along with it. On held-out text that would
be spent from the gate's promise; validation text is there to choose by."""


@stage(
    deps=[checkpoint, base_model],
    kinds={"pytorch"},
    code_version=CODE_VERSION,
    pool="training",
)
def trial_metrics(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
) -> MaterializeResult:
    """The trial's model, its base and the wanted version, measured on validation text."""
    settings, record = _alone(pipeline.settings.eval_metrics), pipeline.record
    inputs = {
        kind: record.current(kind, needed_by="trial_metrics").fingerprint
        for kind in ("checkpoint", "tokenized_shards", "base_model")
    }
    wanted = registry.open(pipeline).find("wanted")
    incumbent = None
    if wanted is not None:
        inputs["incumbent"] = wanted.model_fingerprint
        incumbent = ModelSource(path=wanted.model_url, fingerprint=wanted.weights)
    identity = Identity(
        kind="trial_metrics",
        code_version=CODE_VERSION,
        settings=settings.content() | pipeline.settings.checkpoint.scoring() | {"split": SPLIT},
        inputs=inputs,
    )

    def build(draft: Draft) -> None:
        spec = evaluation_spec(pipeline, draft, incumbent, settings)
        spec = spec.model_copy(update={"split": SPLIT})
        draft.stats |= training.evaluate(context, spec)

    return materialization(pipeline.make(context, identity, build), {})


def _alone(settings: EvaluationSettings) -> EvaluationSettings:
    """The settings for the metric that decides, and nothing besides."""
    others = {
        "generation": GenerationSettings(samples=0),
        "multiple_choice": MultipleChoiceSettings(),
        "tasks": (),
        "summaries": None,
        "contamination_tokens": 0,
    }
    return settings.model_copy(update=others)
