"""Asks whether a Spark batch finds processors, disks and a network in the region."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from llm_assets.cloud.rest import CALL_SECONDS, open_session, rest_url
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.finding import Finding

DRIVER_CORES = 4
EXECUTORS = 2
EXECUTOR_CORES = 4
DISK_GB_PER_CORE = 100
"""What Dataproc Serverless gives a batch that says nothing else (its pages "Spark properties" and
"Quotas")."""


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
