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


def refusal_text(runner: Runner, google: LocalGoogle, code: grpc.StatusCode, message: str) -> str:
    """What a run says whose job is refused, which is asked for once."""
    google.server.faults.add(runner.create_method, code, message, times=1000)
    text = failure_text(runner.run(["materialize"]))
    assert google.server.faults.count(runner.create_method) == 1
    return text


def test_labels_are_no_longer_than_google_takes_them() -> None:
    ((key, value),) = as_labels({"k" * 80: "v" * 80}).items()
    assert (len(key), len(value)) == (63, 63)
    assert all(
        len(text) <= 63 for pair in as_dns_labels({"7" * 80: "7" * 80}).items() for text in pair
    )


@pytest.mark.fault(
    "Google Cloud",
    "missing permission",
    sees="the role to ask for",
    then="the request is not retried",
)
def test_missing_right_says_which_role_to_ask_for(runner: Runner, google: LocalGoogle) -> None:
    text = refusal_text(runner, google, grpc.StatusCode.PERMISSION_DENIED, "Permission denied")
    role = "roles/aiplatform.user" if runner.service == "vertex" else "roles/dataproc.editor"
    assert role in text


@pytest.mark.fault(
    "Google Cloud",
    "API disabled",
    sees="the command that enables it",
    then="the request is not retried",
)
def test_disabled_api_says_how_to_enable_it(runner: Runner, google: LocalGoogle) -> None:
    message = "The API has not been used in project local-project before or it is disabled."
    assert "gcloud services enable" in refusal_text(
        runner, google, grpc.StatusCode.PERMISSION_DENIED, message
    )


@pytest.mark.fault(
    "Google Cloud",
    "quota exceeded",
    sees="which quota, and where to ask for more",
    then="the request is not retried",
)
def test_exceeded_quota_says_where_to_ask_for_more(runner: Runner, google: LocalGoogle) -> None:
    message = (
        "The following quota metrics exceed quota limits: "
        "aiplatform.googleapis.com/custom_model_training_nvidia_a100_gpus"
    )
    text = refusal_text(runner, google, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
    assert "custom_model_training_nvidia_a100_gpus" in text
    assert "iam-admin/quotas?project=local-project" in text


def test_quota_project_that_may_not_be_used_is_told_as_such(
    runner: Runner, google: LocalGoogle
) -> None:
    message = (
        "Caller does not have required permission to use project local-project. Grant the caller "
        "the roles/serviceusage.serviceUsageConsumer role (serviceusage.services.use)."
    )
    assert "set-quota-project" in refusal_text(
        runner, google, grpc.StatusCode.PERMISSION_DENIED, message
    )


@pytest.mark.fault(
    "Google Cloud",
    "organization policy forbids machines",
    sees="which policy, and who can grant an exception",
    then="the request is not retried",
)
def test_organization_policy_is_named_with_who_may_make_an_exception(
    runner: Runner, google: LocalGoogle
) -> None:
    message = (
        "Constraint constraints/compute.vmExternalIpAccess violated for project local-project. Add "
        "the instance to the constraint to use external IP with it."
    )
    text = refusal_text(runner, google, grpc.StatusCode.FAILED_PRECONDITION, message)
    assert "policy forbids this: constraints/compute.vmExternalIpAccess. Ask who" in text
    assert ("private access" in text) == (runner.service == "dataproc"), (
        "jobs of Vertex AI have none"
    )


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
