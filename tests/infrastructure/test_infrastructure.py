"""What Terraform makes is what `check` asks for: neither more nor less."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.check import check
from llm_assets.cloud.setup.rights import GRANTS, check_rights
from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs
from tests.conftest import UV
from tests.images import test_images as image
from tests.infrastructure import provider_schema, terraform
from tests.needs import needs
from tests.stand_ins.google import BUCKET, CUDA_IMAGE, SERVE_IMAGE, SPARK_IMAGE, LocalGoogle
from tests.stand_ins.project import cloud_settings

BUILD_METRIC = "cloudbuild.googleapis.com/concurrent_public_pool_build_cpus"
ROOT = terraform.FOLDER.parent
SEEN_BY_USE = {"secret", "dataset"}
OF_ITSELF = ("operator", "tracking")
"""A right that the look at the secret itself shows."""
ASKED_FOR = sorted(
    grant
    for grant in terraform.grants()
    if grant[1] not in SEEN_BY_USE and grant[0] != "control" and grant[:2] != OF_ITSELF
)


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
    google.secrets.values["weights-and-biases-key"] = "hush-hush"
    content = cloud_settings(google) | {"cost": {"run_limit": 50}}
    content["builder_account"] = "llm-assets-builder@local-project.iam.gserviceaccount.com"
    content["secrets"] = {"weights_and_biases_key": "weights-and-biases-key"}
    return GoogleCloudSettings.model_validate(content)


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


def test_what_is_asked_for_is_made_each_right_of_two_operators_under_a_name_of_its_own(
    tmp_path: Path,
) -> None:
    members = {holder: [holder] for holder in ("control", "jobs", "builder", "vertex_ai")}
    operators = ["user:ada@example.com", "user:grace@example.com"]
    made = terraform.granted(members | {"operator": operators}, tmp_path)
    wanted = {
        (resource, role, member)
        for holder, resource, role in terraform.grants()
        for member in (operators if holder == "operator" else [holder])
    }
    assert {(g["resource"], g["role"], g["member"]) for g in made.values()} == wanted
    assert len(made) == len(wanted), "one name holds one grant"
    apis = resource("google_project_service", "apis")["for_each"]
    assert apis == "${toset(keys(local.needed.apis))}"


def test_a_container_that_the_world_asks_may_do_nothing() -> None:
    assert not [grant for grant in terraform.grants() if grant[0] == "serving"]
    assert "account_id" in resource("google_service_account", "serving")


def test_dagsters_own_account_has_an_operators_rights_without_builds_and_looking_around() -> None:
    of = {
        who: {g[1:] for g in terraform.grants() if g[0] == who} for who in ("control", "operator")
    }
    assert of["control"] - of["operator"] == {
        ("project", "roles/logging.logWriter"),
        ("repository", "roles/artifactregistry.reader"),
    }
    assert of["operator"] - of["control"] == {
        ("repository", "roles/artifactregistry.writer"),
        ("project", "roles/cloudbuild.builds.editor"),
        ("project", "roles/compute.networkViewer"),
        ("project", "roles/iam.securityReviewer"),
        ("project", "roles/logging.viewer"),
        ("tracking", "roles/secretmanager.viewer"),
        ("builder", "roles/iam.serviceAccountUser"),
    }
    accounts = {"jobs", "serving", "builder", "control"}
    made = [resource("google_service_account", name)["account_id"] for name in accounts]
    assert len(set(made)) == 4


def test_dagsters_own_account_opens_the_history_that_its_image_names(
    google: LocalGoogle,
    settings: GoogleCloudSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = yaml.safe_load((ROOT / "images/control/dagster.yaml").read_text())
    # PostgreSQL's server is the machine's own.
    content["storage"] = {"sqlite": {"base_dir": str(tmp_path / "history")}}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_LOGS_BUCKET", BUCKET)
    terraform.bind(google.iam, settings, caller="control")
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert type(instance.compute_log_manager).__name__ == "GCSComputeLogManager"


def test_an_operator_may_tag_the_image_that_dagsters_machine_starts() -> None:
    assert "gcloud artifacts docker tags add" in (ROOT / "images" / "build.sh").read_text()
    (grant,) = [g for g in GRANTS if (g.holder, g.resource) == ("operator", "repository")]
    assert {"artifactregistry.tags.create", "artifactregistry.tags.update"} <= {*grant.permissions}


def test_every_attribute_is_one_of_the_providers_own_and_none_that_it_asks_for_is_missing() -> None:
    schema = json.loads(provider_schema.PATH.read_text())
    used = provider_schema.all_used()
    assert set(used) == set(schema), "python -m tests.infrastructure.provider_schema WHEEL..."
    for path, names in used.items():
        known = schema[path]
        assert set(known["required"]) <= names <= {*known["required"], *known["optional"]}, path


def test_the_machine_of_dagster_is_reached_by_its_proxy_alone() -> None:
    machine = resource("google_compute_instance", "control")
    (interface,) = machine["network_interface"]
    assert "access_config" not in interface and "ipv6_access_config" not in interface
    firewall = resource("google_compute_firewall", "iap")
    assert firewall["source_ranges"] == ["35.235.240.0/20"]
    assert firewall["allow"][0]["ports"] == ["22"]
    for kind in ("google_iap_tunnel_instance_iam_member", "google_compute_instance_iam_member"):
        assert "var.operators" in resource(kind, "operators")["for_each"]


def test_the_machine_of_dagster_and_others_that_ask_for_it_reach_the_internet() -> None:
    for kind, name in (("google_compute_router", "router"), ("google_compute_router_nat", "nat")):
        assert resource(kind, name)["count"] == "${var.internet || var.control ? 1 : 0}"


def test_the_guide_builds_dagsters_image_once_its_settings_name_the_others() -> None:
    guide = (ROOT / "docs" / "google_cloud.md").read_text()
    builds = [guide.index(f"\nimages/build.sh {name}\n") for name in ("spark", "cuda", "serve")]
    assert max(builds) < guide.index("\nimages/build.sh control\n")


def control_files() -> dict[str, str]:
    """What cloud-init writes on the machine of Dagster, as Terraform fills it in."""
    text = (terraform.FOLDER / "control.yaml").read_text()
    (given,) = re.findall(r"control\.yaml\", \{(.*?)\n    \}", CONTROL, re.DOTALL)
    names = re.findall(r"^ +(\w+) +=", given, re.MULTILINE)
    assert set(re.findall(r"\$\{(\w+)\}", text)) == set(names)
    for name in names:
        text = text.replace(f"${{{name}}}", f"a-{name}")
    content = yaml.safe_load(text)
    assert content["runcmd"][-1].endswith("llm-assets-database llm-assets")
    return {Path(file["path"]).name: file["content"] for file in content["write_files"]}


CONTROL = (terraform.FOLDER / "control.tf").read_text()


@needs("systemd")
def test_units_of_dagsters_machine_are_as_systemd_wants_them(tmp_path: Path) -> None:
    units = [name for name in control_files() if name.endswith(".service")]
    for name in units:
        # Only their programs are not here.
        content = control_files()[name].replace("/usr/bin/docker", "/bin/true")
        (tmp_path / name).write_text(content.replace(" docker.service", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(tmp_path / name for name in units)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_databases_and_uis_of_dagsters_machine_listen_on_loopback_and_keep_their_password() -> None:
    files = control_files()
    database, dagster = files["llm-assets-database.service"], files["llm-assets.service"]
    assert "listen_addresses=127.0.0.1" in database
    assert "--env-file=/mnt/disks/state/environment" in database
    assert "--env-file=/mnt/disks/state/environment" in dagster
    assert "umask 077" in files["prepare.sh"]
    assert dict(image.instructions("control"))["CMD"] == '["llm-assets", "up", "--wait"]'


def prepare(folder: Path, on_sleep: str) -> subprocess.CompletedProcess[str]:
    """The first start of Dagster's machine; `on_sleep` is done in place of waiting."""
    script = control_files()["prepare.sh"].replace("/mnt/disks/state", str(folder / "state"))
    script = script.replace("/dev/disk/by-id/google-state", str(folder / "disk"))
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("blkid", "mkfs.ext4", "mountpoint", "chown", "docker-credential-gcr", "sleep"):
        then = on_sleep if name == "sleep" else ""
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/called\n{then}\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_first_start_that_finds_no_disk_says_so_in_the_end_and_makes_nothing(
    tmp_path: Path,
) -> None:
    done = prepare(tmp_path, on_sleep="")
    assert done.returncode == 1 and "/disk is not there. Attach" in done.stderr
    assert set((tmp_path / "called").read_text().splitlines()) == {"sleep 1"}
    assert not (tmp_path / "state").exists()


