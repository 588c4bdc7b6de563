"""Is the candidate better, and may it answer users?"""

from dagster import AssetExecutionContext, MaterializeResult

from artifacts.shards.format import ShardStats
from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.assets.challenge import candidate_entry, model_source, open_challenge
from llm_assets.assets.evaluation_metadata import (
    evaluation_metadata,
    samples_metadata,
    verdict_metadata,
)
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.stage import materialization, stage
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.gate.settings import CODE_VERSION as GATE_CODE_VERSION
from llm_assets.gate.verdict import Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.card import describe_cost, describe_coverage
from llm_assets.registry.integrity import verify_model
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import CODE_VERSION, EvaluationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec

GROUP = "evaluation"
VERDICT_NAME = "verdict.json"


@stage(
    deps=[checkpoint, base_model],
    group_name=GROUP,
    kinds={"pytorch"},
    code_version=CODE_VERSION,
    pool="training",
)
def eval_metrics(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    serving: ServingPlatform,
) -> MaterializeResult:
    """Candidate, base and incumbent measured on the same held-out and general text.

    Bits per byte say how much a text surprises a model that has never seen it; lower is better.
    Held-out text is the team's own; general text is everyday English and shows what was forgotten.
    `samples` has base and candidate go on from the same beginnings.
    """
    settings, recipe = pipeline.settings.eval_metrics, pipeline.settings.checkpoint
    record = pipeline.record
    candidate, shards, base = (
        record.current(kind, needed_by="eval_metrics")
        for kind in ("checkpoint", "tokenized_shards", "base_model")
    )
    weights = serving.quantized(pipeline.settings)
    challenge = open_challenge(pipeline, registry.open(pipeline), candidate, base, weights)
    source, incumbent = challenge.candidate, challenge.incumbent
    question = challenge.question(pipeline.settings.model_version.gate)
    asked = {"question": question.model_dump()} | challenge.form
    identity = Identity(
        kind="eval_metrics",
        code_version=CODE_VERSION,
        settings=settings.content() | recipe.scoring() | asked,
        inputs={one.manifest.kind: one.fingerprint for one in (candidate, shards, base)}
        | {"incumbent": incumbent.model_fingerprint},
    )

    def build(draft: Draft) -> None:
        against = ModelSource(path=incumbent.model_url, fingerprint=incumbent.weights)
        drawn = settings.drawn_for(source.fingerprint)
        spec = evaluation_spec(pipeline, draft, against, drawn)
        spec = spec.model_copy(update={"question": question})
        draft.stats |= training.evaluate(context, spec)
        draft.stats |= serving.measure(pipeline.settings, spec, context.log.info)

    artifact = pipeline.make(context, identity, build)
    told = evaluation_metadata(artifact.stats) | samples_metadata(artifact)
    return materialization(artifact, told)


def evaluation_spec(
    pipeline: PipelineResource,
    draft: Draft,
    incumbent: ModelSource | None,
    settings: EvaluationSettings,
) -> EvaluationSpec:
    """What measures the current checkpoint, its base and an incumbent into a draft.

    Raises:
        DamagedArtifact: a file of what is read has changed.
    """
    record = pipeline.record
    candidate, shards, base = (
        record.current(kind, needed_by=draft.identity.kind)
        for kind in ("checkpoint", "tokenized_shards", "base_model")
    )
    for artifact in (shards, base, candidate):
        artifact.verify()
    if incumbent is not None:
        verify_model(record, str(incumbent.path))
    fault = {"fault": candidate.stats.get("diverged")}
    return EvaluationSpec(
        base=model_source(base),
        candidate=model_source(candidate).model_copy(update=fault),
        incumbent=incumbent,
        shards=shards.url,
        shard_stats=ShardStats.model_validate(shards.stats),
        shards_fingerprint=shards.fingerprint,
        output=draft.url,
        cache=pipeline.store.cache,
        settings=settings,
        recipe=pipeline.settings.checkpoint,
    )


@stage(
    deps=[eval_metrics],
    group_name=GROUP,
    kinds={"python"},
    code_version=GATE_CODE_VERSION,
    pool="registry",
)
def model_version(
    context: AssetExecutionContext, pipeline: PipelineResource, registry: RegistryResource
) -> MaterializeResult:
    """The candidate registered, with its evaluation and the gate's verdict.

    The gate promotes a candidate that is better than the wanted version by more than chance;
    `reasons` says what it found. `llm-assets approve` and `llm-assets reject` overrule it.
    """
    settings = pipeline.settings.model_version
    record = pipeline.record
    evaluation = record.current("eval_metrics", needed_by="model_version")
    candidate, base = (
        pipeline.store.load(kind, evaluation.manifest.inputs[kind], needed_by="model_version")
        for kind in ("checkpoint", "base_model")
    )
    models = registry.open(pipeline)
    measured = evaluation.stats["evaluation_fingerprint"]
    weights = evaluation.manifest.settings.get("served_weights")
    challenge = open_challenge(pipeline, models, candidate, base, weights, measured)
    identity = Identity(
        kind="model_version",
        code_version=GATE_CODE_VERSION,
        settings=settings.content() | challenge.asked(),
        inputs={
            "eval_metrics": evaluation.fingerprint,
            "incumbent": challenge.incumbent.model_fingerprint,
        },
    )

    def build(draft: Draft) -> None:
        candidate.verify()
        evaluation.verify()
        verdict = challenge.judge(evaluation, settings.gate)
        (draft.path / VERDICT_NAME).write_text(verdict.model_dump_json(indent=2))
        draft.stats["promoted"] = verdict.promoted
        draft.stats["reasons"] = verdict.lines

    artifact = pipeline.make(context, identity, build)
    verdict = Verdict.model_validate_json((artifact.path / VERDICT_NAME).read_text())
    license = settings.license or base.stats["license"]
    version = models.enter(candidate_entry(candidate, evaluation, license), verdict)
    told = verdict_metadata(version.version, verdict) | samples_metadata(evaluation)
    return materialization(artifact, told | _version_metadata(version))


def _version_metadata(version: ModelVersion) -> dict[str, str]:
    cost = {} if version.dollars is None else {"version_cost": describe_cost(version)}
    return {"trained_on": describe_coverage(version)} | cost
