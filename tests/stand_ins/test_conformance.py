"""The stand-ins keep the rules of conformance.json, which has every call of shipped code."""

import ast
import json
import os
import threading
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.cloud import aiplatform_v1, batch_v1, dataproc_v1, secretmanager_v1, tpu_v2

from tests.stand_ins import conformance
from tests.stand_ins.conformance import DOCUMENT, TABLE, check_call, check_rights, digest
from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.google import BUCKET, CLIENTS, LocalGoogle
from tests.stand_ins.grpc_server import OPERATIONS, first_page, service_methods, snake_case
from tests.stand_ins.identity import SERVICE_ACCOUNT
from tests.stand_ins.job_rules import (
    check_batch,
    check_job,
    check_machines_job,
    check_queued_resource,
)
from tests.stand_ins.machine_service import matches_labels
from tests.stand_ins.models import METRICS
from tests.stand_ins.processes import RealProcess, free_port
from tests.stand_ins.projects import PROJECT_METHODS
from tests.stand_ins.rest import MOST_NAMES
from tests.stand_ins.serving_containers import Replica
from tests.stand_ins.storage import WRITES_AT_ONCE
from tests.stand_ins.tpu import LOCATION_METHODS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SHIPPED = ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs")
IMPLIED = {"GetOperation"}
"""Methods that Google's clients call by themselves, while they wait for a change."""
PLACE = "projects/local-project/locations/us-central1"
V5E = {"accelerator_type": "v5litepod-4", "runtime_version": "v2-alpha-tpuv5-lite"}
MODEL, ENDPOINT = f"{PLACE}/models/m", f"{PLACE}/endpoints/here"
Breach = Callable[[LocalGoogle], object]


def job(machine: str = "n1-standard-4", replicas: int = 1, pools: int = 1, **spec: Any) -> Breach:
    """A custom job, whose pools are alike."""
    given: dict[str, Any] = {"machine_type": machine} | spec.pop("machine_spec", {})
    pool = {"machine_spec": given, "replica_count": replicas} | spec.pop("pool", {})
    content = {"job_spec": {"worker_pool_specs": [pool] * pools} | spec}
    return lambda google: check_job(aiplatform_v1.CustomJob(content))


def batch(name: str = "batch", version: str = "2.3", **content: Any) -> Breach:
    """A Spark batch."""
    runtime = {"version": version, "properties": content.pop("properties", {})}
    made = dataproc_v1.Batch(runtime_config=runtime, **content)
    return lambda google: check_batch(name, made)


def machines(job_id: str = "job", groups: int = 1, **changes: Any) -> Breach:
    """A job of Google Batch; changes are of its task, `labels`, `places` and `instance` aside."""
    job = {
        "labels": changes.pop("labels", {}),
        "allocation_policy": {
            "instances": [changes.pop("instance", {})],
            "location": {"allowed_locations": changes.pop("places", [])},
        },
    }
    task = {"runnables": [{"container": {"image_uri": "i"}}]} | changes
    made = {
        "parent": PLACE,
        "job_id": job_id,
        "job": job | {"task_groups": [{"task_spec": task}] * groups},
    }
    return lambda google: check_machines_job(batch_v1.CreateJobRequest(made))


def queued_request(parent: str = f"{PLACE}-a", name: str = "job", **node: Any) -> Any:
    """For a queued resource; changes are of its node, but `of`, its zone, and `reserved`."""
    reservation = {"reservation_name": node.pop("reserved", "")}
    spec = {"parent": node.pop("of", parent), "node_id": "job", "node": V5E | node}
    made = {"parent": parent, "queued_resource_id": name}
    resource = reservation | {"tpu": {"node_spec": [spec]}}
    return tpu_v2.CreateQueuedResourceRequest(made | {"queued_resource": resource})


def queued(**changes: Any) -> Breach:
    """A queued resource."""
    return lambda google: check_queued_resource(queued_request(**changes))


def delete_without_force(google: LocalGoogle) -> None:
    """A queued resource is to go, whose machine runs."""
    script = {"startup-script": "#!/bin/sh\nsleep 60\n"}
    google.tpu.create_queued_resource(queued_request(metadata=script))
    wait_until(lambda: google.tpu.billing() != [])
    given = {"name": f"{PLACE}-a/queuedResources/job"}
    google.tpu.delete_queued_resource(tpu_v2.DeleteQueuedResourceRequest(given))


