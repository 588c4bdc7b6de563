"""Is the candidate better, and may it answer users?"""

import pyarrow.parquet as pq
from dagster import AssetExecutionContext, MaterializeResult

from artifacts.shards.shard_set import ShardStats
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets.evaluation_metadata import evaluation_metadata, verdict_metadata
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.stage import materialization, stage
from llm_assets.gate.judge import judge
from llm_assets.gate.settings import CODE_VERSION as GATE_CODE_VERSION
from llm_assets.gate.verdict import Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.card import describe_coverage
from llm_assets.registry.integrity import verify_model
from llm_assets.registry.lineage import lineage, procedure, weights_fingerprint
from llm_assets.registry.records import ModelEntry
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import CODE_VERSION, EvaluationSpec, ModelSource, Question
from recipes.spec import MODEL_FOLDER

GROUP = "evaluation"
VERDICT_NAME = "verdict.json"
SCORES_NAME = "scores.parquet"


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
) -> MaterializeResult:
    """Candidate, base and incumbent measured on the same held-out and general text."""
    settings, recipe = pipeline.settings.eval_metrics, pipeline.settings.checkpoint
    record = pipeline.record
    candidate = record.current("checkpoint", needed_by="eval_metrics")
    shards = record.current("tokenized_shards", needed_by="eval_metrics")
    base = record.current("base_model", needed_by="eval_metrics")
    models = registry.open(pipeline)
    models.register_base(base_entry(base))
    source = model_source(candidate)
    state, gate = models.state(), pipeline.settings.model_version.gate
    incumbent = state.incumbent_of(source.fingerprint)
    look = state.look_of(source.fingerprint, incumbent.weights)
    question = Question(
        look=look,
        readable=state.readable_before(look, procedure_of(candidate, pipeline)),
        lifetime_error=gate.lifetime_error,
        smallest_effect=gate.smallest_effect,
    )
    identity = Identity(
        kind="eval_metrics",
        code_version=CODE_VERSION,
        settings=settings.content() | recipe.scoring() | {"question": question.model_dump()},
        inputs={
            "checkpoint": candidate.fingerprint,
            "tokenized_shards": shards.fingerprint,
            "base_model": base.fingerprint,
            "incumbent": incumbent.model_fingerprint,
        },
    )

    def build(draft: Draft) -> None:
        for artifact in (shards, base, candidate):
            artifact.verify()
        verify_model(record, incumbent.model_url)
        spec = EvaluationSpec(
            base=model_source(base),
            candidate=source.model_copy(update={"fault": candidate.stats.get("diverged")}),
            incumbent=ModelSource(path=incumbent.model_url, fingerprint=incumbent.weights),
            shards=shards.url,
            shard_stats=ShardStats.model_validate(shards.stats),
            shards_fingerprint=shards.fingerprint,
            output=draft.url,
            cache=pipeline.store.cache,
            settings=settings.drawn_for(source.fingerprint),
            recipe=recipe,
            question=question,
        )
        draft.stats |= training.evaluate(context, spec)

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, evaluation_metadata(artifact.stats))


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
    """The candidate registered, with its evaluation and the gate's verdict."""
    settings = pipeline.settings.model_version
    record = pipeline.record
    evaluation = record.current("eval_metrics", needed_by="model_version")
    candidate, base = (
        pipeline.store.load(kind, evaluation.manifest.inputs[kind], needed_by="model_version")
        for kind in ("checkpoint", "base_model")
    )
    models = registry.open(pipeline)
    models.register_base(base_entry(base))
    source = model_source(candidate)
    state = models.state()
    incumbent = state.incumbent_of(source.fingerprint)
    measured = evaluation.stats["evaluation_fingerprint"]
    look = state.look_of(source.fingerprint, incumbent.weights, measured)
    chosen = procedure_of(candidate, pipeline)
    readable = state.readable_before(look, chosen)
    identity = Identity(
        kind="model_version",
        code_version=GATE_CODE_VERSION,
        settings=settings.content() | {"look": look, "readable": readable, "procedure": chosen},
        inputs={
            "eval_metrics": evaluation.fingerprint,
            "incumbent": incumbent.model_fingerprint,
        },
    )

    def build(draft: Draft) -> None:
        candidate.verify()
        evaluation.verify()
        verdict = judge(
            pq.read_table(evaluation.path / SCORES_NAME),
            evaluation.stats,
            settings.gate,
            candidate=source.fingerprint,
            incumbent=incumbent.weights,
            look=look,
            readable=readable,
            procedure=chosen,
        )
        (draft.path / VERDICT_NAME).write_text(verdict.model_dump_json(indent=2))
        draft.stats["promoted"] = verdict.promoted
        draft.stats["reasons"] = [reason.text for reason in verdict.reasons]

    artifact = pipeline.make(context, identity, build)
    verdict = Verdict.model_validate_json((artifact.path / VERDICT_NAME).read_text())
    entry = ModelEntry(
        weights=source.fingerprint,
        model_fingerprint=candidate.fingerprint,
        model_url=source.path,
        license=settings.license or base.stats["license"],
        lineage=lineage(evaluation),
        coverage=candidate.stats["coverage"],
        evaluation=evaluation.stats,
    )
    version = models.enter(entry, verdict)
    trained = {"trained_on": describe_coverage(version)}
    return materialization(artifact, verdict_metadata(version.version, verdict) | trained)


def procedure_of(candidate: Artifact, pipeline: PipelineResource) -> str:
    """What people chose for this candidate, down to how it is measured and judged."""
    settings = pipeline.settings
    judged_by = {
        "eval_metrics": settings.eval_metrics.content(),
        "gate": settings.model_version.content(),
    }
    return procedure(candidate, judged_by)


def base_entry(base: Artifact) -> ModelEntry:
    """The `base_model` artifact as the registry records it."""
    return ModelEntry(
        weights=model_source(base).fingerprint,
        model_fingerprint=base.fingerprint,
        model_url=base.url,
        license=base.stats["license"],
        lineage=lineage(base),
    )


def model_source(artifact: Artifact) -> ModelSource:
    """The Hugging Face folder of a `checkpoint` or `base_model`, known by its weights."""
    folder = f"{MODEL_FOLDER}/" if artifact.manifest.kind == "checkpoint" else ""
    return ModelSource(
        path=f"{artifact.url}/{folder}".rstrip("/"),
        fingerprint=weights_fingerprint(artifact, folder),
    )
