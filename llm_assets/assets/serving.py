"""The champion, serving."""

from dagster import AssetExecutionContext, DataVersion, MaterializeResult, MetadataValue

from artifacts.errors import MissingArtifact
from llm_assets.assets.evaluation import model_version
from llm_assets.assets.stage import stage
from llm_assets.resources.pipeline import PipelineResource
from llm_assets.resources.registry import RegistryResource
from llm_assets.resources.serving import ServingPlatform

GROUP = "serving"
CODE_VERSION = "1"


@stage(deps=[model_version], group_name=GROUP, kinds={"fastapi"}, code_version=CODE_VERSION)
def endpoint(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    registry: RegistryResource,
    serving: ServingPlatform,
) -> MaterializeResult:
    """The registry's champion, answering requests; a rejected candidate leaves it as it was."""
    judged = pipeline.record.current("model_version", needed_by="endpoint")
    champion = registry.open(pipeline).find("champion")
    if champion is None:
        raise MissingArtifact(
            "The registry names no champion to serve. Materialize the model again: "
            'dagster asset materialize --select "model_version"'
        )
    served = serving.serve(pipeline.settings, champion, context.log.info)
    kept = "" if judged.stats["promoted"] else "; the candidate was rejected and does not serve"
    return MaterializeResult(
        data_version=DataVersion(champion.model_fingerprint),
        metadata={
            "summary": f"version {champion.version} at {served.url}{kept}",
            "url": MetadataValue.url(served.url),
            "predict_url": served.predict_url,
            "authorization": served.authorization,
            "version": champion.version,
            "model_fingerprint": champion.model_fingerprint,
            "made_now": served.changed,
            "outcome": served.reason,
        },
    )
