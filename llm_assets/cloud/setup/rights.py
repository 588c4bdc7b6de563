"""Asks for the APIs and rights that runs need, by `rights.yaml`, which infrastructure/ makes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import REST_SECONDS, ask_json, open_session, rest_url
from llm_assets.pipes.failures import JobService, explain


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
    unused = {
        "dataset": not uses_bigquery,
        "secret": settings.secrets.hugging_face_token is None,
        "tracking": settings.secrets.weights_and_biases_key is None,
        "builder": settings.builder_account is None,
    }
    roles = set() if uses_bigquery else {"roles/bigquery.jobUser"}
    return [
        grant
        for grant in GRANTS
        if not (unused.get(grant.resource) or unused.get(grant.holder) or grant.role in roles)
    ]


class Target(NamedTuple):
    """Something that roles are granted on."""

    name: str
    """As a person names it."""
    full_name: str
    """As IAM's APIs have it."""
    key: str = "project"
    """Its line in the settings."""


def _target(settings: GoogleCloudSettings, resource: Resource) -> Target:
    project = f"projects/{settings.project}"
    if resource == "project":
        full_name = f"//cloudresourcemanager.googleapis.com/{project}"
        return Target(f"project {settings.project}", full_name)
    if resource == "bucket":
        full_name = f"//storage.googleapis.com/projects/_/buckets/{settings.bucket}"
        return Target(f"gs://{settings.bucket}", full_name, "bucket")
    if resource == "repository":
        images = f"{project}/locations/{settings.region}/repositories/{REPOSITORY}"
        full_name = f"//artifactregistry.googleapis.com/{images}"
        return Target(f"the repository {REPOSITORY}", full_name, "images")
    if resource == "tracking":
        key = settings.secrets.weights_and_biases_key
        full_name = f"//secretmanager.googleapis.com/{project}/secrets/{key}"
        return Target(f"the secret {key}", full_name, "secrets.weights_and_biases_key")
    account, key = {
        "jobs": (settings.service_account, "service_account"),
        "serving": (settings.account_that_serves, "serving_account"),
        "builder": (settings.builder_account, "builder_account"),
    }[resource]
    full_name = f"//iam.googleapis.com/{project}/serviceAccounts/{account}"
    return Target(f"the account {account}", full_name, key)


NAMES: dict[Holder, str] = {
    "operator": "the identity that runs Dagster",
    "jobs": "the jobs' account",
    "builder": "the builds' account",
    "vertex_ai": "the Vertex AI Service Agent",
}
SEEN_BY_USE: set[Resource] = {"secret", "dataset"}
"""Resources that other tests, or the source itself, read, so that no permission is asked for."""


def advice_on(error: Exception, settings: GoogleCloudSettings) -> str:
    """What to do about an error that a look at the project met; empty where there is no advice."""
    status = getattr(error, "code", None)
    place = JobService(
        "Google Cloud",
        "cloudresourcemanager.googleapis.com",
        "roles/viewer",
        settings.project,
        settings.region,
    )
    return explain(str(error), status if isinstance(status, int) else None, place)


def check_rights(settings: GoogleCloudSettings, uses_bigquery: bool) -> Iterator[Finding]:
    """Every grant: the caller's own are tested on each resource, others by Policy
    Troubleshooter."""
    from google.api_core.exceptions import Forbidden, NotFound

    grants = [g for g in grants_for(settings, uses_bigquery) if g.resource not in SEEN_BY_USE]
    # Whether the operator may see this secret shows when it is read.
    own_grants = [g for g in grants if g.holder == "operator" and g.resource != "tracking"]
    session = open_session()
    for resource in dict.fromkeys(grant.resource for grant in own_grants):
        on_resource = [grant for grant in own_grants if grant.resource == resource]
        permissions = [permission for grant in on_resource for permission in grant.permissions]
        target = _target(settings, resource)
        try:
            granted = _granted(session, settings, resource, permissions)
        except (Forbidden, NotFound) as error:
            # The rights on all else are looked at all the same.
            text = f"the rights on {target.name} cannot be seen: {error.message}"
            text = f"{text}\n{advice_on(error, settings)}"
            yield Finding(target.key, False, text.strip())
            continue
        for grant in on_resource:
            if missing := [name for name in grant.permissions if name not in granted]:
                yield _missing(settings, grant, missing)
        if set(permissions) <= granted:
            text = f"all {len(permissions)} permissions on {target.name} are granted"
            yield Finding(target.key, True, text)
    others = [grant for grant in grants if grant.holder != "operator"]
    yield from _check_others(session, settings, others)


def _missing(settings: GoogleCloudSettings, grant: Grant, missing: Sequence[str]) -> Finding:
    target = _target(settings, grant.resource)
    return Finding(
        target.key,
        False,
        f"{NAMES[grant.holder]} lacks {', '.join(missing)} ({grant.why}). Ask for {grant.role} on "
        f"{target.name} for it.",
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
    host, name = _target(settings, resource).full_name.removeprefix("//").split("/", 1)
    url = f"{rest_url(settings, host)}/v1/{name}:testIamPermissions"
    answer = ask_json(session, url, {"permissions": list(permissions)})
    return set(answer.get("permissions", []))


def _check_others(
    session: Any, settings: GoogleCloudSettings, grants: Sequence[Grant]
) -> Iterator[Finding]:
    """Permissions of other accounts; unknown if the caller may not see them."""
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
        "fullResourceName": _target(settings, resource).full_name,
        "permission": permission,
    }
    answer = ask_json(session, f"{base}/v1/iam:troubleshoot", {"accessTuple": question})
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