def upload(labels: dict[str, str] | None = None, **changes: Any) -> Breach:
    """An upload of a model; other changes are the container's, `artifact` and `request` aside."""
    model = {
        "labels": labels or {},
        "artifact_uri": changes.pop("artifact", "gs://b/m"),
        "version_aliases": changes.pop("aliases", []),
    }
    request = {"parent": PLACE, "model_id": "m"} | changes.pop("request", {})
    container = {"image_uri": "i"} | changes
    made = aiplatform_v1.UploadModelRequest(model=model | {"container_spec": container}, **request)
    return lambda google: google.models.upload_model(made)


def deploy(
    endpoint: dict[str, Any], machine: str = "n1-standard-4", id: str = "1", replicas: int = 1
) -> Breach:
    """A model with the prefix is deployed to an endpoint of its own."""

    def run(google: LocalGoogle) -> None:
        upload(invoke_route_prefix="/*")(google)
        wait_until(lambda: MODEL in google.models._versions)
        made = {"parent": PLACE, "endpoint_id": "here", "endpoint": endpoint}
        google.endpoints.create_endpoint(aiplatform_v1.CreateEndpointRequest(made))
        resources = {"machine_spec": {"machine_type": machine}, "min_replica_count": replicas}
        deployed = {"id": id, "model": MODEL, "dedicated_resources": resources}
        request = aiplatform_v1.DeployModelRequest(endpoint=ENDPOINT, deployed_model=deployed)
        google.endpoints.deploy_model(request)

    return run


def post(method: str, path: str, **content: Any) -> Breach:
    """A REST call."""

    def run(google: LocalGoogle) -> None:
        body = json.dumps(content).encode() if content else b""
        status, _ = google.rest.answer(method, path, body, SERVICE_ACCOUNT)
        if status >= 400:
            raise RpcFailed(None, str(status))  # type: ignore[arg-type]

    return run


def secret(name: str, destroyed: bool = False) -> Breach:
    """Read a version of the secret `token`, or of another."""

    def run(google: LocalGoogle) -> None:
        google.secrets.values["token"] = "value"
        google.secrets.destroyed |= {"token"} if destroyed else set()
        request = secretmanager_v1.AccessSecretVersionRequest(name=name)
        google.secrets.access_secret_version(request)

    return run


def on_upload(method: str, **request: Any) -> Breach:
    """Change or evaluate a model that is there."""

    def run(google: LocalGoogle) -> None:
        upload()(google)
        wait_until(lambda: MODEL in google.models._versions)
        kind = getattr(aiplatform_v1, f"{method}Request")
        getattr(google.models, snake_case(method))(kind(request))

    return run


def on_endpoint(id: str = "here", **update: Any) -> Breach:
    """Make an endpoint, and change it."""

    def run(google: LocalGoogle) -> None:
        made = {"parent": PLACE, "endpoint_id": id, "endpoint": {}}
        google.endpoints.create_endpoint(aiplatform_v1.CreateEndpointRequest(made))
        if update:
            changed = {"endpoint": {"name": ENDPOINT, "traffic_split": update["split"]}}
            mask = {"update_mask": {"paths": update["paths"]}}
            request = aiplatform_v1.UpdateEndpointRequest(changed | mask)
            google.endpoints.update_endpoint(request)

    return run


def empty(google: LocalGoogle, method: str) -> Any:
    """A request that says nothing; None for a REST method."""
    known = {path.rsplit("/", 1)[1]: types for path, (types, _) in google.server.methods.items()}
    return known[method].deserialize(b"") if method in known else None


def without_rights(method: str, google: LocalGoogle) -> None:
    """Nobody may act as anybody."""

    def allows(account: str, permission: str, resource: str) -> bool:
        return not permission.startswith("iam.")

    check_rights(method, empty(google, method), {"caller": "a", "vertex_ai": "b"}, allows)


