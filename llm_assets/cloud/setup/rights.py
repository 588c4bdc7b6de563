"""Which APIs and rights runs need: what `check` asks for, and infrastructure/ makes.

A test compares this list with the Terraform files, so that what is made and what is checked cannot
differ. Roles are granted on the smallest resource that has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import REST_SECONDS, open_session, post_json, rest_url


@dataclass(frozen=True)
class Finding:
    """The result of one test."""

    key: str
    """The line of `config/google_cloud.yaml` that it is about."""
    ok: bool | None
    """None where it could not be seen, which is no fault."""
    text: str
    """What was found and, where it is not well, what to do."""

    def line(self) -> str:
        """`PROBLEM images.cuda: ...`."""
        mark = {True: "ok     ", False: "PROBLEM", None: "unknown"}[self.ok]
        return f"{mark} {self.key}: {self.text}"


Holder = Literal["operator", "jobs", "builder", "vertex_ai"]
"""Who runs Dagster, the account that jobs run as, the one that builds images, Vertex AI itself."""
Resource = Literal[
    "project",
    "bucket",
    "repository",
    "secret",
    "tracking",
    "dataset",
    "jobs",
    "serving",
    "builder",
]
"""What a role is granted on; `jobs`, `serving` and `builder` are the accounts as resources,
`secret` is the Hugging Face token and `tracking` the secret with the Weights & Biases key."""
REPOSITORY = "llm-assets"

_RIGHTS = yaml.safe_load(Path(__file__).with_name("rights.yaml").read_text())
APIS: dict[str, str] = _RIGHTS["apis"]
"""API to what needs it."""


@dataclass(frozen=True)
class Grant:
    """A role of somebody on something, and the permissions of it that runs use."""

    holder: Holder
    resource: Resource
    role: str
    permissions: tuple[str, ...]
    why: str


GRANTS = tuple(
    Grant(holder, resource, role, tuple(grant["permissions"]), grant["why"])
    for holder, resources in _RIGHTS["grants"].items()
    for resource, roles in resources.items()
    for role, grant in roles.items()
)


def grants_for(settings: GoogleCloudSettings, uses_bigquery: bool) -> list[Grant]:
    """The grants that matter with these settings."""
    absent: set[Resource] = set()
    if not uses_bigquery:
        absent.add("dataset")
    if settings.secrets.hugging_face_token is None:
        absent.add("secret")
    if settings.secrets.weights_and_biases_key is None:
        absent.add("tracking")
    if settings.builder_account is None:
        absent.add("builder")
    roles = {"roles/bigquery.jobUser"} if not uses_bigquery else set()
    holders = {"builder"} if settings.builder_account is None else set()
    return [
        grant
        for grant in GRANTS
        if grant.resource not in absent and grant.role not in roles and grant.holder not in holders
    ]


KEYS: dict[Resource, str] = {
    "bucket": "bucket",
    "repository": "images",
    "tracking": "secrets.weights_and_biases_key",
    "jobs": "service_account",
    "serving": "serving_account",
    "builder": "builder_account",
}
"""Resource to its line in the settings; the others stand under `project`."""
NAMES: dict[Holder, str] = {
    "operator": "the identity that runs Dagster",
    "jobs": "the jobs' account",
    "builder": "the builds' account",
    "vertex_ai": "the Vertex AI Service Agent",
}
SEEN_BY_USE: set[Resource] = {"secret", "dataset"}
"""Resources that other tests, or the source itself, read."""


def check_rights(settings: GoogleCloudSettings, uses_bigquery: bool) -> Iterator[Finding]:
    """Every grant: the caller's are asked of each resource, the others of the troubleshooter."""
    grants = [g for g in grants_for(settings, uses_bigquery) if g.resource not in SEEN_BY_USE]
    # The secret itself shows the operator's right to look at it.
    own = [g for g in grants if g.holder == "operator" and g.resource != "tracking"]
    session = open_session()
    for resource in dict.fromkeys(grant.resource for grant in own):
        here = [grant for grant in own if grant.resource == resource]
        yield from _check_own(session, settings, resource, here)
    others = [grant for grant in grants if grant.holder != "operator"]
    yield from _check_others(session, settings, others)


def _check_own(
    session: Any, settings: GoogleCloudSettings, resource: Resource, grants: Sequence[Grant]
) -> Iterator[Finding]:
    wanted = [permission for grant in grants for permission in grant.permissions]
    granted = _granted(session, settings, resource, wanted)
    for grant in grants:
        missing = [permission for permission in grant.permissions if permission not in granted]
        if missing:
            yield _missing(settings, grant, missing)
    if set(wanted) <= granted:
        what = _describe(settings, resource)
        text = f"all {len(wanted)} permissions on {what} are granted"
        yield Finding(KEYS.get(resource, "project"), True, text)


def _missing(settings: GoogleCloudSettings, grant: Grant, missing: Sequence[str]) -> Finding:
    return Finding(
        KEYS.get(grant.resource, "project"),
        False,
        f"{NAMES[grant.holder]} lacks {', '.join(missing)} ({grant.why}). Ask for {grant.role} on "
        f"{_describe(settings, grant.resource)} for it.",
    )


