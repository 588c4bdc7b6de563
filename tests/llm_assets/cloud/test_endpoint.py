"""A Vertex AI endpoint through the real clients: deploy, share, roll back, crash, ask again."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from click.testing import CliRunner
from dagster import materialize
from google.cloud.aiplatform_v1 import PredictionServiceClient

from artifacts.errors import UserError
from artifacts.storage.machine import CACHE_VARIABLE
from artifacts.store.identity import Identity
from artifacts.store.manifest import MANIFEST_NAME, Manifest, dump_manifest
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.assets.serving import endpoint
from llm_assets.cli.main import commands
from llm_assets.cloud.config import CLOUD_CONFIG_VARIABLE
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.config import CONFIG_VARIABLE, PipelineSettings
from llm_assets.endpoint.base import Served
from llm_assets.endpoint.vertex import VertexServingPlatform
from llm_assets.endpoint.vertex_endpoint import VertexEndpoint
from llm_assets.endpoint.vertex_traffic import VertexTraffic
from llm_assets.platform import build_resources
from llm_assets.registry.vertex import VertexModelRegistry
from serving.rollout import RolloutFailed
from tests.llm_assets.registry.conftest import base_entry, judge
from tests.stand_ins.google import BUCKET, SERVE_IMAGE, LocalGoogle
from tests.stand_ins.processes import LocalImage
from tests.stand_ins.project import cloud_settings
from tests.stand_ins.serve_image import serve_image

LIGHT = (sys.executable, "-m", "tests.stand_ins.light_server")
BROKEN_IMAGE, SLOW_IMAGE, FAILING_IMAGE = (f"{SERVE_IMAGE}-{n}" for n in ("broken", "slow", "bad"))


class Cloud:
    """One pipeline on the local Google, its endpoint's containers light ones."""

    def __init__(self, google: LocalGoogle, folder: Path) -> None:
        self.google = google
        self.path = folder / "google_cloud.yaml"
        self.content = cloud_settings(google)
        self.pipeline = PipelineSettings.model_validate(
            {
                "name": "manual",
                "platform": "google_cloud",
                "store": f"gs://{BUCKET}/{folder.name}",
                "raw_corpus": {"sources": [{"type": "files", "name": "m", "path": "m"}]},
                "base_model": {"folder": "/models/base"},
                "endpoint": {
                    "rollout": {
                        "steps": [0.5],
                        "step_seconds": 0.1,
                        "min_requests": 3,
                    }
                },
            }
        )
        self.reports: list[str] = []
        self.use_image(SERVE_IMAGE)

    def use_image(self, image: str) -> None:
        """Register versions with another serving image from now on."""
        self.content["images"]["serve"] = image
        self.path.write_text(yaml.safe_dump(self.content))

    @property
    def registry(self) -> VertexModelRegistry:
        settings = GoogleCloudSettings.model_validate(self.content)
        return VertexModelRegistry(Store(self.pipeline.store), "manual", Vertex(settings))

    def register(self, model: str, image: str = SERVE_IMAGE) -> int:
        self.use_image(image)
        self.registry.register_base(base_entry())
        return judge(self.registry, model).version

    def store_models(self, *models: str) -> None:
        """Put manifests where the registry says that models are, for who looks before serving."""
        for model in models:
            identity = Identity(kind="models", code_version="1")
            manifest = Manifest(**identity.model_dump(), fingerprint=model, files=[], stats={})
            place = f"models/{model}/{MANIFEST_NAME}"
            Store(f"gs://{BUCKET}").write_bytes(place, dump_manifest(manifest))

    def serve(self, version: int) -> Served:
        platform = VertexServingPlatform(cloud_config_path=str(self.path))
        return platform.serve(self.pipeline, self.registry.get(version), self.reports.append)

    def stop(self) -> bool:
        return VertexServingPlatform(cloud_config_path=str(self.path)).stop(self.pipeline)

    def shares(self) -> dict[str, int]:
        """What is deployed, and its per cent of the traffic."""
        (endpoint,) = self.google.endpoints.endpoints()
        return {
            deployed.display_name: endpoint.traffic_split.get(deployed.id, 0)
            for deployed in endpoint.deployed_models
        }

    def ask(self, url: str) -> httpx.Response:
        token = self.google.tokens.issue()["access_token"]
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(url, json={"instances": ["The valve"]}, headers=headers, timeout=30)

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


