"""Tests every right, API, quota, image and bucket before money is spent.

Quotas say whether trainings, the endpoint and Spark batches find their machines in the region.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from artifacts.errors import first_line
from artifacts.reasons import reason_of
from llm_assets.cloud.settings import (
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
    TpuMachine,
)
from llm_assets.cloud.setup.rights import APIS, Finding, advice_on, check_rights
from llm_assets.cloud.spending import how_to_price, machines_without_price, most_of_run
from llm_assets.cloud.vertex import REST_SECONDS, ask_json, open_session, rest_url
from llm_assets.config import TrainingPlace
from llm_assets.pipes.tpu_machine import REGISTRIES

QUOTA_KINDS = {
    "NVIDIA_H100_80GB": "nvidia_h100",
    "NVIDIA_H100_MEGA_80GB": "nvidia_h100_mega",
    "NVIDIA_H200_141GB": "nvidia_h200",
}
"""Accelerators whose quotas leave out their memory; other quotas are named like the accelerator."""
BUILD_CPUS = 8
"""CPUs of the machine in `images/cloudbuild.yaml`."""
OUTSIDE_EU = ("europe-west2", "europe-west6")
"""London and Zurich, which the multi-region `eu` of Cloud Storage is without."""
DISK_GB_PER_CORE = 100
"""Dataproc Serverless' default for a batch (its page "Quotas")."""


@dataclass(frozen=True)
class Uses:
    """What a pipeline uses of the cloud project."""

    runner: TrainingPlace = "google_cloud"
    """Where it trains and evaluates."""
    serves: bool = True
    """Whether its endpoint is Vertex AI's."""
    batches: bool = True
    """Whether its Spark stages run as batches."""
    bigquery: bool = True
    """Whether it reads source text from there."""
    tracking: bool = False
    """Whether its training reports to Weights & Biases."""


@dataclass(frozen=True)
class Need:
    """Accelerators, processors or disks of one kind for one use."""

    key: str
    """The line of `config/google_cloud.yaml` that asks for them."""
    metric: str
    """The quota that they count against, by its name."""
    number: int
    offered: str
    """What to ask if the region has no such quota."""
    use: str = "are asked for"


def _compare(
    settings: GoogleCloudSettings, need: Need, limit_text: str, available: float
) -> Finding:
    """Whether quotas leave enough for a need; `available` is what they leave."""
    demand = f"{need.number} {need.use}"
    if available >= need.number:
        return Finding(need.key, True, f"{limit_text}; {demand}")
    text = f"{limit_text}, and {demand}. Ask for more: {_quotas_page(settings)}"
    return Finding(need.key, False, text)


def check_quotas(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Finding]:
    """The region's quotas for accelerators of training, evaluation, endpoint, and for builds."""
    limits: dict[str, dict[str, int]] = {}
    if uses.runner == "tpu_vm" and (machine := settings.training.tpu):
        yield _check_chips(settings, machine)
    for need in needs(settings, uses):
        service = need.metric.partition("/")[0]
        if service not in limits:
            limits[service] = quota_limits(settings, service)
        limit = limits[service].get(need.metric)
        if limit is None:
            text = f"{need.metric} is not a quota of {settings.region}: {need.offered}"
            yield Finding(need.key, False, text)
        else:
            limit_text = f"{need.metric} allows {limit} in {settings.region}"
            yield _compare(settings, need, limit_text, limit)


def needs(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Need]:
    """What Vertex AI and Cloud Build need; during a rollout, two versions run side by side."""
    training, evaluation, endpoint = settings.training, settings.evaluation, settings.endpoint
    if uses.runner == "google_cloud":
        yield from _need("training", "training", training, training.replicas)
        yield from _need("evaluation", "training", evaluation, 1)
    if uses.serves:
        replicas = max(2 * endpoint.minimum_replicas, endpoint.maximum_replicas)
        yield from _need("endpoint", "serving", endpoint, replicas)
    builds = "cloudbuild.googleapis.com/concurrent_public_pool_build_cpus"
    yield Need("images", builds, BUILD_CPUS, "does Cloud Build have a default pool there?")


