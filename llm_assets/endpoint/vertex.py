"""Serving on Google Cloud: a Vertex AI endpoint that follows the champion."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from artifacts.store.store import Store
from llm_assets.cloud.config import load_cloud_settings
from llm_assets.cloud.serving_image import engine_memory
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import Served, ServingPlatform
from llm_assets.endpoint.vertex_endpoint import VertexEndpoint
from llm_assets.endpoint.vertex_traffic import VertexTraffic
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.vertex import VertexModelRegistry
from serving.rollout import RolledBack, RolloutFailed, roll_out
from serving.vertex.context import longest_context

PRIVATE = "its private address"
AUTHORIZATION = '"Authorization: Bearer $(gcloud auth print-access-token)"'


class VertexServingPlatform(ServingPlatform):
    """A dedicated endpoint of Vertex AI, named after the pipeline."""

    cloud_config_path: str
    """The cloud project's file."""

    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Callable[[str], None]
    ) -> Served:
        vertex = Vertex(load_cloud_settings(Path(self.cloud_config_path)), report)
        store = Store(settings.store)
        model = VertexModelRegistry(store, settings.name, vertex).resource_name(version.version)
        endpoint = VertexEndpoint(vertex, settings.name)
        rollout = settings.endpoint.rollout
        traffic = VertexTraffic(endpoint, vertex.settings, model, version, rollout.probe, report)
        with store.lease(f"endpoint-{settings.name}", lambda who: report(f"waiting for {who}")):
            changed = not traffic.is_alone()
            if changed:
                _check_fit(vertex.settings, version, report)
                seconds = vertex.settings.endpoint.request_seconds
                try:
                    _run(roll_out(traffic, rollout, seconds, report))
                except RolledBack as error:
                    raise RolloutFailed(
                        f"Version {version.version} is not served: {error}\n{_who_serves(endpoint)}"
                    ) from error
        url = endpoint.predict_url() or PRIVATE
        return Served(
            url=url,
            predict_url=url,
            authorization=AUTHORIZATION,
            changed=changed,
            reason="serving now" if changed else "already serving",
        )

    def serves(self, settings: PipelineSettings) -> bool:
        vertex = Vertex(load_cloud_settings(Path(self.cloud_config_path)))
        found = VertexEndpoint(vertex, settings.name).find()
        return found is not None and any(found.traffic_split.values())

    def stop(self, settings: PipelineSettings) -> bool:
        vertex = Vertex(load_cloud_settings(Path(self.cloud_config_path)))
        endpoint = VertexEndpoint(vertex, settings.name)
        with Store(settings.store).lease(f"endpoint-{settings.name}"):
            if endpoint.find() is None:
                return False
            endpoint.delete()
        return True


def _run(rollout: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Unlike in `asyncio.run`, a signal ends the call that is being waited for."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(rollout)
    finally:
        loop.close()


def _check_fit(
    settings: GoogleCloudSettings, version: ModelVersion, report: Callable[[str], None]
) -> None:
    """Refuse a model that the accelerators cannot hold, before they are paid for."""
    memory = engine_memory(settings.endpoint)
    if memory is not None:
        tokens = longest_context(version.model_url, memory)
        report(f"the accelerators hold texts of up to {tokens:,} tokens")


def _who_serves(endpoint: VertexEndpoint) -> str:
    found = endpoint.find()
    serving = [d for d in found.deployed_models if found.traffic_split.get(d.id)] if found else []
    names = " and ".join(d.display_name.replace("-", " ") for d in serving)
    return f"Still serving: {names}." if names else "No version serves."