@pytest.fixture
def cloud(google: LocalGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    for image, behavior in (
        (SERVE_IMAGE, {}),
        (BROKEN_IMAGE, {"BROKEN": "1"}),
        (SLOW_IMAGE, {"ANSWER_SECONDS": "0.4"}),
        (FAILING_IMAGE, {"FAIL_SHARE": "1"}),
    ):
        light = LocalImage(entrypoint=LIGHT, environment=behavior)
        monkeypatch.setitem(google.images, image, light)
    return Cloud(google, tmp_path)


def test_versions_follow_each_other_and_go_back_without_a_failed_request(cloud: Cloud) -> None:
    cloud.registry.register_base(base_entry())
    url = cloud.serve(0).url
    assert cloud.ask(url).json()["predictions"] == ["0"]
    with cloud.load(url) as answers:
        cloud.register("a")
        served = cloud.serve(1)
        assert served.changed and cloud.shares() == {"version-1": 100}
        cloud.registry.confirm(1)
        before = cloud.registry.roll_back("Ada", "users complain")
        assert cloud.serve(before.version).changed
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["predictions"][0] for answer in answers} == {"0", "1"}
    assert cloud.shares() == {"version-0": 100}
    assert len(cloud.google.endpoints.processes()) == 1
    assert "version 1 gets 50% of the traffic" in cloud.reports
    again = cloud.serve(0)
    assert (again.changed, again.reason) == (False, "already serving")


@pytest.mark.soak
def test_real_models_are_deployed_share_the_traffic_and_go_back(
    cloud: Cloud, tiny_model_folder: Path
) -> None:
    """The serve image's own program, models fetched from the bucket, real answers."""
    cloud.google.images[SERVE_IMAGE] = serve_image()
    # Shorter than the model takes to load: the port has to be open before that.
    cloud.google.endpoints.containers.liveness_seconds = 0.2
    for model in "ab":
        store = Store(f"gs://{BUCKET}/models")
        for path in tiny_model_folder.iterdir():
            store.write_bytes(f"{model}/{path.name}", path.read_bytes())
    served = cloud.serve(cloud.register("a"))
    answer = cloud.ask(served.url)
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"][0] and answer.json()["modelVersionId"] == "1"
    address, name = served.url.removesuffix(":predict").split("/v1/")
    client = PredictionServiceClient(transport="rest", client_options={"api_endpoint": address})
    instance = {"prompt": "The valve", "max_tokens": 4}
    assert client.predict(endpoint=name, instances=[instance]).model_version_id == "1"
    with cloud.load(served.url) as answers:
        cloud.serve(cloud.register("b"))
        cloud.serve(1)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["modelVersionId"] for answer in answers} == {"1", "2"}
    assert cloud.shares() == {"version-1": 100}


def test_endpoint_is_a_dedicated_one_with_the_machines_of_the_settings(cloud: Cloud) -> None:
    cloud.content["endpoint"] |= {"maximum_replicas": 3, "target_utilization": 70}
    cloud.serve(cloud.register("a"))
    (endpoint,) = cloud.google.endpoints.endpoints()
    assert endpoint.dedicated_endpoint_enabled and endpoint.name.endswith("/endpoints/manual")
    resources = endpoint.deployed_models[0].dedicated_resources
    assert resources.machine_spec.machine_type == "n1-standard-4"
    assert (resources.min_replica_count, resources.max_replica_count) == (1, 3)
    assert resources.autoscaling_metric_specs[0].target == 70
    cloud.content["endpoint"] |= {"machine_type": "n1-standard-8"}
    cloud.path.write_text(yaml.safe_dump(cloud.content))
    assert cloud.serve(1).changed, "the same version moves to other machines"
    (deployed,) = endpoint.deployed_models
    assert deployed.dedicated_resources.machine_spec.machine_type == "n1-standard-8"


@pytest.mark.fault(
    "Google Cloud",
    "rollout of a version that shows: {reason}",
    sees="that reason, and who still serves",
    then="taken back",
)
@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (FAILING_IMAGE, "requests failed on it"),
        (SLOW_IMAGE, "slower than the version before"),
        (BROKEN_IMAGE, "the model's files are damaged"),
        (f"{SERVE_IMAGE}-missing", "images/build.sh"),
    ],
)
def test_version_that_disappoints_is_taken_back(cloud: Cloud, image: str, reason: str) -> None:
    cloud.serve(cloud.register("a"))
    version = cloud.register("b", image)
    more = cloud.pipeline.endpoint.rollout.model_copy(
        update={"min_requests": 100, "block": 1, "warm_up": 0}
    )
    endpoint = cloud.pipeline.endpoint.model_copy(update={"rollout": more})
    cloud.pipeline = cloud.pipeline.model_copy(update={"endpoint": endpoint})
    with pytest.raises(RolloutFailed, match=rf"(?s){reason}.*Still serving: version 1"):
        cloud.serve(version)
    assert cloud.shares() == {"version-1": 100}
    assert len(cloud.google.endpoints.processes()) == 1