def _need(
    key: str, use: str, machines: MachineSettings | EndpointMachineSettings, replicas: int
) -> Iterator[Need]:
    base = f"aiplatform.googleapis.com/custom_model_{use}_"
    if isinstance(machines, MachineSettings) and machines.tpu:
        chip = machines.tpu.generation.name
        metric, offered = f"{base}tpu_{chip}", f"are TPU {chip} offered there?"
        yield Need(key, metric, machines.tpu.chips, offered)
    if machines.accelerator_type is None:
        return
    count = replicas * machines.accelerator_count
    offered = f"is {machines.accelerator_type} offered there?"
    yield Need(key, f"{base}{_gpus(machines, machines.accelerator_type)}", count, offered)


def _gpus(machines: MachineSettings | EndpointMachineSettings, accelerator: str) -> str:
    """The end of a quota's name, by the accelerator and how it is bought."""
    kind = QUOTA_KINDS.get(accelerator) or accelerator.lower().replace("_tesla_", "_")
    return f"{'preemptible_' if machines.is_cheaper else ''}{kind}_gpus"


def _check_chips(settings: GoogleCloudSettings, machine: TpuMachine) -> Finding:
    """Compared with the largest quota: Cloud TPU does not say which one a machine counts to."""
    chips, generation, page = machine.chips, machine.generation, _quotas_page(settings)
    spot = settings.training.strategy == "SPOT"
    zone = settings.training.zones[0] if len(settings.training.zones) == 1 else None
    place = zone or settings.region
    all_limits = quota_limits(settings, "tpu.googleapis.com", zone) if generation.quotas else {}
    limits = {
        metric: limit
        for metric, limit in all_limits.items()
        if metric.startswith(str(generation.quotas))
        if ("preemptible" in metric) == spot
    }
    offered = f"are TPU {generation.name} offered there?"
    if not limits:
        text = f"no quota of Cloud TPU in {place} is known to be for them: {offered}"
        return Finding("training", None, f"{chips} chips are asked for; {text} See {page}")
    limit_text = ", ".join(f"{metric} allows {limit}" for metric, limit in sorted(limits.items()))
    need = Need("training", next(iter(limits)), chips, offered)
    return _compare(settings, need, f"{limit_text} in {place}", max(limits.values()))


def _quotas_page(settings: GoogleCloudSettings) -> str:
    return f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project}"


def quota_limits(
    settings: GoogleCloudSettings, service: str, zone: str | None = None
) -> dict[str, int]:
    """Metric of a service to its lowest limit in the region, and in the zone if there is one; -1,
    which means unlimited, becomes a large number."""
    base = rest_url(settings, "serviceusage.googleapis.com")
    url = (
        f"{base}/v1beta1/projects/{settings.project}/services/{service}"
        "/consumerQuotaMetrics?view=FULL&pageSize=500"
    )
    limits: dict[str, int] = {}
    session = open_session()
    token = ""
    while True:
        page = ask_json(session, f"{url}&pageToken={token}" if token else url)
        for metric in page.get("metrics", []):
            for limit in metric.get("consumerQuotaLimits", []):
                values = [
                    int(bucket.get("effectiveLimit", 0))
                    for bucket in limit.get("quotaBuckets", [])
                    if bucket.get("dimensions", {}).get("region") in (None, settings.region)
                    and bucket.get("dimensions", {}).get("zone") in (None, zone)
                ]
                if values:
                    # The limit of a single region or zone is listed after the general one.
                    value = 10**9 if values[-1] < 0 else values[-1]
                    limits[metric["metric"]] = min(value, limits.get(metric["metric"], value))
        token = page.get("nextPageToken", "")
        if not token:
            return limits


def check_compute(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Finding]:
    """The region's quotas of Compute Engine, and the subnetwork of Spark batches and machines."""
    compute_needs = list(_compute_needs(settings, uses))
    if not (uses.batches or uses.runner in ("google_batch", "tpu_vm")):
        return
    base = f"{rest_url(settings, 'compute.googleapis.com')}/compute/v1"
    region = f"projects/{settings.project}/regions/{settings.region}"
    reply = _look(f"{base}/{region}")
    if reply is None:
        key = "batch" if uses.batches else "training"
        yield _unseen(key, f"the quotas of {settings.region}", "compute.regions.get")
        compute_needs, reply = [], {}
    quotas = {quota["metric"]: quota for quota in reply.get("quotas", [])}
    for need in compute_needs:
        if need.metric not in quotas:
            text = f"Compute Engine names no quota {need.metric} of {settings.region}"
            yield Finding(need.key, None, f"{text}: {need.offered}")
            continue
        limit, used = (quotas[need.metric].get(figure, 0) for figure in ("limit", "usage"))
        limit_text = f"Compute Engine's {need.metric} allows {limit:g} in {settings.region}"
        yield _compare(settings, need, f"{limit_text}, {used:g} in use", limit - used)
    if subnetwork := settings.whole_subnetwork:
        yield _check_subnetwork(f"{base}/{subnetwork}", subnetwork)


