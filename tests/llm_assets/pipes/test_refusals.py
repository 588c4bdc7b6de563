"""What Google refuses for good, through the real clients: said once, with who must do what."""

import grpc
import pytest

from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.failures import explain
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.service import RemoteService, as_dns_labels, as_labels
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs
from tests.llm_assets.pipes.runner import Runner, failure_text
from tests.stand_ins.google import LocalGoogle


def test_labels_are_no_longer_than_google_takes_them() -> None:
    ((key, value),) = as_labels({"k" * 80: "v" * 80}).items()
    assert (len(key), len(value)) == (63, 63)
    assert all(
        len(text) <= 63 for pair in as_dns_labels({"7" * 80: "7" * 80}).items() for text in pair
    )


def refusal(fault: str, sees: str) -> pytest.MarkDecorator:
    return pytest.mark.fault("Google Cloud", fault, sees=sees, then="the request is not retried")


DENIED = grpc.StatusCode.PERMISSION_DENIED
REFUSALS = [
    pytest.param(
        DENIED,
        "Permission denied",
        "for {role} on it",
        marks=refusal("missing permission", "the role to ask for"),
        id="right",
    ),
    pytest.param(
        DENIED,
        "The API has not been used in project local-project before or it is disabled.",
        "gcloud services enable",
        marks=refusal("API disabled", "the command that enables it"),
        id="API",
    ),
    pytest.param(
        DENIED,
        "Compute Engine API has not been used in project 1 before or it is disabled. Enable it by "
        "visiting https://console.developers.google.com/apis/api/compute.googleapis.com/overview"
        "?project=1 then retry.",
        "gcloud services enable compute.googleapis.com --project=local-project",
        id="API of another",
    ),
    pytest.param(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "The following quota metrics exceed quota limits: "
        "aiplatform.googleapis.com/custom_model_training_nvidia_a100_gpus",
        "iam-admin/quotas?project=local-project",
        marks=refusal("quota exceeded", "which quota, and where to ask for more"),
        id="quota",
    ),
    pytest.param(
        DENIED,
        "Caller does not have required permission to use project local-project. Grant the caller "
        "the roles/serviceusage.serviceUsageConsumer role (serviceusage.services.use).",
        "set-quota-project",
        id="quota project",
    ),
    pytest.param(
        grpc.StatusCode.FAILED_PRECONDITION,
        "Constraint constraints/compute.vmExternalIpAccess violated for project local-project. Add "
        "the instance to the constraint to use external IP with it.",
        "policy forbids this: constraints/compute.vmExternalIpAccess. Ask who",
        marks=refusal(
            "organization policy forbids machines",
            "which policy, and who can grant an exception",
        ),
        id="policy",
    ),
]


@pytest.mark.parametrize(("code", "message", "advice"), REFUSALS)
def test_refused_job_is_asked_for_once_and_told_with_what_to_do(
    runner: Runner, google: LocalGoogle, code: grpc.StatusCode, message: str, advice: str
) -> None:
    google.server.faults.add(runner.create_method, code, message, times=1000)
    text = failure_text(runner.run(["materialize"]))
    assert google.server.faults.count(runner.create_method) == 1
    role = "roles/aiplatform.user" if runner.service == "vertex" else "roles/dataproc.editor"
    assert message in text and advice.format(role=role) in text


ADDRESSES = {
    BatchJobs: "no external addresses where the job names a subnetwork",
    DataprocBatches: "Batches need no external addresses",
    TpuVms: "needs an external address",
    VertexCustomJobs: "exception for the project.",
}


@pytest.mark.parametrize("kind", ADDRESSES)
def test_advice_about_addresses_is_true_of_the_service(kind: type[RemoteService]) -> None:
    place = kind(None, "projects/p/locations/us-central1").place
    advice = explain("violates constraints/compute.vmExternalIpAccess", 412, place)
    assert ADDRESSES[kind] in advice and advice == advice.strip()


@pytest.mark.parametrize("kind", ADDRESSES)
@pytest.mark.parametrize("strategy", ["STANDARD", "FLEX_START"])
def test_queue_is_advised_only_where_a_job_could_wait_in_it_and_does_not(
    kind: type[RemoteService], strategy: str
) -> None:
    job = {"scheduling": {"strategy": strategy}}
    place = kind(None, "projects/p/locations/us-central1", job).place
    advice = explain("Resources are insufficient in region", None, place)
    could = kind in (BatchJobs, VertexCustomJobs) and strategy == "STANDARD"
    assert "another region" in advice and ("flex-start" in advice) == could
