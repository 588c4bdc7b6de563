"""IAM: who may do what, by the roles that are bound on resources."""

from dataclasses import dataclass, field
from fnmatch import fnmatch

ROLES = {
    "roles/aiplatform.serviceAgent": (
        "aiplatform.*",
        "artifactregistry.repositories.downloadArtifacts",
        "storage.objects.*",
    ),
    "roles/aiplatform.user": ("aiplatform.*", "resourcemanager.projects.get"),
    "roles/artifactregistry.reader": ("artifactregistry.repositories.downloadArtifacts",),
    "roles/artifactregistry.writer": (
        "artifactregistry.repositories.downloadArtifacts",
        "artifactregistry.repositories.uploadArtifacts",
        "artifactregistry.tags.create",
        "artifactregistry.tags.update",
    ),
    "roles/batch.agentReporter": ("batch.states.report",),
    "roles/batch.jobsEditor": (
        "batch.jobs.*",
        "batch.operations.*",
        "batch.tasks.*",
        "resourcemanager.projects.get",
    ),
    "roles/bigquery.dataViewer": ("bigquery.tables.get*", "bigquery.tables.export"),
    "roles/bigquery.jobUser": ("bigquery.jobs.create", "resourcemanager.projects.get"),
    "roles/cloudbuild.builds.editor": ("cloudbuild.builds.*", "resourcemanager.projects.get"),
    "roles/compute.networkViewer": ("compute.networks.*", "compute.subnetworks.*"),
    "roles/dataproc.editor": ("dataproc.batches.*", "dataproc.operations.*", "compute.regions.get"),
    "roles/dataproc.worker": ("dataproc.agents.*", "dataproc.tasks.*", "storage.objects.*"),
    "roles/iam.securityReviewer": ("*.getIamPolicy",),
    "roles/iam.serviceAccountAdmin": ("iam.serviceAccounts.*etIamPolicy",),
    "roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs", "iam.serviceAccounts.get"),
    "roles/logging.logWriter": ("logging.logEntries.create",),
    "roles/logging.viewer": ("logging.logEntries.list", "logging.logs.list"),
    "roles/secretmanager.secretAccessor": ("secretmanager.versions.access",),
    "roles/secretmanager.viewer": ("secretmanager.*.get", "secretmanager.*.list"),
    "roles/serviceusage.serviceUsageConsumer": (
        "serviceusage.services.*",
        "serviceusage.quotas.get",
    ),
    "roles/storage.admin": ("storage.buckets.*", "storage.objects.*"),
    "roles/storage.legacyBucketReader": ("storage.buckets.get", "storage.objects.list"),
    "roles/storage.objectUser": ("storage.objects.*",),
    "roles/storage.objectViewer": ("storage.objects.get", "storage.objects.list"),
    "roles/tpu.admin": ("tpu.*", "resourcemanager.projects.get"),
}
"""Role to patterns of its permissions, as far as anything here asks: "IAM roles and permissions
index" of Google's documentation."""


@dataclass
class Iam:
    """Bindings of one project; while there are none, everybody may do everything."""

    project: str
    bindings: set[tuple[str, str, str]] = field(default_factory=set)
    """`(member, role, full name of the resource)`; members without `user:` or the like."""
    denied: set[str] = field(default_factory=set)
    """Permissions that nobody has, whatever is bound."""
    hidden: bool = False
    """Whether the caller may not see policies."""

    def allows(self, member: str, permission: str, resource: str) -> bool:
        """Whether a role on the resource, or on its project, holds the permission."""
        if permission in self.denied:
            return False
        if not self.bindings:
            return True
        places = (resource, f"//cloudresourcemanager.googleapis.com/projects/{self.project}")
        return any(
            fnmatch(permission, pattern)
            for bound, role, place in self.bindings
            if bound == member and place in places
            for pattern in ROLES[role]
        )

    def troubleshoot(self, member: str, permission: str, resource: str) -> str:
        """The `AccessState` that Policy Troubleshooter names."""
        if self.hidden:
            return "UNKNOWN_INFO_DENIED"
        return "GRANTED" if self.allows(member, permission, resource) else "NOT_GRANTED"

    def reset(self) -> None:
        """No bindings, nothing denied."""
        self.bindings.clear()
        self.denied.clear()
        self.hidden = False