POOL = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1}
LARGER = {"machine_spec": {"machine_type": "n1-standard-8"}, "replica_count": 1}
L4 = {"accelerator_type": "NVIDIA_L4", "accelerator_count": 1}
SCHEMA = next(iter(METRICS))
SERVICES = "/v1/projects/local-project/services:batchGet?"
REGIONS = "/compute/v1/projects/local-project/regions"
ACCOUNT = f"/v1/projects/local-project/serviceAccounts/{SERVICE_ACCOUNT}:testIamPermissions"
REFUSED: dict[str, dict[str, Breach]] = {
    "CreateCustomJob": {
        "the first worker pool has one replica": job(replicas=2),
        "worker pools are given": job(pools=0),
        "the caller may act as the account": partial(without_rights, "CreateCustomJob"),
        "machine and accelerators match": job("a2-highgpu-1g", machine_spec=L4),
        "the boot disk is of an allowed type": job(
            pool={"disk_spec": {"boot_disk_type": "pd-balanced"}}
        ),
        "at most 100 variables": job(
            pool={"container_spec": {"env": [{"name": "A", "value": "a"}] * 101}}
        ),
        "at most seven days": job(scheduling={"timeout": {"seconds": 604_801}}),
        "a TensorBoard needs account and output folder": job(tensorboard="t"),
        "flex-start has the same machines in all pools": job(
            worker_pool_specs=[POOL, LARGER], scheduling={"strategy": "FLEX_START"}
        ),
        "a TPU machine's topology fits it": job("ct5lp-hightpu-4t"),
    },
    "CreateBatch": {
        "form of the id": batch("A_batch"),
        "form and number of labels": batch(labels={"Upper": "a"}),
        "10 minutes to 14 days": batch(
            environment_config={"execution_config": {"ttl": {"seconds": 60}}}
        ),
        "supported runtimes": batch(version="2.2"),
        "cores, executors and tiers in properties": batch(properties={"spark.executor.cores": "3"}),
        "no YARN or shuffle service properties": batch(properties={"spark.yarn.queue": "a"}),
    },
    "CreateJob": {
        "form of the id": machines("A_job"),
        "form of labels": machines(labels={"goog-own": "a"}),
        "one task group": machines(groups=2),
        "locations in the job's region": machines(places=["zones/europe-west4-a"]),
        "at most ten retries": machines(max_retry_count=11),
        "volumes are under /mnt/disks, and in the container": machines(
            volumes=[{"mount_path": "/gcs/bucket", "gcs": {"remote_path": "bucket"}}]
        ),
        "drivers are for accelerators": machines(
            instance={"policy": {"machine_type": "n1-standard-4"}, "install_gpu_drivers": True}
        ),
        "the caller may act as the account": partial(without_rights, "CreateJob"),
    },
    "CreateQueuedResource": {
        "a request belongs to a zone": queued(parent=PLACE),
        "form of the id": queued(name="a job"),
        "one node, in the zone of the request": queued(of=f"{PLACE}-b"),
        "a machine boots with its own runtime version": queued(runtime_version="v2-alpha-tpuv6e"),
        "form of a reservation's name": queued(reserved="mine"),
        "form of labels": queued(labels={"goog-own": "a"}),
        "at most 256 KB per metadata value": queued(metadata={"a": "a" * 262_145}),
        "the caller may act as the account": partial(without_rights, "CreateQueuedResource"),
    },
    "DeleteQueuedResource": {"deleting a running machine requires force": delete_without_force},
    "AccessSecretVersion": {
        "project, secret and version exist": secret(
            "projects/local-project/secrets/token/versions/2"
        ),
        "a destroyed version has no value": secret(
            "projects/local-project/secrets/token/versions/latest", destroyed=True
        ),
    },
    "UploadModel": {
        "form of the id": upload(request={"model_id": "Model!"}),
        "a version belongs to an existing model": upload(request={"parent_model": MODEL}),
        "the artifact is a Cloud Storage folder": upload(artifact="/models/m"),
        "form of labels": upload(labels={"Upper": "a"}),
        "either predict route or invoke prefix": upload(
            predict_route="/predict", invoke_route_prefix="/*"
        ),
        "a deployment takes at most two hours": upload(deployment_timeout={"seconds": 7_201}),
    },
    "UpdateModel": {
        "labels of model and version are mixed; which fields change": on_upload(
            "UpdateModel", model={"name": MODEL}, update_mask={"paths": ["container_spec"]}
        )
    },
    "MergeVersionAliases": {
        "form of aliases; an alias names one version": on_upload(
            "MergeVersionAliases", name=MODEL, version_aliases=["An alias"]
        )
    },
    "ImportModelEvaluation": {
        "metrics follow the schema, numbers are finite": on_upload(
            "ImportModelEvaluation",
            parent=MODEL,
            model_evaluation={"metrics_schema_uri": SCHEMA, "metrics": {"unknown": 1.0}},
        )
    },
    "CreateEndpoint": {"form of the id": on_endpoint("E_")},
    "DeployModel": {
        "form of the id": deploy({"dedicated_endpoint_enabled": True}, id="one"),
        "the caller may act as the account": partial(without_rights, "DeployModel"),
        "machine and accelerators match": deploy(
            {"dedicated_endpoint_enabled": True}, "a2-highgpu-1g"
        ),
        "at least one replica, maximum not below minimum": deploy(
            {"dedicated_endpoint_enabled": True}, replicas=0
        ),
        "an invoke prefix needs a dedicated endpoint": deploy({}),
    },
    "UpdateEndpoint": {
        "shares sum to 100, or there are none": on_endpoint(
            split={"1": 50}, paths=["traffic_split"]
        ),
        "only fields in the mask change": on_endpoint(split={}, paths=["labels"]),
    },
    "serviceusage.services.batchGet": {
        "at most 30 names": post(
            "GET", SERVICES + "&".join(["names=projects/1/services/a"] * (MOST_NAMES + 1))
        )
    },
    "iam.projects.serviceAccounts.testIamPermissions": {
        "wildcard permissions are refused": post("POST", ACCOUNT, permissions=["iam.*"])
    },
    "compute.regions.get": {"only existing regions": post("GET", f"{REGIONS}/europe-west9")},
    "compute.subnetworks.get": {
        "a subnetwork belongs to one region": post(
            "GET", f"{REGIONS}/europe-west9/subnetworks/inside"
        )
    },
}
"""Rule to a request that breaks it."""


