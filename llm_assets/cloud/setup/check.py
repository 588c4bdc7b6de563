"""Tests every right, API, quota, image and bucket before money is spent."""

from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

from artifacts.errors import first_line
from llm_assets.cloud.rest import CALL_SECONDS, get_json, open_session, rest_url
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.check_quotas import check_accelerators, check_spark
from llm_assets.cloud.setup.check_rights import check_rights
from llm_assets.cloud.setup.finding import Finding
from llm_assets.cloud.setup.rights import APIS
from llm_assets.pipes.failures import Place, explain

MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)


def check(settings: GoogleCloudSettings, uses_bigquery: bool = True) -> list[Finding]:
    """Run every test; one that cannot be run is a finding too, never an exception.

    Args:
        uses_bigquery: whether a pipeline reads source text from there.
    """
    tests: list[tuple[str, Callable[[GoogleCloudSettings], Iterator[Finding]]]] = [
        ("project", _check_apis),
        ("project", _check_billing),
        ("project", partial(check_rights, uses_bigquery=uses_bigquery)),
        ("bucket", _check_bucket),
        ("images", _check_images),
        ("secrets", _check_secrets),
        ("batch", check_spark),
        ("training", check_accelerators),
    ]
    findings: list[Finding] = []
    for key, test in tests:
        try:
            findings += test(settings)
        except Exception as error:
            # One check that cannot be made is a finding, and the others are made all the same.
            status = getattr(error, "code", None)
            advice = explain(
                str(error), status if isinstance(status, int) else None, _place(settings)
            )
            findings.append(Finding(key, False, f"{first_line(error)}\n{advice}".strip()))
    return findings


def _place(settings: GoogleCloudSettings) -> Place:
    return Place(
        "Google Cloud",
        "cloudresourcemanager.googleapis.com",
        "roles/viewer",
        settings.project,
        settings.region,
    )


def _check_apis(settings: GoogleCloudSettings) -> Iterator[Finding]:
    base = rest_url(settings, "serviceusage.googleapis.com")
    names = "&".join(f"names=projects/{settings.project}/services/{api}" for api in APIS)
    url = f"{base}/v1/projects/{settings.project}/services:batchGet?{names}"
    states = {
        service["name"].rsplit("/", 1)[1]: service.get("state")
        for service in get_json(open_session(), url).get("services", [])
    }
    for api, use in APIS.items():
        if states.get(api) == "ENABLED":
            yield Finding("project", True, f"{api} is enabled")
        else:
            command = f"gcloud services enable {api} --project={settings.project}"
            yield Finding("project", False, f"{api} ({use}) is not enabled. Run: {command}")


def _check_billing(settings: GoogleCloudSettings) -> Iterator[Finding]:
    """Without billing every API refuses, each in words of its own."""
    base = rest_url(settings, "cloudbilling.googleapis.com")
    reply = open_session().get(
        f"{base}/v1/projects/{settings.project}/billingInfo", timeout=CALL_SECONDS
    )
    if reply.status_code == HTTPStatus.FORBIDDEN:
        text = f"you may not see whether {settings.project} has billing"
        yield Finding("project", None, f"{text}: resourcemanager.projects.get would show it")
        return
    reply.raise_for_status()
    if reply.json().get("billingEnabled"):
        yield Finding("project", True, f"billing of {settings.project} is on")
        return
    command = f"gcloud billing projects link {settings.project} --billing-account=ACCOUNT"
    yield Finding(
        "project",
        False,
        f"{settings.project} has no billing account, or a closed one: nothing would start. Who "
        f"administers billing runs: {command}",
    )


def _check_bucket(settings: GoogleCloudSettings) -> Iterator[Finding]:
    from google.api_core.exceptions import NotFound
    from google.cloud.storage import Client

    url = f"gs://{settings.bucket}"
    try:
        bucket = Client(project=settings.project).get_bucket(settings.bucket, timeout=CALL_SECONDS)
    except NotFound:
        command = f"gcloud storage buckets create {url} --location={settings.region}"
        yield Finding("bucket", False, f"{url} does not exist. Run: {command}")
        return
    location = (bucket.location or "").lower()
    if location == settings.region or settings.region.startswith(f"{location}-"):
        yield Finding("bucket", True, f"{url} is in {location}")
    else:
        yield Finding(
            "region",
            False,
            f"{url} is in {location}, the jobs in {settings.region}: every byte would cross "
            "regions, slowly and at a price. Use one region for both.",
        )
    yield from _check_soft_delete(bucket)


def _check_soft_delete(bucket: Any) -> Iterator[Finding]:
    """Deleted objects that are kept cost what they did before; rotated checkpoints are many."""
    days = bucket.soft_delete_policy.retention_duration_seconds or 0
    days = days / 86_400
    if days:
        yield Finding(
            "bucket",
            None,
            f"gs://{bucket.name} keeps deleted objects for {days:g} days, and every checkpoint "
            "that a training rotates is paid for as long. Where that is not wanted: gcloud storage "
            f"buckets update gs://{bucket.name} --clear-soft-delete",
        )


def _check_images(settings: GoogleCloudSettings) -> Iterator[Finding]:
    session = open_session()
    for kind, image in settings.images.model_dump(exclude_none=True).items():
        host, _, rest = image.partition("/")
        name, tag = rest.split("@") if "@" in rest else rest.rsplit(":", 1)
        reply = session.head(
            f"{rest_url(settings, host)}/v2/{name}/manifests/{tag}",
            headers={"Accept": MANIFEST_TYPES},
            timeout=CALL_SECONDS,
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


def _check_secrets(settings: GoogleCloudSettings) -> Iterator[Finding]:
    from google.api_core.exceptions import NotFound, PermissionDenied

    from llm_assets.cloud.secrets import read_secret

    name = settings.secrets.hugging_face_token
    if name is None:
        return
    key = "secrets.hugging_face_token"
    try:
        read_secret(settings, name)
        yield Finding(key, True, f"secret {name} can be read")
    except NotFound:
        place = f"{name} --data-file=- --project={settings.project}"
        yield Finding(
            key,
            False,
            f"there is no secret {name}, or it has no value. Run, with the token as its input: "
            f"gcloud secrets create {place} (or `versions add` where it is there). Where no model "
            "is gated, remove this line.",
        )
    except PermissionDenied:
        role = "roles/secretmanager.secretAccessor"
        yield Finding(key, False, f"secret {name} may not be read. Ask for {role} on it.")
