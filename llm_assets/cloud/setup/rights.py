"""Which APIs and rights runs need: what `check` asks for, and infrastructure/ makes.

A test compares this list with the Terraform files, so that what is made and what is checked cannot
differ. Roles are granted on the smallest resource that has them.
"""

from dataclasses import dataclass
from typing import Literal

from llm_assets.cloud.settings import GoogleCloudSettings


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

APIS = {
    "aiplatform.googleapis.com": "training, evaluation, registry and endpoint",
    "artifactregistry.googleapis.com": "container images",
    "batch.googleapis.com": "training with `training.runner: google_batch`",
    "bigquery.googleapis.com": "source text in BigQuery",
    "billingbudgets.googleapis.com": "a budget that alerts",
    "cloudbilling.googleapis.com": "`llm-assets check` of the project's billing",
    "cloudbuild.googleapis.com": "image builds",
    "cloudresourcemanager.googleapis.com": "`llm-assets check`",
    "compute.googleapis.com": "the network of the Spark stages",
    "dataproc.googleapis.com": "the Spark stages",
    "iam.googleapis.com": "service accounts",
    "iap.googleapis.com": "the way to the machine that runs Dagster",
    "logging.googleapis.com": "the logs of jobs",
    "policytroubleshooter.googleapis.com": "`llm-assets check` of the jobs' account",
    "secretmanager.googleapis.com": "secrets",
    "serviceusage.googleapis.com": "`llm-assets check`",
    "storage.googleapis.com": "artifacts",
}
"""API to what needs it."""


@dataclass(frozen=True)
class Grant:
    """A role of somebody on something, and the permissions of it that runs use."""

    holder: Holder
    resource: Resource
    role: str
    permissions: tuple[str, ...]
    why: str


GRANTS = (
    Grant(
        "operator",
        "project",
        "roles/aiplatform.user",
        (
            "aiplatform.customJobs.create",
            "aiplatform.customJobs.cancel",
            "aiplatform.models.upload",
            "aiplatform.endpoints.create",
            "aiplatform.endpoints.deploy",
            "aiplatform.endpoints.undeploy",
        ),
        "starts and ends jobs, registers models, deploys them",
    ),
    Grant(
        "operator",
        "project",
        "roles/dataproc.editor",
        ("dataproc.batches.create", "dataproc.batches.list", "dataproc.operations.cancel"),
        "starts and ends Spark batches",
    ),
    Grant(
        "operator",
        "project",
        "roles/batch.jobsEditor",
        ("batch.jobs.create", "batch.jobs.delete", "batch.jobs.list"),
        "makes machines for jobs, and ends them",
    ),
    Grant(
        "operator",
        "project",
        "roles/bigquery.jobUser",
        ("bigquery.jobs.create",),
        "exports source text",
    ),
    Grant(
        "operator",
        "project",
        "roles/cloudbuild.builds.editor",
        ("cloudbuild.builds.create",),
        "builds images",
    ),
    Grant(
        "operator",
        "project",
        "roles/logging.viewer",
        ("logging.logEntries.list",),
        "reads the logs of jobs",
    ),
    Grant(
        "operator",
        "project",
        "roles/serviceusage.serviceUsageConsumer",
        ("serviceusage.services.use", "serviceusage.services.list"),
        "calls APIs on this project's quota",
    ),
    Grant(
        "operator",
        "project",
        "roles/iam.securityReviewer",
        ("resourcemanager.projects.getIamPolicy",),
        "lets `check` see the rights of the jobs' account",
    ),
    Grant(
        "operator",
        "project",
        "roles/compute.networkViewer",
        ("compute.subnetworks.get",),
        "lets `check` see the network of the Spark batches",
    ),
    Grant(
        "operator",
        "bucket",
        "roles/storage.objectUser",
        (
            "storage.objects.create",
            "storage.objects.get",
            "storage.objects.list",
            "storage.objects.delete",
        ),
        "reads and writes artifacts",
    ),
    Grant(
        "operator",
        "bucket",
        "roles/storage.legacyBucketReader",
        ("storage.buckets.get",),
        "sees the bucket's region",
    ),
    Grant(
        "operator",
        "repository",
        "roles/artifactregistry.reader",
        ("artifactregistry.repositories.downloadArtifacts",),
        "sees that images are there",
    ),
    Grant(
        "operator",
        "secret",
        "roles/secretmanager.secretAccessor",
        ("secretmanager.versions.access",),
        "downloads gated models",
    ),
    Grant(
        "operator",
        "dataset",
        "roles/bigquery.dataViewer",
        ("bigquery.tables.getData",),
        "reads source text",
    ),
    Grant(
        "operator",
        "jobs",
        "roles/iam.serviceAccountUser",
        ("iam.serviceAccounts.actAs",),
        "has jobs run as that account",
    ),
    Grant(
        "operator",
        "serving",
        "roles/iam.serviceAccountUser",
        ("iam.serviceAccounts.actAs",),
        "has endpoints run as that account",
    ),
    Grant(
        "operator",
        "builder",
        "roles/iam.serviceAccountUser",
        ("iam.serviceAccounts.actAs",),
        "has builds run as that account",
    ),
    Grant(
        "jobs",
        "project",
        "roles/batch.agentReporter",
        ("batch.states.report",),
        "lets machines of Batch say how they are",
    ),
    Grant(
        "jobs",
        "project",
        "roles/logging.logWriter",
        ("logging.logEntries.create",),
        "writes the logs of jobs on machines of Batch",
    ),
    Grant(
        "jobs",
        "project",
        "roles/dataproc.worker",
        ("dataproc.agents.create",),
        "runs Spark batches",
    ),
    Grant(
        "jobs",
        "project",
        "roles/aiplatform.user",
        ("aiplatform.tensorboardRuns.create",),
        "uploads to TensorBoard",
    ),
    Grant(
        "jobs",
        "bucket",
        # Vertex AI TensorBoard asks for this role of the account that a job runs as.
        "roles/storage.admin",
        ("storage.buckets.get", "storage.objects.create", "storage.objects.delete"),
        "reads and writes artifacts",
    ),
    Grant(
        "jobs",
        "repository",
        "roles/artifactregistry.reader",
        ("artifactregistry.repositories.downloadArtifacts",),
        "pulls the images of Spark batches",
    ),
    Grant(
        "jobs",
        "tracking",
        "roles/secretmanager.secretAccessor",
        ("secretmanager.versions.access",),
        "reads the Weights & Biases key where training runs",
    ),
    Grant(
        "builder",
        "project",
        "roles/logging.logWriter",
        ("logging.logEntries.create",),
        "writes the builds' logs",
    ),
    Grant(
        "builder",
        "bucket",
        "roles/storage.objectViewer",
        ("storage.objects.get",),
        "reads what is to be built",
    ),
    Grant(
        "builder",
        "repository",
        "roles/artifactregistry.writer",
        ("artifactregistry.repositories.uploadArtifacts",),
        "pushes images",
    ),
    Grant(
        "vertex_ai",
        "project",
        # The agent that Terraform makes does not have it by being made.
        "roles/aiplatform.serviceAgent",
        ("artifactregistry.repositories.downloadArtifacts", "storage.objects.get"),
        "pulls images and copies models",
    ),
    Grant(
        "vertex_ai",
        "serving",
        # "Use a custom service account", step "Attach a service account to a resource".
        "roles/iam.serviceAccountAdmin",
        ("iam.serviceAccounts.setIamPolicy",),
        "attaches that account to an endpoint",
    ),
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
