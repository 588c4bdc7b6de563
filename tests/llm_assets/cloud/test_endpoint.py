"""A Vertex AI endpoint through the real clients: deploy, share, roll back, stop."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner
from dagster import materialize
from google.cloud.aiplatform_v1 import PredictionServiceClient
from openai import OpenAI

from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from llm_assets.assets.serving import endpoint
from llm_assets.assets.stage import IO_MANAGER
from llm_assets.assets.verdict import VERDICT_NAME
from llm_assets.cli.main import commands
from llm_assets.cloud.settings import CLOUD_CONFIG_VARIABLE, GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.config import CONFIG_VARIABLE
from llm_assets.endpoint.vertex import VertexEndpoint, VertexTraffic
from llm_assets.io_manager import ArtifactIOManager
from llm_assets.platform import build_resources
from serving.rollout import NoLongerWanted, RolloutFailed
from tests.llm_assets.cloud.conftest import FAILING_IMAGE, FLAKY_IMAGE, SLOW_IMAGE, Cloud
from tests.llm_assets.registry.conftest import base_entry, verdict
from tests.stand_ins.google import BUCKET, SERVE_IMAGE
from tests.stand_ins.prediction import MOST_BYTES
from tests.stand_ins.serve_image import serve_image


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
    assert not cloud.serve(0).changed


@pytest.mark.soak
def test_real_models_are_deployed_share_the_traffic_and_go_back(
    cloud: Cloud, tiny_model_folder: Path
) -> None:
    """The serve image's own program, models fetched from the bucket, real answers.

    The base model is Vertex AI's first version of the model, and our version 1 its second.
    """
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
    assert answer.json()["predictions"][0] and answer.json()["modelVersionId"] == "2"
    address, name = served.url.removesuffix(":predict").split("/v1/")
    client = PredictionServiceClient(transport="rest", client_options={"api_endpoint": address})
    instance = {"prompt": "The valve", "max_tokens": 4}
    assert client.predict(endpoint=name, instances=[instance]).model_version_id == "2"
    with cloud.load(served.url) as answers:
        cloud.serve(cloud.register("b"))
        cloud.serve(1)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["modelVersionId"] for answer in answers} == {"2", "3"}
    assert cloud.shares() == {"version-1": 100}


def test_openai_clients_talk_to_the_endpoint_while_versions_follow_each_other(
    cloud: Cloud,
) -> None:
    cloud.configure(openai_routes=True)
    served = cloud.serve(cloud.register("a"))
    token = str(cloud.google.tokens.issue()["access_token"])
    client = OpenAI(base_url=f"{served.url}/v1", api_key=token)

    def ask() -> str:
        answer = client.completions.create(model="manual", prompt="The valve", max_tokens=4)
        return answer.choices[0].text

    assert ask() == "1"
    assert cloud.ask(served.predict_url).json()["predictions"] == ["1"]
    assert cloud.ask(served.url.replace("/invoke", ":predict")).status_code == 400
    with cloud.load(served.predict_url) as answers:
        cloud.serve(cloud.register("b"))
    assert {answer.status_code for answer in answers} == {200}
    assert "version 2 gets 50% of the traffic" in cloud.reports
    assert ask() == "2" and cloud.shares() == {"version-2-openai": 100}


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (FAILING_IMAGE, "answered none of 3 requests to its own address"),
        (FLAKY_IMAGE, "requests failed on it, and 0 of|answered none"),
        (SLOW_IMAGE, "slower than the version before"),
    ],
)
def test_openai_version_that_does_worse_is_taken_back(
    cloud: Cloud, image: str, reason: str
) -> None:
    cloud.configure(openai_routes=True)
    cloud.serve(cloud.register("a"))
    version = cloud.register("b", image)
    cloud.set_rollout(min_requests=100, block=1, warm_up=0)
    with pytest.raises(RolloutFailed, match=rf"(?s)({reason}).*Still serving: version 1"):
        cloud.serve(version)
    assert cloud.shares() == {"version-1-openai": 100}


def test_openai_routes_take_over_at_once_and_go_back_so(cloud: Cloud) -> None:
    """No client has both addresses, so there are no shares between the two ways."""
    cloud.serve(cloud.register("a"))
    for routes, name in ((True, "version-1-openai"), (False, "version-1")):
        cloud.configure(openai_routes=routes)
        cloud.reports.clear()
        assert cloud.serve(1).changed and cloud.shares() == {name: 100}
        assert not [line for line in cloud.reports if "% of the traffic" in line]


def test_openai_bodies_pass_raw_prediction_and_large_ones_nowhere(cloud: Cloud) -> None:
    url = cloud.serve(cloud.register("a")).url
    for method in (":rawPredict", ":streamRawPredict"):
        answer = cloud.ask(url.replace(":predict", method), {"prompt": "The valve"})
        assert answer.json()["choices"][0]["text"] == "1"
    large = cloud.ask(url, {"instances": ["a" * MOST_BYTES]})
    assert large.status_code == 413 and "exceeds the limit" in large.text


def test_endpoint_is_a_dedicated_one_with_the_machines_of_the_settings(cloud: Cloud) -> None:
    cloud.configure(maximum_replicas=3, target_utilization=70, request_seconds=300)
    cloud.serve(cloud.register("a"))
    (endpoint,) = cloud.google.endpoints.endpoints()
    assert endpoint.client_connection_config.inference_timeout.total_seconds() == 300
    assert endpoint.dedicated_endpoint_enabled and endpoint.name.endswith("/endpoints/manual")
    resources = endpoint.deployed_models[0].dedicated_resources
    assert resources.machine_spec.machine_type == "n1-standard-4"
    assert (resources.min_replica_count, resources.max_replica_count) == (1, 3)
    assert resources.autoscaling_metric_specs[0].target == 70
    cloud.configure(machine_type="n1-standard-8")
    assert cloud.serve(1).changed, "the same version moves to other machines"
    (deployed,) = endpoint.deployed_models
    assert deployed.dedicated_resources.machine_spec.machine_type == "n1-standard-8"
    cloud.content["serving_account"] = account = "narrow@p.iam.gserviceaccount.com"
    cloud.configure(access_logging=True)
    assert cloud.serve(1).changed, "the same version logs, and runs as another account"
    (deployed,) = cloud.google.endpoints.endpoints()[0].deployed_models
    assert deployed.enable_access_logging and deployed.service_account == account


def test_asset_serves_the_champion_on_the_cloud(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.register("a")
    cloud.store_models("a")
    store = Store(cloud.pipeline.store)
    identity = Identity(kind="model_version", code_version="1")

    def write(draft: Draft) -> None:
        (draft.path / VERDICT_NAME).write_text(verdict("a", "base").model_dump_json())

    judged, _ = store.make(identity, write)
    Pipeline(store, "manual").advance(judged)
    config = cloud.write_pipeline()
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud.path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    built = build_resources(cloud.pipeline, str(config)) | {
        IO_MANAGER: ArtifactIOManager(config_path=str(config))
    }
    resources = {cloud.pipeline.resource_key(name): one for name, one in built.items()}
    result = materialize([endpoint.asset(cloud.pipeline)], resources=resources)
    (made,) = result.asset_materializations_for_node("endpoint")
    url = str(made.metadata["url"].value)
    assert made.metadata["version"].value == 1 and made.metadata["made_now"].value
    assert cloud.ask(url).json()["predictions"] == ["1"]


def test_commands_move_registry_and_endpoint_together(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.register("a")
    cloud.store_models("base", "a")
    monkeypatch.setenv(CONFIG_VARIABLE, str(cloud.write_pipeline()))
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
    assert "champion: version 0," in done.output
    assert "stopped" in CliRunner().invoke(commands, ["stop"], catch_exceptions=False).output


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_version_that_is_no_longer_wanted_is_taken_out(cloud: Cloud, looks: int) -> None:
    """Before it is deployed, once it is deployed, and amid its first step."""
    cloud.serve(cloud.register("a"))
    version, answers = cloud.register("b"), iter([True] * looks)
    with pytest.raises(NoLongerWanted):
        cloud.serve(version, lambda: next(answers, False))
    assert cloud.shares() == {"version-1": 100}
    assert any("version 2 gets" in line for line in cloud.reports) == (looks == 2)


def test_a_canceled_rollout_leaves_no_machines_of_the_new_version(cloud: Cloud) -> None:
    cloud.serve(cloud.register("a"))
    version, looks = cloud.register("b"), iter([True] * 3)

    def canceled() -> bool:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        cloud.serve(version, canceled)
    assert cloud.shares() == {"version-1": 100}


def test_private_endpoint_is_reached_by_private_service_connect(cloud: Cloud) -> None:
    cloud.configure(private_projects=["my-other-project"])
    cloud.serve(cloud.register("a"))
    (endpoint,) = cloud.google.endpoints.endpoints()
    connect = endpoint.private_service_connect_config
    assert connect.enable_private_service_connect and not endpoint.dedicated_endpoint_enabled
    assert list(connect.project_allowlist) == ["my-other-project"]
    with pytest.raises(RolloutFailed, match=r"endpoint\.private_address"):
        cloud.serve(cloud.register("b"))
    assert cloud.shares() == {"version-1": 100}
    address = cloud.google.endpoints.prediction.url
    cloud.configure(private_address=address)
    assert cloud.serve(2).changed


def test_stopping_a_half_done_rollout_removes_both_versions(cloud: Cloud) -> None:
    """One has the traffic and the other none; Vertex AI undeploys neither while it has some."""
    cloud.serve(cloud.register("a"))
    version = cloud.registry.get(cloud.register("b"))
    vertex = Vertex(GoogleCloudSettings.model_validate(cloud.content))
    name = cloud.registry.resource_name(version.version)
    endpoint = VertexEndpoint(vertex, "manual")
    traffic = VertexTraffic(endpoint, name, version)
    assert asyncio.run(traffic.start())
    assert cloud.shares() == {"version-1": 100, "version-2": 0}
    assert cloud.stop()
    assert cloud.google.endpoints.endpoints() == []
    assert cloud.google.endpoints.processes() == []


def test_stopping_removes_all_that_costs(cloud: Cloud) -> None:
    store, stopped = Store(cloud.pipeline.store), layout.stopped(cloud.pipeline.name)
    cloud.serve(cloud.register("a"))
    assert not store.has_file(stopped)
    assert cloud.stop()
    # By this `endpoint_follows` knows that nothing is to be deployed again.
    assert store.has_file(stopped)
    assert not cloud.stop()
    cloud.serve(1)
    assert not store.has_file(stopped)
    assert cloud.stop()
    assert cloud.google.endpoints.endpoints() == []
    assert cloud.google.endpoints.processes() == []