@pytest.mark.fault(
    "Google Cloud", "no quota to deploy", sees="where to ask for it", then="asked again, it serves"
)
def test_missing_quota_says_what_to_ask_for_and_is_mended_by_asking_again(cloud: Cloud) -> None:
    version = cloud.register("a")
    cloud.google.endpoints.quota = 0
    with pytest.raises(RolloutFailed, match=r"(?s)iam-admin/quotas.*No version serves"):
        cloud.serve(version)
    cloud.google.endpoints.quota = 1
    assert cloud.serve(version).changed and cloud.shares() == {"version-1": 100}


CRASHES = {
    "while it is deployed": ("DeployModel", 1),
    "after its first share": ("UpdateEndpoint", 1),
    "after its last share": ("UpdateEndpoint", 2),
    "while the old one is removed": ("UndeployModel", 1),
}


@pytest.mark.fault(
    "Google Cloud",
    "killed in a deployment: {when}",
    sees="the run is gone",
    then="a whole version serves; the next run goes on",
)
@pytest.mark.parametrize("when", CRASHES)
def test_crash_leaves_a_whole_version_and_the_next_run_goes_on(cloud: Cloud, when: str) -> None:
    url = cloud.serve(cloud.register("a")).url
    version = cloud.register("b")
    method, count = CRASHES[when]
    started = cloud.google.server.faults.count(method)
    cloud.google.endpoints.hold_deployments.set()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *program_arguments(cloud, version)])
    try:
        if method != "DeployModel":
            cloud.google.endpoints.hold_deployments.clear()
        wait_for(
            lambda: (
                cloud.google.server.faults.count(method) >= started + count
                or process.poll() is not None
            )
        )
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert cloud.ask(url).status_code == 200
    assert sum(cloud.shares().values()) == 100
    cloud.google.endpoints.hold_deployments.clear()
    cloud.serve(version)
    assert cloud.shares() == {"version-2": 100}
    assert cloud.google.server.faults.count("DeployModel") == 2, "nothing was deployed twice"
    assert len(cloud.google.endpoints.processes()) == 1


PROGRAM = """
import sys, yaml
from pathlib import Path
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.storage.machine import CACHE_VARIABLE
from artifacts.store.store import Store
from llm_assets.assets.serving import endpoint
from llm_assets.cli.main import commands
from llm_assets.cloud.config import CLOUD_CONFIG_VARIABLE
from llm_assets.cloud.config import load_cloud_settings
from llm_assets.registry.vertex import VertexModelRegistry
from llm_assets.endpoint.vertex import VertexServingPlatform
from llm_assets.cloud.vertex import Vertex
from llm_assets.config import PipelineSettings

cloud, pipeline, version = sys.argv[1:]
settings = PipelineSettings.model_validate_json(pipeline)
vertex = Vertex(load_cloud_settings(Path(cloud)))
registry = VertexModelRegistry(Store(settings.store), settings.name, vertex)
platform = VertexServingPlatform(cloud_config_path=cloud)
platform.serve(settings, registry.get(int(version)), print)
"""


