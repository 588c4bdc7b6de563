"""The champion, serving."""

from typing import Any

from dagster import AssetExecutionContext, DataVersion, MaterializeResult, MetadataValue

from llm_assets.assets.evaluation import model_version
from llm_assets.assets.stage import readable, stage
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.endpoint.follow import serve_wanted
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource

GROUP = "serving"
CODE_VERSION = "1"


@stage(
    deps=[model_version],
    group_name=GROUP,
    kinds={"python"},
    code_version=CODE_VERSION,
    pool="registry",
)
def endpoint(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    registry: RegistryResource,
    serving: ServingPlatform,
) -> MaterializeResult:
    """The wanted version, answering requests; a rejected candidate leaves it as it was.

    An OpenAI base URL under `/v1`, where the pipeline's name is the model. A new version takes over
    in steps. `llm-assets rollback` has the version before answer again at once. `latency_seconds`
    is what a client waits for eight tokens.
    """
    judged = pipeline.record.current("model_version", needed_by="endpoint")
    models = registry.open(pipeline)
    champion, served = serve_wanted(
        models, serving, pipeline.settings, pipeline.record, context.log.info
    )
    kept = "" if judged.stats["promoted"] else "; the candidate was rejected and does not serve"
    if served.instead_of is not None:
        kept += f"; WARNING: version {served.instead_of} is wanted and cannot be served"
    told: dict[str, Any] = {
        "summary": f"version {champion.version} at {served.url}{kept}",
        "url": MetadataValue.url(served.url),
        "predict_url": served.predict_url,
        "authorization": served.authorization,
        "version": champion.version,
        "latency_seconds": serving.latency(pipeline.settings, context.log.info),
        "model_fingerprint": champion.model_fingerprint,
        "made_now": served.changed,
        "outcome": served.reason,
        "engine": served.engine,
        "compared": served.compared,
    }
    return MaterializeResult(
        data_version=DataVersion(champion.model_fingerprint),
        metadata=readable({name: it for name, it in told.items() if it not in ("", None)}),
    )