def called() -> set[str]:
    """Methods of Google's services that shipped code of the cloud names."""
    services = [service_methods(client) for client in CLIENTS]
    services += [PROJECT_METHODS, LOCATION_METHODS, OPERATIONS]
    methods = {path.rsplit("/", 1)[1] for service in services for path in service}
    by_name = {snake_case(method): method for method in methods}
    sources = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(text) for path in sources if "google" in (text := path.read_text())]
    names = {n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return {method for name, method in by_name.items() if name in names}


def test_table_has_every_method_that_is_called_and_no_other(google: LocalGoogle) -> None:
    of_grpc = {method for method, row in TABLE.items() if "api" not in row}
    assert called() | IMPLIED == of_grpc
    assert {path.rsplit("/", 1)[1] for path in google.server.methods} >= of_grpc


def test_texts_of_the_rules_are_those_that_were_read() -> None:
    rules = [rule for row in TABLE.values() for rule in row["rules"]]
    changed = [rule for rule in rules if digest(rule["written"]) != rule.get("hash")]
    assert not changed, "Google says something else now: read it, then see conformance.py"


def test_page_has_the_table_of_today() -> None:
    page = DOCUMENT.read_text()
    assert page == conformance.document(page), "run: python -m tests.stand_ins.conformance"


def test_every_rule_is_broken_here_or_has_another_test() -> None:
    """In this folder's neighbors, and such that it holds only where the stand-in keeps the rule."""
    assert REFUSED.keys() <= TABLE.keys()
    for method, row in TABLE.items():
        elsewhere = {rule["rule"]: rule["test"] for rule in row["rules"] if "test" in rule}
        broken = REFUSED.get(method, {}).keys()
        assert sorted([*broken, *elsewhere]) == sorted(rule["rule"] for rule in row["rules"]), (
            method
        )
        for name in elsewhere.values():
            path, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / "tests" / path).read_text(), name
        for rule in row["rules"]:
            assert (Path(__file__).parent / rule["kept_by"]).exists()


@pytest.mark.parametrize(
    ("method", "rule"), [(method, rule) for method, rules in REFUSED.items() for rule in rules]
)
def test_what_breaks_a_rule_is_refused(google: LocalGoogle, method: str, rule: str) -> None:
    with pytest.raises(RpcFailed):
        REFUSED[method][rule](google)


def test_what_keeps_them_is_not(google: LocalGoogle) -> None:
    on_own = {"dedicated_endpoint_enabled": True}
    for keeps in (job(), batch(), machines(), queued(), on_endpoint(), deploy(on_own)):
        google.reset()
        keeps(google)


@pytest.mark.parametrize("method", [m for m, row in TABLE.items() if row["rights"]])
def test_caller_without_the_right_is_refused(google: LocalGoogle, method: str) -> None:
    with pytest.raises(RpcFailed, match=r"denied|permission"):
        accounts = {"caller": "a", "vertex_ai": "b"}
        check_rights(method, empty(google, method), accounts, lambda *_: False)


def test_field_that_nobody_has_read_about_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(conformance.RECORD, raising=False)
    request = aiplatform_v1.GetCustomJobRequest(name="a")
    check_call("GetCustomJob", request, "a", "b", lambda *_: True)
    filtered = aiplatform_v1.ListModelVersionsRequest(name="a", order_by="b")
    with pytest.raises(RpcFailed, match="order_by"):
        check_call("ListModelVersions", filtered, "a", "b", lambda *_: True)
    with pytest.raises(RpcFailed, match="not in conformance"):
        check_call("DeleteModel", request, "a", "b", lambda *_: True)