def _granted(
    session: Any, settings: GoogleCloudSettings, resource: Resource, permissions: Sequence[str]
) -> set[str]:
    """Those of the permissions that the caller has on a resource."""
    if resource == "project":
        from google.cloud.resourcemanager_v3 import ProjectsClient

        reply = ProjectsClient(client_options=settings.client_options).test_iam_permissions(
            resource=f"projects/{settings.project}",
            permissions=list(permissions),
            timeout=REST_SECONDS,
        )
        return set(reply.permissions)
    if resource == "bucket":
        from google.cloud.storage import Client

        bucket = Client(project=settings.project).bucket(settings.bucket)
        return set(bucket.test_iam_permissions(list(permissions), timeout=REST_SECONDS))
    host, name = _full_name(settings, resource).removeprefix("//").split("/", 1)
    url = f"{rest_url(settings, host)}/v1/{name}:testIamPermissions"
    answer = post_json(session, url, {"permissions": list(permissions)})
    return set(answer.get("permissions", []))


def _check_others(
    session: Any, settings: GoogleCloudSettings, grants: Sequence[Grant]
) -> Iterator[Finding]:
    """Rights of accounts that the caller is not; where it may not see them they are unknown."""
    principals = {
        "jobs": settings.service_account,
        "builder": settings.builder_account,
        "vertex_ai": _vertex_ai_agent(settings),
    }
    unseen: list[str] = []
    for grant in grants:
        principal = principals[grant.holder]
        states = {
            permission: _troubleshoot(session, settings, principal, grant.resource, permission)
            for permission in grant.permissions
            if principal
        }
        lacking = [name for name, state in states.items() if state == "NOT_GRANTED"]
        if lacking:
            yield _missing(settings, grant, lacking)
        elif set(states.values()) != {"GRANTED"}:
            unseen.append(f"{grant.role} of {NAMES[grant.holder]}")
    if unseen:
        yield Finding(
            "project",
            None,
            f"you may not see {', '.join(unseen)}: roles/iam.securityReviewer would show them, and "
            "`llm-assets check --smoke` shows whether they are there.",
        )
    else:
        yield Finding(
            "service_account", True, f"the permissions of {len(grants)} roles were checked"
        )


def _troubleshoot(
    session: Any, settings: GoogleCloudSettings, principal: str, resource: Resource, permission: str
) -> str:
    """Policy Troubleshooter's `AccessState` for an account's permission on a resource."""
    base = rest_url(settings, "policytroubleshooter.googleapis.com")
    question = {
        "principal": principal,
        "fullResourceName": _full_name(settings, resource),
        "permission": permission,
    }
    answer = post_json(session, f"{base}/v1/iam:troubleshoot", {"accessTuple": question})
    return str(answer.get("access", "ACCESS_STATE_UNSPECIFIED"))


def _vertex_ai_agent(settings: GoogleCloudSettings) -> str | None:
    """The account that Vertex AI itself acts as in a project; None where its number is hidden."""
    from google.api_core.exceptions import PermissionDenied
    from google.cloud.resourcemanager_v3 import ProjectsClient

    try:
        project = ProjectsClient(client_options=settings.client_options).get_project(
            name=f"projects/{settings.project}", timeout=REST_SECONDS
        )
    except PermissionDenied:
        return None
    number = project.name.rsplit("/", 1)[1]
    return f"service-{number}@gcp-sa-aiplatform.iam.gserviceaccount.com"


def _full_name(settings: GoogleCloudSettings, resource: Resource) -> str:
    """A resource's full name, as IAM's APIs have it."""
    project = f"projects/{settings.project}"
    accounts = f"//iam.googleapis.com/{project}/serviceAccounts"
    key = settings.secrets.weights_and_biases_key
    images = f"{project}/locations/{settings.region}/repositories/{REPOSITORY}"
    return {
        "project": f"//cloudresourcemanager.googleapis.com/{project}",
        "bucket": f"//storage.googleapis.com/projects/_/buckets/{settings.bucket}",
        "repository": f"//artifactregistry.googleapis.com/{images}",
        "tracking": f"//secretmanager.googleapis.com/{project}/secrets/{key}",
        "jobs": f"{accounts}/{settings.service_account}",
        "serving": f"{accounts}/{settings.account_that_serves}",
        "builder": f"{accounts}/{settings.builder_account}",
    }[resource]


def _describe(settings: GoogleCloudSettings, resource: Resource) -> str:
    """A resource as a person names it."""
    return {
        "project": f"project {settings.project}",
        "bucket": f"gs://{settings.bucket}",
        "repository": f"the repository {REPOSITORY}",
        "tracking": f"the secret {settings.secrets.weights_and_biases_key}",
        "jobs": f"the account {settings.service_account}",
        "serving": f"the account {settings.account_that_serves}",
        "builder": f"the account {settings.builder_account}",
    }[resource]
