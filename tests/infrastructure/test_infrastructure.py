"""What Terraform makes is what `check` asks for: neither more nor less."""

import re
from typing import Any

import pytest

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.check import check
from llm_assets.cloud.setup.check_rights import check_rights
from llm_assets.cloud.setup.rights import APIS, GRANTS
from tests.infrastructure import terraform
from tests.stand_ins.google import CUDA_IMAGE, SERVE_IMAGE, SPARK_IMAGE, LocalGoogle
from tests.stand_ins.project import cloud_settings

BUILD_METRIC = "cloudbuild.googleapis.com/concurrent_public_pool_build_cpus"
SEEN_BY_USE = {"secret", "dataset"}
ASKED_FOR = sorted(grant for grant in terraform.grants() if grant[1] not in SEEN_BY_USE)


def resource(kind: str, name: str) -> dict[str, Any]:
    """A resource's content."""
    (found,) = [b[kind][name] for b in terraform.read("resource") if name in b.get(kind, {})]
    return dict(found)


@pytest.fixture
def settings(google: LocalGoogle) -> GoogleCloudSettings:
    """A project as `terraform apply` and `images/build.sh` leave it."""
    images = (CUDA_IMAGE, SPARK_IMAGE, SERVE_IMAGE)
    google.rest.images |= {image.split("/", 1)[1] for image in images}
    google.rest.quotas[BUILD_METRIC] = 8
    accounts = {
        "builder_account": "llm-assets-builder@local-project.iam.gserviceaccount.com",
    }
    secrets = {"secrets": {"weights_and_biases_key": "weights-and-biases-key"}}
    return GoogleCloudSettings.model_validate(cloud_settings(google) | accounts | secrets)


def test_rights_and_apis_that_are_made_are_those_that_are_checked() -> None:
    assert terraform.grants() == {(g.holder, g.resource, g.role) for g in GRANTS}
    assert set(terraform.local("apis")) == set(APIS)


def test_project_that_terraform_made_passes_the_check(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    terraform.bind(google.iam, settings)
    assert [finding.text for finding in check(settings) if not finding.ok] == []


def test_check_names_each_right_that_is_taken_away(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    for place in sorted({grant[:2] for grant in ASKED_FOR}):
        taken = {grant for grant in ASKED_FOR if grant[:2] == place}
        terraform.bind(google.iam, settings, without=taken)
        found = check_rights(settings, uses_bigquery=True)
        problems = [finding.text for finding in found if finding.ok is False]
        assert len(problems) == len(taken)
        assert all(any(role in text for text in problems) for _, _, role in taken), problems


def test_a_container_that_the_world_asks_may_do_nothing() -> None:
    assert not [grant for grant in terraform.grants() if grant[0] == "serving"]
    assert "account_id" in resource("google_service_account", "serving")


def test_only_budgets_are_asked_for_in_the_name_of_a_project_whose_apis_are_still_off() -> None:
    providers = [block["google"] for block in terraform.read("provider") if "google" in block]
    in_its_name = [p.get("alias") for p in providers if p.get("user_project_override")]
    assert in_its_name == ["budget"]
    assert "google.budget" in resource("google_billing_budget", "budget")["provider"]
    users = [named for block in terraform.read("resource") for named in block.values()]
    assert sum("google.budget" in str(named) for named in users) == 1


def test_old_images_go_and_the_newest_of_each_stay() -> None:
    policies = resource("google_artifact_registry_repository", "images")["cleanup_policies"]
    assert {policy["action"] for policy in policies} == {"KEEP", "DELETE"}


def test_outputs_are_keys_of_the_settings() -> None:
    outputs = {name: block for output in terraform.read("output") for name, block in output.items()}
    keys = {key for key in outputs["settings"]["value"] if not key.startswith("__")}
    assert keys <= set(GoogleCloudSettings.model_fields)
    required = {n for n, field in GoogleCloudSettings.model_fields.items() if field.is_required()}
    assert required <= keys | {"images"}


def test_every_reference_is_to_something_declared() -> None:
    text = "\n".join(path.read_text() for path in sorted(terraform.FOLDER.glob("*.tf")))
    text = re.sub(r"#.*", "", text)
    declared = {f"var.{name}" for block in terraform.read("variable") for name in block}
    declared |= {f"local.{name}" for block in terraform.read("locals") for name in block}
    for block in terraform.read("resource") + terraform.read("data"):
        declared |= {f"{kind}.{name}" for kind, named in block.items() for name in named}
    used = set(re.findall(r"\b(?:var|local)\.\w+|\bgoogle_\w+\.\w+", text)) - {"google_cloud.yaml"}
    assert used <= declared