def _compute_needs(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Need]:
    """What Spark batches need, and Google Batch, whose machines are Compute Engine's."""
    for metric, number in smallest_batch(settings).items() if uses.batches else ():
        offered = "is Dataproc Serverless offered there?"
        yield Need("batch", metric, number, offered, "are what a Spark batch begins with")
    on_batch = {"training": settings.training, "evaluation": settings.evaluation}
    if uses.runner == "tpu_vm":
        # With `tpu_vm`, only the evaluation runs on Batch.
        del on_batch["training"]
    for key, machines in on_batch.items() if uses.runner in ("google_batch", "tpu_vm") else ():
        if machines.accelerator_type:
            metric = _gpus(machines, machines.accelerator_type).upper()
            number = machines.replicas * machines.accelerator_count
            yield Need(key, metric, number, f"is {machines.accelerator_type} offered there?")


def smallest_batch(settings: GoogleCloudSettings) -> dict[str, int]:
    """What a batch begins with, by the names of Compute Engine's quotas."""
    properties = settings.batch.spark_properties()
    needs: dict[str, int] = {}
    for role, cores in (
        ("driver", settings.batch.driver_cores),
        ("executor", settings.batch.first_executors * settings.batch.cores_of_executor),
    ):
        tier = f"spark.dataproc.{role}."
        metric = "N2_CPUS" if properties.get(f"{tier}compute.tier") == "premium" else "CPUS"
        needs[metric] = needs.get(metric, 0) + cores
        if properties.get(f"{tier}disk.tier") != "premium":
            needs["DISKS_TOTAL_GB"] = needs.get("DISKS_TOTAL_GB", 0) + cores * DISK_GB_PER_CORE
    return needs


def _check_subnetwork(url: str, place: str) -> Finding:
    """Machines in it have only internal addresses, and need private access to Google's APIs."""
    from google.api_core.exceptions import NotFound

    key, name = "subnetwork", place.rsplit("/", 1)[1]
    try:
        reply = _look(url)
    except NotFound:
        return Finding(key, False, f"there is no {place}: name one of the jobs' region")
    if reply is None:
        return _unseen(key, f"the subnetwork {name}", "compute.subnetworks.get")
    if reply.get("privateIpGoogleAccess"):
        return Finding(key, True, f"{name} has private access to Google's APIs")
    command = f"gcloud compute networks subnets update {name} --region={place.split('/')[3]}"
    return Finding(
        key,
        None,
        f"{name} has no private access to Google's APIs, which batches need. Dataproc turns it on "
        f"if it is allowed to; otherwise: {command} --enable-private-ip-google-access",
    )


def _look(url: str) -> dict[str, Any] | None:
    """An answer's JSON; None where the caller may not see it."""
    from google.api_core.exceptions import Forbidden

    try:
        return ask_json(open_session(), url)
    except Forbidden:
        return None


def _unseen(key: str, what: str, permission: str) -> Finding:
    return Finding(key, None, f"you may not see {what}: {permission} would show it")


MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)


def check(settings: GoogleCloudSettings, uses: Uses = Uses()) -> list[Finding]:
    """Run every test; one that cannot be run is a finding too, never an exception."""
    tests: tuple[tuple[str, Callable[[GoogleCloudSettings, Uses], Iterator[Finding]]], ...] = (
        ("project", _check_apis),
        ("project", _check_billing),
        ("project", lambda settings, uses: check_rights(settings, uses.bigquery)),
        ("bucket", _check_bucket),
        ("images", _check_images),
        ("secrets", _check_secrets),
        ("batch", check_compute),
        ("training", check_quotas),
        ("cost", check_cost),
    )
    findings: list[Finding] = []
    for key, test in tests:
        try:
            findings += test(settings, uses)
        except Exception as error:
            # A check that cannot be made is a finding, so that all others are still made.
            advice = advice_on(error, settings)
            text = f"{first_line(error)}\n{advice}" if advice else reason_of(error)
            findings.append(Finding(key, False, text or first_line(error)))
            # Without Google's packages or its credentials, every other check would fail alike.
            if {"ModuleNotFoundError", "GoogleAuthError"} & {c.__name__ for c in type(error).mro()}:
                return findings
    return findings