def program_arguments(cloud: Cloud, version: int) -> list[str]:
    slow = cloud.pipeline.endpoint.rollout.model_copy(update={"step_seconds": 1.0})
    endpoint = cloud.pipeline.endpoint.model_copy(update={"rollout": slow})
    pipeline = cloud.pipeline.model_copy(update={"endpoint": endpoint})
    return [str(cloud.path), pipeline.model_dump_json(exclude_defaults=True), str(version)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_asset_serves_the_champion_on_the_cloud(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.register("a")
    cloud.store_models("a")
    store = Store(cloud.pipeline.store)
    identity = Identity(kind="model_version", code_version="1")
    judged, _ = store.make(identity, lambda draft: draft.stats.update(promoted=True))
    Pipeline(store, "manual").advance(judged)
    config = tmp_path / "manual.yaml"
    config.write_text(cloud.pipeline.model_dump_json(exclude_defaults=True))
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud.path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    resources = build_resources(cloud.pipeline, str(config))
    result = materialize([endpoint], resources=resources)
    (made,) = result.asset_materializations_for_node("endpoint")
    url = str(made.metadata["url"].value)
    assert made.metadata["version"].value == 1 and made.metadata["made_now"].value
    assert cloud.ask(url).json()["predictions"] == ["1"]


def test_commands_move_registry_and_endpoint_together(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.registry.register_base(base_entry())
    cloud.register("a")
    cloud.store_models("base", "a")
    config = tmp_path / "manual.yaml"
    config.write_text(cloud.pipeline.model_dump_json(exclude_defaults=True))
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud.path))
    for arguments, version in (
        (["approve", "1", "--reason", "reads well"], 1),
        (["rollback", "--reason", "users complain"], 0),
        (["reject", "1", "--reason", "it swears"], 0),
    ):
        done = CliRunner().invoke(commands, [*arguments, "--name", "Ada"], catch_exceptions=False)
        assert f"Version {version} serves at http" in done.output
        assert cloud.shares() == {f"version-{version}": 100}
    done = CliRunner().invoke(commands, ["versions"], catch_exceptions=False)
    assert "0 (wanted, champion)" in done.output and "rejected by Ada: it swears" in done.output
    assert "serves: version 0" in done.output
    assert "ended" in CliRunner().invoke(commands, ["stop"], catch_exceptions=False).output


@pytest.mark.fault(
    "Google Cloud", "reply to a deployment lost", sees="nothing", then="one deployment"
)
def test_busy_service_and_a_lost_reply_change_nothing(cloud: Cloud) -> None:
    version = cloud.register("a")
    faults = cloud.google.server.faults
    unavailable = grpc.StatusCode.UNAVAILABLE
    faults.add("DeployModel", unavailable, "busy", after_work=True)
    faults.add("GetEndpoint", unavailable, "busy")
    cloud.serve(version)
    assert cloud.shares() == {"version-1": 100}
    assert len(cloud.google.endpoints.processes()) == 1


@pytest.mark.fault(
    "Google Cloud", "deployment forbidden", sees="the role", then="the version before serves"
)
def test_forbidden_deployment_names_the_role(cloud: Cloud) -> None:
    version = cloud.register("a")
    cloud.google.server.faults.add("DeployModel", grpc.StatusCode.PERMISSION_DENIED, "no right")
    with pytest.raises(RolloutFailed, match=r"roles/aiplatform\.user"):
        cloud.serve(version)


def test_private_endpoint_is_reached_by_private_service_connect(cloud: Cloud) -> None:
    cloud.content["endpoint"] |= {"private_projects": ["my-other-project"]}
    cloud.serve(cloud.register("a"))
    (endpoint,) = cloud.google.endpoints.endpoints()
    connect = endpoint.private_service_connect_config
    assert connect.enable_private_service_connect and not endpoint.dedicated_endpoint_enabled
    assert list(connect.project_allowlist) == ["my-other-project"]
    with pytest.raises(RolloutFailed, match=r"endpoint\.private_address"):
        cloud.serve(cloud.register("b"))
    assert cloud.shares() == {"version-1": 100}
    address = cloud.google.endpoints.prediction.url
    cloud.content["endpoint"] |= {"private_address": address}
    cloud.use_image(SERVE_IMAGE)
    assert cloud.serve(2).changed


def test_model_that_the_accelerators_cannot_hold_is_refused_before_they_are_paid_for(
    cloud: Cloud,
) -> None:
    cloud.serve(cloud.register("a"))
    cloud.content["endpoint"] |= {"accelerator_type": "NVIDIA_L4", "accelerator_count": 1}
    number = cloud.register("b")
    store = Store(f"gs://{BUCKET}/models/b")
    store.write_bytes("config.json", b'{"n_layer": 48, "n_head": 8, "n_embd": 1000000}')
    with pytest.raises(UserError, match="does not fit"):
        cloud.serve(number)
    assert cloud.shares() == {"version-1": 100}
    assert cloud.google.server.faults.count("DeployModel") == 1


def test_stopping_a_half_done_rollout_removes_both_versions(cloud: Cloud) -> None:
    """One has the traffic and the other none; Vertex AI undeploys neither while it has some."""
    cloud.serve(cloud.register("a"))
    version = cloud.registry.get(cloud.register("b"))
    vertex = Vertex(GoogleCloudSettings.model_validate(cloud.content))
    name = cloud.registry.resource_name(version.version)
    endpoint = VertexEndpoint(vertex, "manual")
    traffic = VertexTraffic(endpoint, vertex.settings, name, version, "The", print)
    assert asyncio.run(traffic.start())
    assert cloud.shares() == {"version-1": 100, "version-2": 0}
    assert cloud.stop()
    assert cloud.google.endpoints.endpoints() == []
    assert cloud.google.endpoints.processes() == []


def test_stopping_removes_all_that_costs(cloud: Cloud) -> None:
    assert not cloud.stop()
    cloud.serve(cloud.register("a"))
    assert cloud.stop()
    assert cloud.google.endpoints.endpoints() == []
    assert cloud.google.endpoints.processes() == []
