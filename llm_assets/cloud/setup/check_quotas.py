"""Whether trainings, the endpoint and Spark batches find their machines in the region."""

from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from llm_assets.cloud.rest import CALL_SECONDS, get_json, open_session, rest_url
from llm_assets.cloud.settings import (
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
)
from llm_assets.cloud.setup.finding import Finding

QUOTA_KINDS = {
    "NVIDIA_H100_80GB": "nvidia_h100",
    "NVIDIA_H100_MEGA_80GB": "nvidia_h100_mega",
    "NVIDIA_H200_141GB": "nvidia_h200",
}
"""Accelerators whose quotas leave their memory out; all others are named like the accelerator."""
DRIVER_CORES = 4
EXECUTORS = 2
EXECUTOR_CORES = 4
DISK_GB_PER_CORE = 100
"""What Dataproc Serverless gives a batch that says nothing else (its pages "Spark properties" and
"Quotas")."""


def check_accelerators(settings: GoogleCloudSettings) -> Iterator[Finding]:
    """The region's quotas of Vertex AI for the accelerators of training, evaluation, endpoint."""
    wanted = list(needs(settings))
    limits = quota_limits(settings) if wanted else {}
    for need in wanted:
        limit = limits.get(need.metric)
        if limit is None:
            yield Finding(
                need.key,
                False,
                f"{need.metric} is not a quota of {settings.region}: is {need.accelerator} offered "
                "there?",
            )
        elif limit < need.accelerators:
            yield Finding(
                need.key,
                False,
                f"{need.metric} allows {limit} in {settings.region}, and {need.accelerators} are "
                "asked for. Ask for more: https://console.cloud.google.com/iam-admin/quotas"
                f"?project={settings.project}",
            )
        else:
            text = f"{need.metric} allows {limit}, {need.accelerators} asked for"
            yield Finding(need.key, True, text)


@dataclass(frozen=True)
class Need:
    """Accelerators of one kind for one use."""

    key: str
    """The line of `config/google_cloud.yaml` that asks for them."""
    accelerator: str
    metric: str
    """The quota that they count against, by its name."""
    accelerators: int


def needs(settings: GoogleCloudSettings) -> Iterator[Need]:
    """What training, evaluation and endpoint need; a rollout has two versions side by side."""
    training, evaluation, endpoint = settings.training, settings.evaluation, settings.endpoint
    yield from _need("training", "training", training, training.replicas)
    yield from _need("evaluation", "training", evaluation, 1)
    beside = max(2 * endpoint.minimum_replicas, endpoint.maximum_replicas)
    yield from _need("endpoint", "serving", endpoint, beside)


def _need(
    key: str, use: str, machines: MachineSettings | EndpointMachineSettings, replicas: int
) -> Iterator[Need]:
    if machines.accelerator_type is None:
        return
    if isinstance(machines, EndpointMachineSettings):
        preemptible = machines.spot
    else:
        preemptible = machines.strategy != "STANDARD"
    accelerator = machines.accelerator_type
    kind = QUOTA_KINDS.get(accelerator) or accelerator.lower().replace("_tesla_", "_")
    bought = "preemptible_" if preemptible else ""
    metric = f"aiplatform.googleapis.com/custom_model_{use}_{bought}{kind}_gpus"
    count = replicas * machines.accelerator_count
    yield Need(key, accelerator, metric, count)


def quota_limits(settings: GoogleCloudSettings) -> dict[str, int]:
    """Metric to the limit in the region; -1, the word for unlimited, becomes a large number."""
    base = rest_url(settings, "serviceusage.googleapis.com")
    url = (
        f"{base}/v1beta1/projects/{settings.project}/services/aiplatform.googleapis.com"
        "/consumerQuotaMetrics?view=FULL&pageSize=500"
    )
    found: dict[str, int] = {}
    session = open_session()
    token = ""
    while True:
        page = get_json(session, f"{url}&pageToken={token}" if token else url)
        for metric in page.get("metrics", []):
            for limit in metric.get("consumerQuotaLimits", []):
                for bucket in limit.get("quotaBuckets", []):
                    region = bucket.get("dimensions", {}).get("region")
                    if region in (None, settings.region):
                        value = int(bucket.get("effectiveLimit", 0))
                        found[metric["metric"]] = 10**9 if value < 0 else value
        token = page.get("nextPageToken", "")
        if not token:
            return found


