"""Is the candidate better, and may it answer users?"""

import pyarrow.parquet as pq
from dagster import AssetExecutionContext, MaterializeResult

from artifacts.identity import Identity
from artifacts.shards import ShardStats
from artifacts.store import Artifact, Draft
from llm_assets.assets.evaluation_metadata import evaluation_metadata, verdict_metadata
from llm_assets.assets.model import MODEL_FOLDER, base_model, checkpoint
from llm_assets.assets.stage import materialization, stage
from llm_assets.gate.judge import judge
from llm_assets.gate.settings import CODE_VERSION as GATE_CODE_VERSION
from llm_assets.gate.verdict import Verdict
from llm_assets.registry.base import count_judgements
from llm_assets.registry.incumbent import find_incumbent
from llm_assets.registry.promotion import enter_base, enter_candidate
from llm_assets.resources.pipeline import PipelineResource
from llm_assets.resources.registry import RegistryResource
from llm_assets.resources.training import TrainingRunner
from recipes.evaluation.settings import CODE_VERSION, EvaluationSpec, ModelSource

GROUP = "evaluation"
VERDICT_NAME = "verdict.json"
SCORES_NAME = "scores.parquet"


@stage(
    deps=[checkpoint, base_model],
    group_name=GROUP,
    kinds={"pytorch"},
    code_version=CODE_VERSION,
)
def eval_metrics(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
) -> MaterializeResult:
    """Candidate, base and incumbent measured on the same held-out and general text."""
    settings = pipeline.settings.eval_metrics
    record = pipeline.record
    candidate = record.current("checkpoint", needed_by="eval_metrics")
    shards = record.current("tokenized_shards", needed_by="eval_metrics")
    base = record.current("base_model", needed_by="eval_metrics")
    incumbent = find_incumbent(registry.open(pipeline), candidate.fingerprint, model_source(base))
    identity = Identity(
        kind="eval_metrics",
        code_version=CODE_VERSION,
        settings=settings.content(),
        inputs={
            "checkpoint": candidate.fingerprint,
            "tokenized_shards": shards.fingerprint,
            "base_model": base.fingerprint,
            "incumbent": incumbent.fingerprint,
        },
    )

    def build(draft: Draft) -> None:
        spec = EvaluationSpec(
            base=model_source(base),
            candidate=model_source(candidate),
            incumbent=incumbent,
            shards=shards.url,
            shard_stats=ShardStats.model_validate(shards.stats),
            shards_fingerprint=shards.fingerprint,
            output=draft.url,
            cache=f"{pipeline.store.root}/evaluation_cache",
            settings=settings,
        )
        draft.stats |= training.evaluate(context, spec)

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, evaluation_metadata(artifact.stats))


@stage(deps=[eval_metrics], group_name=GROUP, kinds={"python"}, code_version=GATE_CODE_VERSION)
def model_version(
    context: AssetExecutionContext, pipeline: PipelineResource, registry: RegistryResource
) -> MaterializeResult:
    """The candidate registered, with its evaluation and the gate's verdict."""
    settings = pipeline.settings.model_version
    record = pipeline.record
    evaluation = record.current("eval_metrics", needed_by="model_version")
    candidate = pipeline.store.load("checkpoint", evaluation.manifest.inputs["checkpoint"])
    base = pipeline.store.load("base_model", evaluation.manifest.inputs["base_model"])
    models = registry.open(pipeline)
    incumbent = find_incumbent(models, candidate.fingerprint, model_source(base))
    identity = Identity(
        kind="model_version",
        code_version=GATE_CODE_VERSION,
        settings=settings.content(),
        inputs={"eval_metrics": evaluation.fingerprint, "incumbent": incumbent.fingerprint},
    )

    def build(draft: Draft) -> None:
        verdict = judge(
            pq.read_table(evaluation.path / SCORES_NAME),
            evaluation.stats,
            settings.gate,
            candidate=candidate.fingerprint,
            incumbent=incumbent.fingerprint,
            judged_before=count_judgements(
                models.versions(), evaluation.stats["evaluation_fingerprint"]
            ),
        )
        (draft.path / VERDICT_NAME).write_text(verdict.model_dump_json(indent=2))
        draft.stats |= {
            "promoted": verdict.promoted,
            "reasons": [reason.text for reason in verdict.reasons],
        }

    artifact = pipeline.make(context, identity, build)
    verdict = Verdict.model_validate_json((artifact.path / VERDICT_NAME).read_text())
    license_name = settings.license or base.stats["licence"]
    enter_base(models, base, model_source(base), base.stats["licence"])
    version = enter_candidate(models, evaluation, model_source(candidate), verdict, license_name)
    return materialization(artifact, verdict_metadata(version.version, verdict))


def model_source(artifact: Artifact) -> ModelSource:
    """Where the Hugging Face folder of a `checkpoint` or `base_model` artifact is."""
    is_checkpoint = artifact.manifest.kind == "checkpoint"
    folder = f"{artifact.url}/{MODEL_FOLDER}" if is_checkpoint else artifact.url
    return ModelSource(path=folder, fingerprint=artifact.fingerprint)