def test_rest_calls_are_as_their_descriptions_have_them(google: LocalGoogle) -> None:
    path = "/v1/iam:troubleshoot"
    asked = {"principal": "a", "permission": "b", "fullResourceName": "c"}
    post("POST", path, accessTuple=asked)(google)
    for broken in (
        post("GET", path),
        post("POST", f"{path}?unknown=1", accessTuple=asked),
        post("POST", path, accessTuple=asked | {"unknown": 1}),
    ):
        with pytest.raises(RpcFailed):
            broken(google)


OBJECTS = f"/storage/v1/b/{BUCKET}/o"
STORAGE_CALLS = {
    "storage.buckets.get": ("GET", f"/storage/v1/b/{BUCKET}", b""),
    "storage.objects.create": ("POST", f"/upload{OBJECTS}?uploadType=media&name=right", b"a"),
    "storage.objects.list": ("GET", OBJECTS, b""),
    "storage.objects.get": ("GET", f"{OBJECTS}/right", b""),
    "storage.objects.delete": ("DELETE", f"{OBJECTS}/right", b""),
}


def test_storage_asks_for_the_right_of_each_call(google: LocalGoogle) -> None:
    for permission, (verb, path, body) in STORAGE_CALLS.items():
        url = f"{google.storage.url}{path}"
        google.storage.denied = {permission}
        refused = httpx.request(verb, url, content=body)
        assert refused.status_code == 403 and permission in refused.text
        google.storage.denied = STORAGE_CALLS.keys() - {permission}
        assert httpx.request(verb, url, content=body).is_success, permission


def test_rest_method_that_the_table_does_not_have_is_refused(google: LocalGoogle) -> None:
    url = f"{google.storage.url}/storage/v1/b/{BUCKET}/acl"
    assert "storage.bucketAccessControls.list is not in" in httpx.get(url).text
    inside = f"--a\r\n\r\nDELETE /storage/v1/b/{BUCKET}/o/a HTTP/1.1\r\n\r\n--a--"
    google.storage.denied = {"storage.objects.delete"}
    url = f"{google.storage.url}/batch/storage/v1"
    assert httpx.post(url, content=inside.encode()).status_code == 403


def test_every_rule_of_a_page_has_its_date() -> None:
    for rule in (rule for row in TABLE.values() for rule in row["rules"]):
        assert ("since" in rule) == rule["written"].startswith(conformance.PAGE), rule
        assert date.fromisoformat(rule.get("since", "2026-01-01")) <= date.today()


def test_every_list_has_pages() -> None:
    request = aiplatform_v1.ListCustomJobsRequest()
    reply = aiplatform_v1.ListCustomJobsResponse(custom_jobs=[{"name": str(n)} for n in range(3)])
    page = first_page(request, reply)
    assert [job.name for job in page.custom_jobs] == ["0", "1"] and page.next_page_token


def test_labels_are_filtered() -> None:
    assert matches_labels('labels.a="b"', {"a": "b"}) and not matches_labels('labels.a="b"', {})


def test_a_batch_without_processors_fails(google: LocalGoogle) -> None:
    google.rest.region_quotas["CPUS"] = 8
    made = dataproc_v1.Batch(runtime_config={"version": "2.3"})
    request = dataproc_v1.CreateBatchRequest(parent=PLACE, batch_id="batch", batch=made)
    google.dataproc.create_batch(request)
    wait_until(lambda: "Insufficient" in google.dataproc.jobs()[0].state_message)


def test_a_container_whose_probe_fails_is_ended(google: LocalGoogle, tmp_path: Path) -> None:
    process = RealProcess(["sleep", "60"], tmp_path, dict(os.environ), tmp_path / "log")
    probe = {"http_get": {"path": "/health"}, "period_seconds": 1, "failure_threshold": 1}
    timeout = {"seconds": 60}
    spec = aiplatform_v1.ModelContainerSpec(startup_probe=probe, deployment_timeout=timeout)
    replica = Replica(process, free_port(), "/predict")
    with pytest.raises(RpcFailed, match="exited"):
        google.endpoints.containers.wait_healthy(replica, spec, threading.Event())
    assert process.poll() is not None


def test_an_object_is_not_written_over_and_over(
    google: LocalGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(google.storage, "clock", lambda: clock[0])
    url = f"{google.storage.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=often"

    def write(times: int) -> list[int]:
        return [httpx.post(url, content=b"a").status_code for _ in range(times)]

    assert write(WRITES_AT_ONCE + 2) == [200] * WRITES_AT_ONCE + [429] * 2
    clock[0] = 1.0
    assert write(2) == [200, 429]
