"""The champion, serving."""

from typing import Any

import dagster as dg

from artifacts.store.store import Artifact
from llm_assets.assets.stage import readable, stage
from llm_assets.assets.verdict import read_verdict
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.endpoint.folder import why_unable
from llm_assets.endpoint.follow import NothingToServe, serve_wanted
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.card import describe_outcome
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.state import ModelVersion

CODE_VERSION = "1"


def _named(version: ModelVersion | None) -> str:
    return f"version {version.version}" if version else "none"


def wanted_version_serves(
    pipeline: PipelineResource, registry: RegistryResource
) -> dg.AssetCheckResult:
    """The endpoint has confirmed that it serves the wanted version, which was decided on last; or
    there is nothing to serve yet."""
    state = registry.open(pipeline).state()
    wanted, champion = state.find("wanted"), state.find("champion")
    is_early = wanted and not champion and why_unable(pipeline.settings, pipeline.record, wanted)
    return dg.AssetCheckResult(
        passed=bool(is_early) or (wanted is not None and wanted == champion),
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"wanted: {_named(wanted)}, serving: {_named(champion)}",
        metadata={
            "wanted": wanted.version if wanted else -1,
            "serving": champion.version if champion else -1,
        },
    )


# In no pool, like a rollback: a run that trains holds its pools until it ends, and an endpoint that
# died is not to wait for it.
@stage(
    code_version=CODE_VERSION,
    group="serving",
    kinds={"python"},
    checks=[wanted_version_serves],
)
def endpoint(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    registry: RegistryResource,
    serving: ServingPlatform,
    model_version: Artifact,
) -> dg.MaterializeResult:
    """The wanted version, answering requests; a rejected candidate does not change it.

    A new version takes over in steps. `llm-assets rollback` returns to the previous version at
    once. On this machine, `/v1` is an OpenAI base URL, where the model is named after the pipeline,
    and `latency_seconds` is how long a client waits for a short answer.
    """
    # The store keeps nothing of this stage, so nothing is planned: each run looks at what serves.
    models = registry.open(pipeline)
    try:
        champion, served = serve_wanted(
            models, serving, pipeline.settings, pipeline.record, context.log.info
        )
    except NothingToServe as reason:
        verdict = describe_outcome(models.state(), read_verdict(model_version))
        told = {"summary": str(reason), "outcome": "nothing to serve", "newest_candidate": verdict}
        return dg.MaterializeResult(data_version=dg.DataVersion("none"), metadata=told)
    verdict = describe_outcome(models.state(), read_verdict(model_version))
    note = "" if verdict == "promoted" else f"; the newest candidate was {verdict}"
    # A version that cannot be started gives way, so that something serves.
    if served.instead_of is not None:
        note += f"; WARNING: version {served.instead_of} is wanted but cannot be served"
    metadata: dict[str, Any] = {
        "summary": f"version {champion.version} at {served.url}{note}",
        "url": dg.MetadataValue.url(served.url),
        "predict_url": served.predict_url,
        "authorization": served.authorization,
        "version": champion.version,
        "latency_seconds": serving.latency(pipeline.settings, context.log.info),
        "model_fingerprint": champion.model_fingerprint,
        "newest_candidate": verdict,
        "made_now": served.changed,
        "outcome": "serving now" if served.changed else "already serving",
        "engine": served.engine,
        "compared": served.compared,
    }
    return dg.MaterializeResult(
        data_version=dg.DataVersion(champion.model_fingerprint),
        metadata=readable({name: it for name, it in metadata.items() if it not in ("", None)}),
    )
