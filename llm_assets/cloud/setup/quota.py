"""Which accelerators a pipeline needs at once, and which the project may have."""

from collections.abc import Iterator
from dataclasses import dataclass

from llm_assets.cloud.rest import get_json, open_session, rest_url
from llm_assets.cloud.settings import (
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
)

QUOTA_KINDS = {
    "NVIDIA_H100_80GB": "nvidia_h100",
    "NVIDIA_H100_MEGA_80GB": "nvidia_h100_mega",
    "NVIDIA_H200_141GB": "nvidia_h200",
}
"""Accelerators whose quotas leave their memory out; all others are named like the accelerator."""


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
