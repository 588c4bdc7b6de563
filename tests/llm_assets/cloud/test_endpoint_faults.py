"""Deployments to Vertex AI that fail or are killed: a whole version serves all the same."""

import threading

import grpc
import pytest
from google.protobuf import empty_pb2

from artifacts.errors import UserError
from artifacts.store.store import Store
from llm_assets.cloud.vertex import VertexRefused
from llm_assets.endpoint.vertex import VertexEndpoint
from serving.rollout import NoLongerWanted, RolloutFailed
from tests.llm_assets.cloud.conftest import (
    BROKEN_IMAGE,
    FAILING_IMAGE,
    FLAKY_IMAGE,
    SLOW_IMAGE,
    Cloud,
)
from tests.stand_ins.google import BUCKET, SERVE_IMAGE, LocalGoogle
from tests.stand_ins.project import L4
from tests.waiting import wait_until

SOAK = pytest.mark.soak


@pytest.mark.fault(
    "Google Cloud",
    "rollout of a version {fault}",
    sees="the reason, and which version still serves",
    then="rolled back",
)
@pytest.mark.parametrize(
    ("image", "reason", "fault"),
    [
        (FAILING_IMAGE, "requests failed, and of", "whose requests fail"),
        (SLOW_IMAGE, "slower than the version before", "that is slower than the previous one"),
        (BROKEN_IMAGE, "the model's files are damaged", "whose model files are damaged"),
        (f"{SERVE_IMAGE}-missing", "images/build.sh", "whose image is missing"),
    ],
)
def test_version_that_disappoints_is_taken_back(
    cloud: Cloud, image: str, reason: str, fault: str
) -> None:
    cloud.serve(cloud.register("a"))
    version = cloud.register("b", image)
    cloud.set_rollout(min_requests=100, block=1, warm_up=0)
    with pytest.raises(RolloutFailed, match=rf"(?s){reason}.*Still serving: version 1"):
        cloud.serve(version)
    assert cloud.shares() == {"version-1": 100}, fault
    assert len(cloud.google.endpoints.processes()) == 1


@pytest.mark.fault(
    "Google Cloud",
    "rollout while half of all requests fail, whichever version answers them",
    sees="each failure",
    then="the new version is not rolled back",
)
@pytest.mark.soak
def test_failures_of_both_versions_are_not_held_against_the_new_one(cloud: Cloud) -> None:
    cloud.serve(cloud.register("a", FLAKY_IMAGE))
    cloud.set_rollout(min_requests=40)
    assert cloud.serve(cloud.register("b", FLAKY_IMAGE)).changed
    assert sum("a request failed" in line for line in cloud.reports) > 20
    assert cloud.shares() == {"version-2": 100}


@pytest.mark.fault(
    "Google Cloud",
    "no quota to deploy",
    sees="where to request it",
    then="once there is quota, the next run deploys it",
)
def test_missing_quota_says_what_to_ask_for_and_is_mended_by_asking_again(cloud: Cloud) -> None:
    version = cloud.register("a")
    cloud.google.endpoints.quota = 0
    with pytest.raises(RolloutFailed, match=r"(?s)iam-admin/quotas.*No version serves"):
        cloud.serve(version)
    cloud.google.endpoints.quota = 1
    assert cloud.serve(version).changed and cloud.shares() == {"version-1": 100}


@pytest.mark.fault(
    "Google Cloud",
    "run killed during a deployment: {when}",
    sees="the run's process is gone",
    then="the endpoint keeps answering; the next run completes the deployment",
)
@pytest.mark.parametrize(
    ("when", "method", "count"),
    [
        ("while the model is deployed", "DeployModel", 1),
        ("after its last share of traffic", "UpdateEndpoint", 2),
        pytest.param("after its first share of traffic", "UpdateEndpoint", 1, marks=SOAK),
        pytest.param("while the old model is removed", "UndeployModel", 1, marks=SOAK),
    ],
)
def test_crash_leaves_a_whole_version_and_the_next_run_goes_on(
    cloud: Cloud, when: str, method: str, count: int
) -> None:
    url = cloud.serve(cloud.register("a")).url
    version = cloud.register("b")
    started = cloud.google.server.faults.count(method)
    cloud.google.endpoints.hold_deployments.set()
    process = cloud.start_serving(version)
    try:
        if method != "DeployModel":
            cloud.google.endpoints.hold_deployments.clear()
        wait_until(
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
    assert len(cloud.google.endpoints.processes()) == 1, when


def test_a_version_with_all_the_traffic_keeps_it_where_another_is_wanted(cloud: Cloud) -> None:
    """The removal of the version before failed, so the next run looks at the endpoint again."""
    cloud.serve(cloud.register("a"))
    version = cloud.register("b")
    cloud.google.server.faults.add("UndeployModel", grpc.StatusCode.PERMISSION_DENIED, "no right")
    with pytest.raises(UserError, match="no right"):
        cloud.serve(version)
    assert cloud.shares() == {"version-1": 0, "version-2": 100}
    answers = iter([True])
    with pytest.raises(NoLongerWanted):
        cloud.serve(version, lambda: next(answers, False))
    assert cloud.shares() == {"version-2": 100}


@pytest.mark.fault(
    "Google Cloud", "reply to a deployment lost", sees="nothing", then="the model is deployed once"
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
    "Google Cloud", "deployment forbidden", sees="the role to ask for", then="nothing is deployed"
)
def test_forbidden_deployment_names_the_role(cloud: Cloud) -> None:
    version = cloud.register("a")
    cloud.google.server.faults.add("DeployModel", grpc.StatusCode.PERMISSION_DENIED, "no right")
    with pytest.raises(RolloutFailed, match=r"roles/aiplatform\.user"):
        cloud.serve(version)


def test_model_that_the_accelerators_cannot_hold_is_refused_before_they_are_paid_for(
    cloud: Cloud,
) -> None:
    cloud.serve(cloud.register("a"))
    cloud.content["endpoint"] |= L4
    number = cloud.register("b")
    store = Store(f"gs://{BUCKET}/models/b")
    store.write_bytes("config.json", b'{"n_layer": 48, "n_head": 8, "n_embd": 1000000}')
    with pytest.raises(UserError, match="does not fit"):
        cloud.serve(number)
    assert cloud.shares() == {"version-1": 100}
    assert cloud.google.server.faults.count("DeployModel") == 1


def test_a_change_on_a_later_page_of_operations_is_awaited(
    google: LocalGoogle, cloud: Cloud
) -> None:
    endpoint = VertexEndpoint(cloud.registry._vertex, "manual")
    endpoint.create()
    operations, over = google.server.operations, threading.Event()
    for _ in range(3):
        operations.run(endpoint.name, empty_pb2.Empty)
    operations.run(endpoint.name, lambda: over.wait(30) and empty_pb2.Empty())
    with pytest.raises(VertexRefused, match="still being changed"):
        endpoint.settle(0.5)
    over.set()
    endpoint.settle(10)