def _check_apis(settings: GoogleCloudSettings, _: Uses) -> Iterator[Finding]:
    base = rest_url(settings, "serviceusage.googleapis.com")
    names = "&".join(f"names=projects/{settings.project}/services/{api}" for api in APIS)
    # One question has room for 30 names, more than there are.
    url = f"{base}/v1/projects/{settings.project}/services:batchGet?{names}"
    states = {
        service["name"].rsplit("/", 1)[1]: service.get("state")
        for service in ask_json(open_session(), url).get("services", [])
    }
    for api, use in APIS.items():
        if states.get(api) == "ENABLED":
            yield Finding("project", True, f"{api} is enabled")
        else:
            command = f"gcloud services enable {api} --project={settings.project}"
            yield Finding("project", False, f"{api} ({use}) is not enabled. Run: {command}")


def _check_billing(settings: GoogleCloudSettings, _: Uses) -> Iterator[Finding]:
    """Checked on its own: without billing, every API refuses in words of its own."""
    base = rest_url(settings, "cloudbilling.googleapis.com")
    reply = _look(f"{base}/v1/projects/{settings.project}/billingInfo")
    if reply is None:
        whether = f"whether {settings.project} has billing"
        yield _unseen("project", whether, "resourcemanager.projects.get")
        return
    if reply.get("billingEnabled"):
        yield Finding("project", True, f"billing of {settings.project} is on")
        return
    command = f"gcloud billing projects link {settings.project} --billing-account=ACCOUNT"
    yield Finding(
        "project",
        False,
        f"{settings.project} has no billing account, or a closed one: nothing would start. Who "
        f"administers billing runs: {command}",
    )


def _check_bucket(settings: GoogleCloudSettings, _: Uses) -> Iterator[Finding]:
    from google.api_core.exceptions import NotFound
    from google.cloud.storage import Client

    url = f"gs://{settings.bucket}"
    try:
        bucket = Client(project=settings.project).get_bucket(settings.bucket, timeout=REST_SECONDS)
    except NotFound:
        command = f"gcloud storage buckets create {url} --location={settings.region}"
        yield Finding("bucket", False, f"{url} does not exist. Run: {command}")
        return
    regions = bucket.data_locations or [bucket.location or ""]
    location = " and ".join(regions).lower()
    is_near = _is_in(bucket, settings.region)
    if is_near:
        yield Finding("bucket", True, f"{url} is in {location}")
    elif is_near is None:
        yield Finding(
            "region",
            None,
            f"{url} is in the dual-region {location}: every byte would cross regions where "
            f"{settings.region} is neither of its two",
        )
    else:
        yield Finding(
            "region",
            False,
            f"{url} is in {location}, the jobs in {settings.region}: every byte would cross "
            "regions, slowly and at a price. Use one region for both.",
        )
    yield from _check_what_stays(bucket)


def _is_in(bucket: Any, region: str) -> bool | None:
    """Whether a bucket has data in a region; None for a dual-region of unnamed regions."""
    location = (bucket.location or "").lower()
    if bucket.data_locations:
        return region in map(str.lower, bucket.data_locations)
    if bucket.location_type == "dual-region":
        return None
    if location == "eu":
        return region.startswith("europe-") and region not in OUTSIDE_EU
    return region == location or region.startswith(f"{location}-")


def _check_what_stays(bucket: Any) -> Iterator[Finding]:
    """Deleted objects that are retained cost as before, and training deletes many old
    checkpoints."""
    update = f"gcloud storage buckets update gs://{bucket.name}"
    if bucket.retention_period:
        yield Finding(
            "bucket",
            False,
            f"gs://{bucket.name} has a retention policy: for {bucket.retention_period} s no object "
            "can be replaced or deleted, as the registry and leases have to be. "
            f"Run: {update} --clear-retention-period, or use another bucket.",
        )
    if bucket.versioning_enabled:
        yield Finding(
            "bucket",
            None,
            f"gs://{bucket.name} keeps old versions of objects, and every checkpoint that a "
            "training rotates is paid for until a lifecycle rule deletes it. Where that is not "
            f"wanted: {update} --no-versioning",
        )
    days = (bucket.soft_delete_policy.retention_duration_seconds or 0) / 86_400
    if days:
        yield Finding(
            "bucket",
            None,
            f"gs://{bucket.name} keeps deleted objects for {days:g} days, and every checkpoint "
            "that a training rotates is paid for as long. Where that is not wanted: "
            f"{update} --clear-soft-delete",
        )


