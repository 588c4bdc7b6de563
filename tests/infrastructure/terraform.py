"""infrastructure/ as a parser reads it."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import hcl2

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.rights import GRANTS
from tests.stand_ins.iam import Iam
from tests.stand_ins.identity import SERVICE_ACCOUNT
from tests.stand_ins.projects import VERTEX_AI_AGENT

FOLDER = Path(__file__).parents[2] / "infrastructure"
Binding = tuple[str, str, str]


def read(kind: str) -> list[dict[str, Any]]:
    """Every block of a kind: `resource`, `locals`, `output`, `variable`."""
    found: list[dict[str, Any]] = []
    for path in sorted(FOLDER.glob("*.tf")):
        found += _plain(hcl2.loads(path.read_text())).get(kind, [])
    return found


def grants() -> set[Binding]:
    """`(holder, resource, role)` of everything that is granted: what `check` asks for, and what
    Dagster's own machine has."""
    text = (FOLDER / "rights.tf").read_text()
    own = hcl2.loads(text[text.index("    control = {") : text.index("\n  })")] + "\n")
    control = _plain(own)["control"].items()
    asked = {(grant.holder, grant.resource, grant.role) for grant in GRANTS}
    return asked | {("control", resource, role) for resource, roles in control for role in roles}


def granted(members: Mapping[str, Sequence[str]], folder: Path) -> dict[str, dict[str, str]]:
    """`local.grants` with these holders' members: as Terraform has it where there is one, else by
    the keys that its text makes."""
    text = (FOLDER / "rights.tf").read_text()
    if shutil.which("terraform"):
        (asked,) = re.findall(r"^  needed = .*", (FOLDER / "main.tf").read_text(), re.MULTILINE)
        rights = text[text.index("  rights =") : text.index("\n}\n", text.index("grants = merge("))]
        given = f"members = {json.dumps(members)}\n{asked}\n{rights}"
        given = given.replace("${path.module}", str(FOLDER))
        (folder / "main.tf").write_text(f"locals {{\n{given}\n}}\n")
        said = subprocess.run(
            ["terraform", "console"],
            input="jsonencode(local.grants)\n",
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, dict[str, str]] = json.loads(json.loads(said.stdout))
        return found
    (key,) = re.findall(r'"(\$\{resource\}[^"]*)" =>', text)
    made = [
        (
            key.replace("${resource}", resource)
            .replace("${role}", role)
            .replace("${holder}", holder)
            .replace("${index}", str(index)),
            {"resource": resource, "role": role, "member": member},
        )
        for holder, resource, role in grants()
        for index, member in enumerate(members[holder])
    ]
    return dict(made)


def bind(
    iam: Iam,
    settings: GoogleCloudSettings,
    without: Set[Binding] = frozenset(),
    caller: str = "operator",
) -> None:
    """Give the stand-in the bindings that `terraform apply` makes.

    Args:
        caller: the holder that calls: `operator`, or `control` for Dagster's own machine.
    """
    members = {
        "operator": "user:ada@example.com",
        "control": "serviceAccount:llm-assets-control",
        "jobs": settings.service_account,
        "builder": str(settings.builder_account),
        "vertex_ai": VERTEX_AI_AGENT,
        caller: SERVICE_ACCOUNT,
    }
    project = f"projects/{settings.project}"
    region = f"{project}/locations/{settings.region}"
    accounts = f"//iam.googleapis.com/{project}/serviceAccounts"
    places = {
        "project": f"//cloudresourcemanager.googleapis.com/{project}",
        "bucket": f"//storage.googleapis.com/projects/_/buckets/{settings.bucket}",
        "repository": f"//artifactregistry.googleapis.com/{region}/repositories/llm-assets",
        "secret": f"//secretmanager.googleapis.com/{project}/secrets/hugging-face-token",
        "tracking": f"//secretmanager.googleapis.com/{project}/secrets/weights-and-biases-key",
        "dataset": f"//bigquery.googleapis.com/{project}/datasets/corpus",
        "jobs": f"{accounts}/{settings.service_account}",
        "serving": f"{accounts}/{settings.account_that_serves}",
        "builder": f"{accounts}/{settings.builder_account}",
    }
    iam.bindings = {
        (members[holder], role, places[resource]) for holder, resource, role in grants() - without
    }


def _plain(value: Any) -> Any:
    """What the parser gives, without the quotes that it keeps around strings."""
    if isinstance(value, dict):
        return {str(key).strip('"'): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.strip('"') if isinstance(value, str) else value
