"""A pipeline whose endpoint is Vertex AI's, on the local Google."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from artifacts.store.identity import Identity
from artifacts.store.manifest import MANIFEST_NAME, Manifest, dump_with_checksum
from artifacts.store.store import Store
from llm_assets.cloud.settings import GoogleCloudSettings, load_cloud_settings
from llm_assets.cloud.vertex import Vertex
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveAddress
from llm_assets.endpoint.vertex import VertexServingPlatform
from llm_assets.registry.vertex import VertexModelRegistry
from tests.forked import ForkedProcess, Surroundings
from tests.llm_assets.registry.conftest import base_entry, judge
from tests.stand_ins.google import BUCKET, SERVE_IMAGE, LocalGoogle
from tests.stand_ins.processes import REPOSITORY, LocalImage
from tests.stand_ins.project import cloud_settings, write_cloud

LIGHT = (sys.executable, "-m", "tests.stand_ins.light_server")
BROKEN_IMAGE, SLOW_IMAGE, FAILING_IMAGE, FLAKY_IMAGE = (
    f"{SERVE_IMAGE}-{name}" for name in ("broken", "slow", "bad", "flaky")
)


def pipeline_settings(**changes: Any) -> PipelineSettings:
    """Those of a pipeline on the local Google."""
    content = {
        "name": "manual",
        "platform": "google_cloud",
        "store": f"gs://{BUCKET}/store",
        "raw_corpus": {"sources": [{"type": "files", "name": "m", "path": f"gs://{BUCKET}/text"}]},
        "base_model": {"folder": "/models/base"},
    }
    return PipelineSettings.model_validate(content | changes)


class Cloud:
    """One pipeline on the local Google, its endpoint's containers light ones."""

    def __init__(self, google: LocalGoogle, folder: Path) -> None:
        self.google = google
        self.folder = folder
        self.content = cloud_settings(google)
        rollout = {"steps": [0.5], "step_seconds": 0.1, "min_requests": 3}
        self.pipeline = pipeline_settings(
            store=f"gs://{BUCKET}/{folder.name}", endpoint={"rollout": rollout}
        )
        self.reports: list[str] = []
        self.configure()

    def configure(self, image: str = SERVE_IMAGE, **endpoint: Any) -> None:
        """Serve by these settings of the endpoint from now on, and by this image what is new."""
        self.content["images"]["serve"] = image
        self.content["endpoint"] |= endpoint
        self.path = write_cloud(self.folder, self.content)

    @property
    def registry(self) -> VertexModelRegistry:
        settings = GoogleCloudSettings.model_validate(self.content)
        return VertexModelRegistry(Store(self.pipeline.store), "manual", Vertex(settings))

    def register(self, model: str, image: str = SERVE_IMAGE) -> int:
        self.configure(image)
        self.registry.register_base(base_entry())
        return judge(self.registry, model).version

    def store_models(self, *models: str) -> None:
        """Put manifests where the registry says that models are, for who looks before serving."""
        for model in models:
            identity = Identity(kind="models", code_version="1")
            manifest = Manifest(**identity.model_dump(), fingerprint=model, files=[], stats={})
            place = f"models/{model}/{MANIFEST_NAME}"
            Store(f"gs://{BUCKET}").write_bytes(place, dump_with_checksum(manifest))

    def serve(self, version: int, still_wanted: Callable[[], bool] = lambda: True) -> LiveAddress:
        platform, wanted = self.platform, self.registry.get(version)
        return platform.serve(self.pipeline, wanted, self.reports.append, still_wanted)

    def start_serving(self, version: int) -> ForkedProcess:
        """Serve a version by a process of its own, which waits a second with each share."""
        before = self.pipeline
        self.set_rollout(step_seconds=1.0)
        slow, self.pipeline = self.pipeline, before
        pipeline = slow.model_dump_json(exclude_defaults=True)
        command = ["serve", str(self.path), pipeline, str(version)]
        surroundings = Surroundings(REPOSITORY, dict(os.environ), self.folder / "serving.txt")
        return ForkedProcess(_serve, command, surroundings)

    def stop(self) -> bool:
        return self.platform.stop(self.pipeline)

    def write_pipeline(self) -> Path:
        """The pipeline's file."""
        path = self.folder / "manual.yaml"
        path.write_text(self.pipeline.model_dump_json(exclude_defaults=True))
        return path

    @property
    def platform(self) -> VertexServingPlatform:
        return VertexServingPlatform(cloud_config_path=str(self.path))

    def shares(self) -> dict[str, int]:
        """What is deployed, and its per cent of the traffic."""
        (endpoint,) = self.google.endpoints.endpoints()
        return {
            deployed.display_name: endpoint.traffic_split.get(deployed.id, 0)
            for deployed in endpoint.deployed_models
        }

    def set_rollout(self, **changes: Any) -> None:
        """Change how the pipeline rolls out."""
        endpoint = self.pipeline.endpoint
        rollout = endpoint.rollout.model_copy(update=changes)
        endpoint = endpoint.model_copy(update={"rollout": rollout})
        self.pipeline = self.pipeline.model_copy(update={"endpoint": endpoint})

    def ask(self, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
        token = self.google.tokens.issue()["access_token"]
        headers = {"Authorization": f"Bearer {token}"}
        body = body or {"instances": ["The valve"]}
        return httpx.post(url, json=body, headers=headers, timeout=30)

    @contextmanager
    def load(self, url: str) -> Iterator[list[httpx.Response]]:
        """Constant requests; yields the answers."""
        answers: list[httpx.Response] = []
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                answers.append(self.ask(url))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield answers
        finally:
            over.set()
            thread.join()


def _serve() -> None:
    """What `Cloud.start_serving` runs."""
    cloud, pipeline, version = sys.argv[1:]
    settings = PipelineSettings.model_validate_json(pipeline)
    vertex = Vertex(load_cloud_settings(Path(cloud)))
    registry = VertexModelRegistry(Store(settings.store), settings.name, vertex)
    platform = VertexServingPlatform(cloud_config_path=cloud)
    platform.serve(settings, registry.get(int(version)), print)


@pytest.fixture
def settings(google: LocalGoogle) -> GoogleCloudSettings:
    """A project whose machines have no accelerators."""
    return GoogleCloudSettings.model_validate(cloud_settings(google))


@pytest.fixture
def cloud(google: LocalGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    for image, behavior in (
        (SERVE_IMAGE, {}),
        (BROKEN_IMAGE, {"BROKEN": "1"}),
        (SLOW_IMAGE, {"ANSWER_SECONDS": "0.4"}),
        (FAILING_IMAGE, {"FAIL_SHARE": "1"}),
        (FLAKY_IMAGE, {"FAIL_SHARE": "0.5"}),
    ):
        light = LocalImage(entrypoint=LIGHT, environment=behavior)
        monkeypatch.setitem(google.images, image, light)
    return Cloud(google, tmp_path)