def _check_images(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Finding]:
    session, unused = open_session(), {"serve": not uses.serves, "spark": not uses.batches}
    for kind, image in settings.images.model_dump(exclude_none=True).items():
        if unused.get(kind):
            continue
        host, _, path = image.partition("/")
        if not f".{host}".endswith(REGISTRIES):
            # Others are not to be given a token of Google's.
            text = f"{image} is in none of Google's registries, and only those are asked"
            yield Finding(f"images.{kind}", None, text)
            continue
        # With a digest, the tag before it is ignored.
        tagged, _, digest = path.partition("@")
        name, _, tag = tagged.partition(":")
        reply = session.head(
            f"{rest_url(settings, host)}/v2/{name}/manifests/{digest or tag}",
            headers={"Accept": MANIFEST_TYPES},
            timeout=REST_SECONDS,
        )
        if reply.status_code == 200:
            yield Finding(f"images.{kind}", True, f"{image} exists")
        else:
            fault = "does not exist" if reply.status_code == 404 else f"HTTP {reply.status_code}"
            yield Finding(
                f"images.{kind}",
                False,
                f"{image}: {fault}. Run `images/build.sh {kind}` and put the name it prints here.",
            )


def _check_secrets(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Finding]:
    from google.api_core.exceptions import FailedPrecondition, NotFound, PermissionDenied

    from llm_assets.cloud.jobs import is_enabled, read_secret

    secrets = settings.secrets
    if uses.tracking and uses.runner != "local" and secrets.weights_and_biases_key is None:
        yield Finding(
            "secrets.weights_and_biases_key",
            False,
            "`checkpoint.logging.weights_and_biases` is set, and no secret holds the key that "
            "training reports with. Name it here, or take that line out of the pipeline file.",
        )
    # Only the jobs' account may read the Weights & Biases key, so its value is not read here.
    for name, key, use, look in (
        (secrets.hugging_face_token, "hugging_face_token", "no model is gated", read_secret),
        (secrets.weights_and_biases_key, "weights_and_biases_key", "nothing reports", is_enabled),
    ):
        if name is None:
            continue
        line = f"secrets.{key}"
        try:
            value = look(settings, name)
        except (NotFound, FailedPrecondition):
            value = ""
        except PermissionDenied:
            if look is read_secret:
                role = "roles/secretmanager.secretAccessor"
                yield Finding(line, False, f"secret {name} may not be read. Ask for {role} on it.")
            else:
                yield _unseen(line, f"the secret {name}", "secretmanager.versions.get")
            continue
        if value:
            can = "can be read" if look is read_secret else "has a value"
            yield Finding(line, True, f"secret {name} {can}")
            continue
        place = f"{name} --data-file=- --project={settings.project}"
        yield Finding(
            line,
            False,
            f"there is no secret {name}, or its newest version was disabled or destroyed. Run, "
            f"with the token as its input: gcloud secrets create {place} (or `versions add` where "
            f"it is there). Where {use}, remove this line.",
        )


def check_cost(settings: GoogleCloudSettings, uses: Uses) -> Iterator[Finding]:
    """The most that a run can cost, as far as known; nothing if no stage runs as a job."""
    if uses.runner == "local" and not uses.batches:
        return
    limit, unknown = settings.cost.run_limit, machines_without_price(settings, uses.runner)
    if unknown and settings.cost.has_limits:
        yield Finding("cost", False, how_to_price(unknown))
    if limit is not None:
        text = f"a run costs at most about {limit:,.2f} USD (`run_limit`), without its endpoint"
        yield Finding("cost", True, text)
        return
    maximum = most_of_run(settings, uses.runner, uses.batches)
    yield Finding("cost", None, f"no `run_limit` ends a run: {maximum}")
