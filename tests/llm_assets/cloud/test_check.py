"""The check before money is spent: each fault names its line and its remedy."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import yaml
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.cloud.settings import (
    CLOUD_CONFIG_VARIABLE,
    BatchSettings,
    GoogleCloudSettings,
    SecretSettings,
    load_cloud_settings,
)
from llm_assets.cloud.setup.check import (
    Finding,
    Uses,
    check,
    check_compute,
    check_cost,
    check_quotas,
    needs,
    smallest_batch,
)
from llm_assets.cloud.spending import (
    DCU,
    START_HOURS,
    Spending,
    dcu_hourly,
    estimate,
    estimate_smoke,
    hourly,
    machines_without_price,
)
from llm_assets.config import CONFIG_VARIABLE
from llm_assets.platform import build_resources
from tests.conftest import Project
from tests.llm_assets.cloud.conftest import pipeline_settings
from tests.stand_ins.bigquery import fill_table, running_bigquery
from tests.stand_ins.google import (
    BUCKET,
    CUDA_IMAGE,
    PROJECT,
    SERVE_IMAGE,
    SPARK_IMAGE,
    LocalGoogle,
)
from tests.stand_ins.project import L4, cloud_settings, machine, write_cloud

METRIC = "aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_a100_gpus"
LOCAL_METRIC = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"
SERVING_METRIC = "aiplatform.googleapis.com/custom_model_serving_nvidia_l4_gpus"

BUILD_METRIC = "cloudbuild.googleapis.com/concurrent_public_pool_build_cpus"
TPU_METRIC = "aiplatform.googleapis.com/custom_model_training_tpu_v5e"
CHIPS = "tpu.googleapis.com/tpu-v5s-litepod"

PIPELINE = {
    "name": "manual",
    "platform": "google_cloud",
    "store": "gs://bucket/store",
    "raw_corpus": {"sources": [{"type": "files", "path": "gs://bucket/text"}]},
    "base_model": {"hub": "owner/name", "revision": "0" * 40},
}


@pytest.fixture
def settings(google: LocalGoogle) -> GoogleCloudSettings:
    """A project in which all is well."""
    images = (CUDA_IMAGE, SPARK_IMAGE, SERVE_IMAGE)
    google.rest.images |= {image.split("/", 1)[1] for image in images}
    google.rest.quotas |= {METRIC: 8, LOCAL_METRIC: 1, SERVING_METRIC: 2}
    google.rest.quotas[BUILD_METRIC] = 8
    google.secrets.values |= {"token": "hf_secret", "tracking": "hush-hush"}
    accelerated = {
        "secrets": {"hugging_face_token": "token", "weights_and_biases_key": "tracking"},
        "training": {"replicas": 2, "strategy": "SPOT"},
        "evaluation": L4,
        "endpoint": {},
    }
    accelerated["cost"] = {"run_limit": 50}
    google.rest.subnetworks["inside"] = True
    network = {"subnetwork": "projects/local-project/regions/us-central1/subnetworks/inside"}
    return GoogleCloudSettings.model_validate(cloud_settings(google) | accelerated | network)


def problems(settings: GoogleCloudSettings) -> list[Finding]:
    return [finding for finding in check(settings) if finding.ok is False]


def test_project_in_which_all_is_well_has_no_problem(settings: GoogleCloudSettings) -> None:
    findings = check(settings)
    assert [f for f in findings if not f.ok] == []
    assert {f.key.split(".")[0] for f in findings} == {
        *("project", "bucket", "images", "secrets", "training", "evaluation", "endpoint"),
        *("service_account", "serving_account", "batch", "subnetwork", "cost"),
    }
    assert "hf_secret" not in str(findings) and "hush-hush" not in str(findings)


Break = Callable[[LocalGoogle], object]


def denied(permission: str) -> Break:
    """Nobody has a permission."""
    return lambda google: google.iam.denied.add(permission)


def allowed(metric: str, limit: int) -> Break:
    """A quota allows so many."""
    return lambda google: google.rest.quotas.update({metric: limit})


FAULTS: dict[str, tuple[Break, str, str]] = {
    "api": (
        lambda g: g.rest.disabled.add("dataproc.googleapis.com"),
        "project",
        "gcloud services enable dataproc",
    ),
    "billing": (
        lambda g: setattr(g.rest, "billing", False),
        "project",
        "gcloud billing projects link",
    ),
    "right": (denied("aiplatform.customJobs.create"), "project", "roles/aiplatform.user"),
    "right to see what is enabled": (
        denied("serviceusage.services.list"),
        "project",
        "services:batchGet: Permission 'serviceusage.services.list' denied",
    ),
    "API that tells rights": (
        lambda g: g.server.faults.add(
            "TestIamPermissions",
            grpc.StatusCode.PERMISSION_DENIED,
            "Cloud Resource Manager API has not been used in project 1 before or it is disabled.",
        ),
        "project",
        "gcloud services enable cloudresourcemanager.googleapis.com --project=local-project",
    ),
    "right to see quotas": (
        denied("serviceusage.quotas.get"),
        "training",
        "denied on '//cloudresourcemanager.googleapis.com/projects/local-project' (or it may not "
        "exist).\nThe identity that runs Dagster lacks a right",
    ),
    "bucket's right": (
        lambda g: g.storage.denied.add("storage.objects.create"),
        "bucket",
        "roles/storage.objectUser",
    ),
    "right to run jobs as the account": (
        denied("iam.serviceAccounts.actAs"),
        "service_account",
        "roles/iam.serviceAccountUser on the account",
    ),
    "Vertex AI's right on the jobs' account": (
        denied("iam.serviceAccounts.setIamPolicy"),
        "serving_account",
        "roles/iam.serviceAccountAdmin on the account",
    ),
    "image": (lambda g: g.rest.images.clear(), "images.cuda", "images/build.sh cuda"),
    "serving image": (
        lambda g: g.rest.images.discard(SERVE_IMAGE.split("/", 1)[1]),
        "images.serve",
        "images/build.sh serve",
    ),
    "secret": (
        lambda g: g.secrets.values.clear(),
        "secrets.hugging_face_token",
        "gcloud secrets create",
    ),
    "destroyed secret": (
        lambda g: g.secrets.destroyed.add("token"),
        "secrets.hugging_face_token",
        "newest version was disabled or destroyed",
    ),
    "jobs' right to the key": (
        denied("secretmanager.versions.access"),
        "secrets.weights_and_biases_key",
        "roles/secretmanager.secretAccessor on the secret tracking",
    ),
    "destroyed key": (
        lambda g: g.secrets.destroyed.add("tracking"),
        "secrets.weights_and_biases_key",
        "newest version was disabled or destroyed",
    ),
    "quota": (allowed(METRIC, 1), "training", "allows 1"),
    "no quota at all": (allowed(METRIC, 0), "training", "allows 0 in us-central1"),
    "builds' processors": (
        allowed(BUILD_METRIC, 4),
        "images",
        "us-central1, and 8 are",
    ),
    "second version's quota": (allowed(SERVING_METRIC, 1), "endpoint", "and 2 are asked for"),
    "accelerator": (lambda g: g.rest.quotas.pop(METRIC), "training", "is not a quota"),
    "processors of a batch": (
        lambda g: g.rest.region_quotas.update(CPUS=12),
        "batch",
        "CPUS allows 12 in us-central1, 4 in use, and 12 are what a Spark batch begins with",
    ),
    "disks of a batch": (
        lambda g: g.rest.region_quotas.update(DISKS_TOTAL_GB=1000),
        "batch",
        "DISKS_TOTAL_GB allows 1000",
    ),
    "subnetwork": (lambda g: g.rest.subnetworks.clear(), "subnetwork", "there is no projects/"),
}


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "was not found"), ("{", "is not a valid json file"), ('{"type": "a"}', "type")],
)
def test_credentials_that_cannot_be_used_are_one_problem_with_the_command_to_log_in(
    settings: GoogleCloudSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    told: str,
) -> None:
    key = tmp_path / "key.json"
    if content:
        key.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    (problem,) = check(settings)
    assert problem.key == "project" and problem.ok is False
    assert told in problem.text and "gcloud auth application-default login" in problem.text
    assert "JSONDecodeError" not in problem.text


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_names_its_line_and_remedy(
    google: LocalGoogle, settings: GoogleCloudSettings, fault: str
) -> None:
    break_it, key, remedy = FAULTS[fault]
    break_it(google)
    assert remedy in " ".join(found.text for found in problems(settings) if found.key == key)


def test_programs_read_findings_and_estimates_as_json(
    google: LocalGoogle,
    settings: GoogleCloudSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud, pipeline = tmp_path / "google_cloud.yaml", tmp_path / "manual.yaml"
    cloud.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    pipeline.write_text(yaml.safe_dump(PIPELINE))
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud))
    monkeypatch.setenv(CONFIG_VARIABLE, str(pipeline))

    well = CliRunner().invoke(commands, ["check", "--json"], catch_exceptions=False)
    assert well.exit_code == 0 and json.loads(well.stdout)["ok"]
    google.rest.images.clear()
    told = CliRunner().invoke(commands, ["check", "--json"])
    wrong = [one["key"] for one in json.loads(told.stdout)["findings"] if one["ok"] is False]
    assert told.exit_code == 1 and "images.cuda" in wrong

    pipeline.write_text(yaml.safe_dump(PIPELINE | {"training": {"runner": "google_batch"}}))
    apart = CliRunner().invoke(commands, ["check"])
    assert apart.exit_code == 1 and "name one bucket in both" in str(apart.exception)
    pipeline.write_text(yaml.safe_dump(PIPELINE))

    costs = CliRunner().invoke(commands, ["estimate", "--json"], catch_exceptions=False)
    assert json.loads(costs.stdout)["stages"][1]["stage"] == "checkpoint"
    for amount in ("nan", "inf", "1e400", "0"):
        refused = CliRunner().invoke(commands, ["estimate", "--tokens", amount])
        assert refused.exit_code == 2 and "--tokens" in refused.stderr, refused.output


def test_a_column_that_a_table_of_bigquery_has_lost_is_told_before_a_run(
    google: LocalGoogle,
    settings: GoogleCloudSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = f"{PROJECT}.corpus.texts"
    source = {"type": "bigquery", "table": table, "project": PROJECT, "text_column": "body"}
    source |= {"watermark_column": "ingested_at", "export": f"gs://{BUCKET}/x"}
    cloud, pipeline = tmp_path / "google_cloud.yaml", tmp_path / "manual.yaml"
    cloud.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    pipeline.write_text(yaml.safe_dump(PIPELINE | {"raw_corpus": {"sources": [source]}}))
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud))
    monkeypatch.setenv(CONFIG_VARIABLE, str(pipeline))
    with running_bigquery(PROJECT, google.mount) as client:
        fill_table(client, table, {"a": "first"})
        told = CliRunner().invoke(commands, ["check"])
    assert told.exit_code == 1 and "Check `id_column`, `text_column`" in str(told.exception)


UNKNOWN: dict[str, tuple[Break, list[str]]] = {
    "rights": (
        lambda g: setattr(g.iam, "hidden", True),
        ["roles/iam.securityReviewer would show them, and `llm-assets check --smoke`"],
    ),
    "billing": (lambda g: setattr(g.rest, "billing", None), ["you may not see whether"]),
    "network": (
        lambda g: setattr(g.rest, "hides_network", True),
        ["compute.regions.get would show it", "compute.subnetworks.get would show it"],
    ),
    "key": (
        denied("secretmanager.versions.get"),
        ["secretmanager.versions.get would show it"],
    ),
    "private access": (
        lambda g: g.rest.subnetworks.update(inside=False),
        ["subnets update inside --region=us-central1 --enable-private"],
    ),
    "deleted objects": (
        lambda g: setattr(g.storage, "soft_delete_days", 7),
        ["keeps deleted objects for 7 days, and every checkpoint"],
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_seen_or_may_be_wanted_is_unknown_and_no_problem(
    google: LocalGoogle, settings: GoogleCloudSettings, what: str
) -> None:
    hide, told = UNKNOWN[what]
    hide(google)
    found = [finding for finding in check(settings) if not finding.ok]
    assert [finding.ok for finding in found] == [None] * len(told)
    assert all(text in finding.text for finding, text in zip(found, told, strict=True))


def test_chips_of_a_tpu_machine_are_asked_for(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    images = settings.images.model_dump() | {"tpu": CUDA_IMAGE}
    content = settings.model_dump() | {"images": images, "cost": {}}
    content["training"] = machine("ct5lp-hightpu-4t")
    on_tpus = GoogleCloudSettings.model_validate(content)
    assert "are TPU v5e offered there?" in problems(on_tpus)[0].text
    google.rest.quotas[TPU_METRIC] = 1
    assert "allows 1 in us-central1, and 4 are asked for" in problems(on_tpus)[0].text
    google.rest.quotas[TPU_METRIC] = 4
    assert problems(on_tpus) == []


PROPERTIES = {
    "spark.executor.cores": "16",
    "spark.driver.cores": "8",
    "spark.dynamicAllocation.minExecutors": "3",
    "spark.executor.instances": "5",
    "spark.dataproc.executor.compute.tier": "premium",
    "spark.dataproc.executor.disk.tier": "premium",
}


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (
            {"minimum_executors": 10, "executor_cores": 8, "compute_tier": "premium"},
            {"N2_CPUS": 84, "DISKS_TOTAL_GB": 8400},
        ),
        ({"properties": PROPERTIES}, {"CPUS": 8, "DISKS_TOTAL_GB": 800, "N2_CPUS": 80}),
    ],
)
def test_what_a_batchs_own_sizes_tiers_and_properties_come_to_is_asked_for(
    settings: GoogleCloudSettings, own: dict[str, object], wanted: dict[str, int]
) -> None:
    batch = BatchSettings.model_validate(own)
    assert smallest_batch(settings.model_copy(update={"batch": batch})) == wanted


@pytest.mark.parametrize("strategy", ["STANDARD", "FLEX_START"])
def test_machines_of_batch_are_held_against_the_quotas_of_compute_engine(
    google: LocalGoogle, settings: GoogleCloudSettings, strategy: str
) -> None:
    machines = settings.training.model_copy(update={"strategy": strategy})
    on_batch = settings.model_copy(update={"training": machines})
    bought = "PREEMPTIBLE_" if strategy == "FLEX_START" else ""
    google.rest.region_quotas |= {f"{bought}NVIDIA_A100_GPUS": 5, "NVIDIA_L4_GPUS": 5}
    (short,) = [f for f in check_compute(on_batch, Uses("google_batch")) if f.ok is False]
    assert short.key == "training"
    assert f"{bought}NVIDIA_A100_GPUS allows 5 in us-central1, 4 in use, and 2 are" in short.text
    google.rest.region_quotas |= {f"{bought}NVIDIA_A100_GPUS": 6}
    assert [f for f in check_compute(on_batch, Uses("google_batch")) if not f.ok] == []
    keys = {need.key for need in needs(on_batch, Uses("google_batch"))}
    assert keys == {"endpoint", "images"}, "Vertex AI's quotas are of no use to them"
    google.rest.region_quotas.pop("NVIDIA_L4_GPUS")
    (unknown,) = [f for f in check_compute(on_batch, Uses("google_batch")) if not f.ok]
    assert (unknown.key, unknown.ok) == ("evaluation", None)


def test_a_local_pipeline_that_trains_on_batch_needs_no_endpoint_and_no_spark_batch_there(
    google: LocalGoogle,
    settings: GoogleCloudSettings,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = {"store": f"gs://{BUCKET}/store", "training": {"runner": "google_batch"}}
    content = yaml.safe_load(project.config.read_text()) | store
    project.config.write_text(yaml.safe_dump(content))
    cloud = write_cloud(project.folder, settings.model_dump(mode="json"))
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(cloud))
    monkeypatch.setenv(CONFIG_VARIABLE, str(project.config))
    google.rest.quotas.pop(SERVING_METRIC)
    google.rest.images -= {image.split("/", 1)[1] for image in (SPARK_IMAGE, SERVE_IMAGE)}
    gpus = {"PREEMPTIBLE_NVIDIA_A100_GPUS": 9, "NVIDIA_L4_GPUS": 9}
    google.rest.region_quotas = gpus | {"CPUS": 0}

    well = CliRunner().invoke(commands, ["check", "--json"])
    told = json.loads(well.stdout)
    assert well.exit_code == 0 and told["ok"], told
    keys = {finding["key"] for finding in told["findings"]}
    assert {"training", "evaluation", "subnetwork", "images.cuda"} <= keys
    assert not {"endpoint", "batch", "images.spark", "images.serve"} & keys
    assert "documents, " in told["text"][0]

    (project.folder / "text").rename(project.folder / "gone")
    google.rest.images.clear()
    wrong = CliRunner().invoke(commands, ["check"])
    assert "matches no file" in str(wrong.exception), "what is wrong here"
    assert re.search(r"1 of \d+ checks failed", str(wrong.exception)), "and there"


def test_tpu_machines_of_your_own_are_held_against_the_quotas_of_cloud_tpu(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    content = settings.model_dump() | {"images": settings.images.model_dump() | {"tpu": CUDA_IMAGE}}
    own = {"zones": ["us-central1-a"], "strategy": "SPOT"}
    content |= {"training": machine("ct5lp-hightpu-8t") | own, "cost": {}}
    on_tpus = GoogleCloudSettings.model_validate(content)

    def told() -> list[Finding]:
        return [f for f in check_quotas(on_tpus, Uses("tpu_vm")) if f.key == "training"]

    assert [(f.ok, "are TPU v5e offered there?" in f.text) for f in told()] == [(None, True)]
    google.rest.quotas |= {CHIPS: 32, f"{CHIPS}-preemptible": 4}
    (short,) = told()
    assert short.ok is False and "preemptible allows 4 in us-central1-a, and 8 are" in short.text
    google.rest.quotas |= {f"{CHIPS}-serving-preemptible": 8}
    assert [f.ok for f in told()] == [True]

    content["training"] |= {"machine_type": "ct6e-standard-8t"}
    on_tpus = GoogleCloudSettings.model_validate(content)
    (unknown,) = told()
    assert unknown.ok is None, "quotas of v5e say nothing of v6e"
    assert "8 chips are asked for" in unknown.text and "TPU v6e" in unknown.text


def test_most_that_a_run_can_cost_is_said(settings: GoogleCloudSettings) -> None:
    def cost(**changes: object) -> list[tuple[bool | None, str]]:
        content = settings.model_dump() | changes
        found = check_cost(GoogleCloudSettings.model_validate(content), Uses())
        return [(f.ok, f.text) for f in found]

    ((ok, text),) = cost()
    assert ok and "at most about 50.00 USD" in text
    ((ok, text),) = cost(cost={}, restarts=1, batch={"maximum_executors": 20})
    # 16 units of 12 processors become those of 84, for 24 hours.
    assert ok is None and "a Spark batch costs at most about 161.28 USD" in text
    # Two spot machines at 4.22 USD, 72 hours, two starts; one at 0.98.
    assert "the training at most about 486.14 USD" in text
    assert "the evaluation at most about 141.12 USD" in text
    twenty = {"minimum_executors": 20, "maximum_executors": 20}
    ((_, text),) = cost(cost={}, batch=twenty)
    assert "a Spark batch costs at most about 161.28 USD" in text, "whatever it begins with"
    ((_, text),) = cost(cost={}, batch=twenty | {"compute_tier": "premium"})
    assert "a Spark batch costs at most about 239.23 USD" in text, "at 0.089 USD a unit"
    batch = settings.model_copy(update={"batch": BatchSettings.model_validate(twenty)})
    assert estimate_smoke(batch)[0].dollars == pytest.approx(161.28 * START_HOURS / 24)
    ((_, text),) = cost(cost={})
    assert "no `batch.maximum_executors` bounds a Spark batch" in text


def test_price_that_a_ceiling_needs_is_asked_for_before_anything_starts(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    added = machine("n1-standard-8", "NVIDIA_TESLA_V100", 8)
    content = settings.model_dump() | {"training": added}
    without = GoogleCloudSettings.model_validate(content)
    told = [f for f in check_cost(without, Uses()) if f.ok is False]
    assert [f.text.rpartition("`cost: ")[2] for f in told] == ["{prices: {n1-standard-8: ...}}`"]
    spark = Spending(without, DCU, dcu_hourly(without), 16, "run-1")
    with pytest.raises(UserError, match="the price of n1-standard-8 is not known"):
        spark.check_before()
    # Unless these machines are not those that train.
    runner = build_resources(pipeline_settings(training={"runner": "local"}), "split.yaml")["spark"]
    assert all(f.ok is not False for f in check_cost(without, Uses(runner.training)))
    dataclasses.replace(spark, training=runner.training).check_before()
    # Machines may be free, such as of a grant.
    for price in (20.4, 0):
        content |= {"cost": {"run_limit": 50, "prices": {"n1-standard-8": price}}}
        priced = GoogleCloudSettings.model_validate(content)
        assert hourly(priced, priced.training) == price
        assert [f.ok for f in check_cost(priced, Uses())] == [True]
        Spending(priced, DCU, dcu_hourly(priced), 16, "run-1").check_before()


def test_reports_without_a_key_are_a_problem(settings: GoogleCloudSettings) -> None:
    without = settings.model_copy(update={"secrets": SecretSettings()})
    (told,) = [f for f in check(without, Uses(tracking=True)) if f.ok is False]
    assert told.key == "secrets.weights_and_biases_key"
    assert "`checkpoint.logging.weights_and_biases` is set" in told.text


def test_rights_of_bigquery_are_asked_for_only_where_it_is_read(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    google.iam.denied.add("bigquery.jobs.create")
    assert [f for f in check(settings, Uses(bigquery=False)) if not f.ok] == []
    (problem,) = problems(settings)
    assert "roles/bigquery.jobUser" in problem.text


def test_missing_bucket_is_told_with_the_command_and_hides_no_other_right(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    google.iam.denied.add("iam.serviceAccounts.actAs")
    without = problems(settings.model_copy(update={"bucket": "no-such-bucket"}))
    assert [f.key for f in without] == ["bucket", "service_account", "serving_account", "bucket"]
    assert "the rights on gs://no-such-bucket cannot be seen" in without[0].text
    create = "gcloud storage buckets create gs://no-such-bucket --location=us-central1"
    assert create in without[-1].text


def test_region_that_is_not_there_is_a_problem(settings: GoogleCloudSettings) -> None:
    found = problems(settings.model_copy(update={"region": "us-cental1"}))
    (told,) = [finding.text for finding in found if finding.key == "batch"]
    assert "regions/us-cental1" in told and "Check the names in the message" in told


@pytest.mark.parametrize(
    ("location", "regions", "region", "ok"),
    [
        ("US", (), "us-central1", True),
        ("EU", (), "europe-west4", True),
        ("EU", (), "us-central1", False),
        ("EU", (), "europe-west2", False),
        ("US-CENTRAL1", (), "europe-west4", False),
        ("EU", ("EUROPE-WEST1", "EUROPE-WEST4"), "europe-west4", True),
        ("US", ("US-EAST1", "US-WEST1"), "us-central1", False),
        ("EUR4", (), "europe-west4", None),
    ],
)
def test_bucket_of_several_regions_is_near_the_jobs_in_one_of_them(
    google: LocalGoogle,
    settings: GoogleCloudSettings,
    location: str,
    regions: tuple[str, ...],
    region: str,
    ok: bool | None,
) -> None:
    is_dual = bool(regions) or location == "EUR4"
    kind = "dual-region" if is_dual else "multi-region"
    google.storage.policies = {"location": location, "locationType": kind}
    if regions:
        google.storage.policies["customPlacementConfig"] = {"dataLocations": regions}
    findings = check(settings.model_copy(update={"region": region}))
    (found,) = [f for f in findings if re.search(rf"gs://{BUCKET} is in ", f.text)]
    assert found.ok is ok and found.key == ("bucket" if ok else "region"), found


def test_image_with_a_tag_and_a_digest_is_looked_for_by_its_digest(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    name, _, _ = CUDA_IMAGE.rpartition(":")
    digest = f"sha256:{'0' * 64}"
    google.rest.images.add(f"{name.split('/', 1)[1]}:{digest}")
    images = settings.images.model_copy(update={"cuda": f"{CUDA_IMAGE}@{digest}"})
    assert problems(settings.model_copy(update={"images": images})) == []


@pytest.mark.parametrize("host", ["ghcr.io", "evilgcr.io", "evilpkg.dev"])
def test_image_of_another_registry_is_not_asked_for_with_a_token_of_googles(
    settings: GoogleCloudSettings, host: str
) -> None:
    images = settings.images.model_copy(update={"serve": f"{host}/ours/server:3"})
    found = check(settings.model_copy(update={"images": images}))
    assert [(f.key, f.ok) for f in found if not f.ok] == [("images.serve", None)]


@pytest.mark.parametrize(
    "account", ["123-compute@developer.gserviceaccount.com", "p@appspot.gserviceaccount.com"]
)
def test_googles_default_accounts_are_accounts(settings: GoogleCloudSettings, account: str) -> None:
    names = dict.fromkeys(("service_account", "serving_account", "builder_account"), account)
    assert GoogleCloudSettings.model_validate(settings.model_dump() | names)


def test_bucket_in_which_nothing_can_be_replaced_is_a_problem_and_old_versions_are_told(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    google.storage.policies = {
        "retentionPolicy": {"retentionPeriod": "86400"},
        "versioning": {"enabled": True},
    }
    (retained,) = [f for f in check(settings) if not f.ok and f.ok is not None]
    assert retained.key == "bucket" and "for 86400 s no object can be replaced" in retained.text
    assert "--clear-retention-period" in retained.text
    (versions,) = [f for f in check(settings) if f.ok is None]
    assert "keeps old versions" in versions.text and "--no-versioning" in versions.text


def test_shipped_file_has_ceilings_and_prices_for_them_and_is_estimated() -> None:
    settings = load_cloud_settings()
    assert (
        settings.cost.run_limit
        and settings.cost.monthly_limit
        and not machines_without_price(settings)
    )
    assert settings.batch.most_executors
    stages = estimate(settings, 10**9, 10**9, 1_235_814_400)
    training = next(stage for stage in stages if stage.stage == "checkpoint")
    assert 5 < training.hours < 20
    assert training.dollars is not None and 10 < training.dollars < 100
    assert stages[-1].line() == "endpoint, a month of it: about 730.0 h, 715.40 USD"


def test_estimate_scales_with_tokens_and_machines() -> None:
    settings = load_cloud_settings()
    one, two = (estimate(settings, 10**9, n * 10**10, 10**9)[1] for n in (1, 2))
    assert two.hours == pytest.approx(2 * one.hours, rel=0.05)
    more = settings.training.model_copy(update={"replicas": settings.training.replicas * 2})
    faster = estimate(settings.model_copy(update={"training": more}), 10**9, 10**10, 10**9)[1]
    assert faster.hours == pytest.approx(one.hours / 2, rel=0.05)