def check_spark(settings: GoogleCloudSettings) -> Iterator[Finding]:
    """The region's quotas of Compute Engine, and the subnetwork of the batches."""
    session = open_session()
    base = f"{rest_url(settings, 'compute.googleapis.com')}/compute/v1"
    region = f"projects/{settings.project}/regions/{settings.region}"
    reply = session.get(f"{base}/{region}", timeout=CALL_SECONDS)
    if reply.status_code == HTTPStatus.FORBIDDEN:
        yield _unseen("batch", f"the quotas of {settings.region}", "compute.regions.get")
    else:
        reply.raise_for_status()
        quotas = {quota["metric"]: quota for quota in reply.json().get("quotas", [])}
        yield from _check_quotas(settings, quotas)
    if settings.subnetwork:
        yield _check_subnetwork(session, base, region, settings.subnetwork)


def smallest_batch(settings: GoogleCloudSettings) -> dict[str, int]:
    """What a batch begins with, by the names of Compute Engine's quotas."""
    batch = settings.batch
    driver = int(batch.properties.get("spark.driver.cores", DRIVER_CORES))
    executors = batch.minimum_executors or EXECUTORS
    cores = driver + executors * (batch.executor_cores or EXECUTOR_CORES)
    needs = {"N2_CPUS" if batch.compute_tier == "premium" else "CPUS": cores}
    if batch.shuffle_tier != "premium":
        needs["DISKS_TOTAL_GB"] = cores * DISK_GB_PER_CORE
    return needs


def _check_quotas(settings: GoogleCloudSettings, quotas: dict[str, Any]) -> Iterator[Finding]:
    for metric, wanted in smallest_batch(settings).items():
        quota = quotas.get(metric, {})
        limit, used = quota.get("limit", 0), quota.get("usage", 0)
        text = f"{metric} allows {limit:g} in {settings.region}, {used:g} in use"
        if limit - used >= wanted:
            yield Finding("batch", True, f"{text}; a Spark batch begins with {wanted}")
            continue
        yield Finding(
            "batch",
            False,
            f"{text}, and a Spark batch begins with {wanted}. Ask for more: "
            f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project}",
        )


def _check_subnetwork(session: Any, base: str, region: str, subnetwork: str) -> Finding:
    """Batches have internal addresses alone, so that Google's APIs are reached by private access.

    Args:
        subnetwork: its name, or its whole name with project and region.
    """
    key = "subnetwork"
    whole = subnetwork.partition("projects/")[2]
    place = f"projects/{whole}" if whole else f"{region}/subnetworks/{subnetwork}"
    name = place.rsplit("/", 1)[1]
    reply = session.get(f"{base}/{place}", timeout=CALL_SECONDS)
    if reply.status_code == HTTPStatus.FORBIDDEN:
        return _unseen(key, f"the subnetwork {name}", "compute.subnetworks.get")
    if reply.status_code == HTTPStatus.NOT_FOUND:
        return Finding(key, False, f"there is no {place}: name one of the jobs' region")
    reply.raise_for_status()
    if reply.json().get("privateIpGoogleAccess"):
        return Finding(key, True, f"{name} has private access to Google's APIs")
    command = f"gcloud compute networks subnets update {name} --region={place.split('/')[3]}"
    return Finding(
        key,
        None,
        f"{name} has no private access to Google's APIs, which batches need; Dataproc turns it on "
        f"where it may. Where it may not: {command} --enable-private-ip-google-access",
    )


def _unseen(key: str, what: str, permission: str) -> Finding:
    return Finding(key, None, f"you may not see {what}: {permission} would show it")