def test_first_start_waits_for_its_disk_and_makes_a_password_once(tmp_path: Path) -> None:
    seen = []
    for said in ("waiting up to 300 s for the disk", ""):
        done = prepare(tmp_path, on_sleep=f"touch {tmp_path}/disk")
        assert done.returncode == 0 and done.stdout.startswith(said), done.stderr
        seen.append((tmp_path / "state" / "environment").read_text())
    assert (tmp_path / "called").read_text().count("sleep") == 1
    assert seen[0] == seen[1]
    password = re.findall(r"POSTGRES_PASSWORD=([0-9a-f]{48})\n", seen[0])
    assert len(password) == 1 and seen[0].count(password[0]) == 2
    assert (tmp_path / "state" / "environment").stat().st_mode & 0o077 == 0
    assert "mkfs" not in (tmp_path / "called").read_text()


def test_dagsters_image_has_a_projects_dagster_yaml_with_what_its_comments_offer() -> None:
    shipped = (ROOT / "dagster.yaml").read_text()
    wanted = yaml.safe_load(shipped)
    for name in ("storage", "compute_logs"):
        (line,) = re.findall(rf"^#   ({name}: .*)$", shipped, re.MULTILINE)
        wanted |= yaml.safe_load(line)
    assert yaml.safe_load((ROOT / "images/control/dagster.yaml").read_text()) == wanted


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


def test_the_lines_of_every_service_that_runs_jobs_are_kept() -> None:
    kept = resource("google_logging_project_sink", "logs")["filter"]
    for service in (BatchJobs, DataprocBatches, TpuVms, VertexCustomJobs):
        condition, value = re.findall(r"^([\w.]+)\W+([\w-]+)", service.log_filter)[0]
        assert re.search(rf'{condition}\W[^)]*"{value}\W', kept), service


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


CHECKOV = "checkov==3.3.30"


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
def test_a_scanner_of_infrastructure_finds_nothing_that_was_not_decided(tmp_path: Path) -> None:
    everything = tmp_path / "all.tfvars"
    everything.write_text('project = "p"\ncontrol = true\ninternet = true\nbilling_account = "b"\n')
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    install = f"{UV} pip install --quiet --python {tmp_path}/venv/bin/python {CHECKOV}"
    subprocess.run(["bash", "-c", install], cwd=ROOT, check=True)
    command = f"{tmp_path}/venv/bin/checkov -d infrastructure -o json --var-file {everything}"
    scanned = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    summary = json.loads(scanned.stdout)["summary"]
    assert summary["passed"] >= 35 and summary["parsing_errors"] == 0
    assert summary["failed"] == 0, scanned.stdout
