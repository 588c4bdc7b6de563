"""The jobs that the settings make, on machines of every kind that Vertex AI has."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import build_asset_context
from google.api_core.exceptions import PermissionDenied
from google.cloud import aiplatform_v1, batch_v1, tpu_v2
from google.cloud.batch_v1 import Job
from pydantic import ValidationError

from artifacts.errors import UserError
from llm_assets.cloud.jobs import DRIVERS, batch_job, custom_job, spark_batch, tpu_job
from llm_assets.cloud.settings import (
    ACCELERATORS,
    BUILT_IN,
    TPU_MACHINES,
    BatchSettings,
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
)
from llm_assets.cloud.setup.check import Uses, needs
from llm_assets.cloud.spending import START_HOURS, UTILIZATION, estimate_training, hourly
from llm_assets.config import load_settings
from llm_assets.pipes.failures import JobService, failure_of
from llm_assets.runners.google_cloud import (
    TpuVmTrainingRunner,
    VertexTrainingRunner,
    job_limits,
)
from recipes.settings import training_settings
from recipes.spec import TrainingSpec
from tests.recipes.conftest import settings_of
from tests.stand_ins.google import LocalGoogle
from tests.stand_ins.job_rules import (
    ATTACHED,
    check_job,
    check_machines_job,
    check_queued_resource,
)
from tests.stand_ins.project import cloud_settings, machine, write_cloud

REGION = "regions/us-central1"
# Quota names as the page "Vertex AI quotas and limits" and its API write them.
QUOTAS = {
    "NVIDIA_TESLA_A100": "custom_model_training_nvidia_a100_gpus",
    "NVIDIA_A100_80GB": "custom_model_training_nvidia_a100_80gb_gpus",
    "NVIDIA_H100_80GB": "custom_model_training_nvidia_h100_gpus",
    "NVIDIA_H100_MEGA_80GB": "custom_model_training_nvidia_h100_mega_gpus",
    "NVIDIA_H200_141GB": "custom_model_training_nvidia_h200_gpus",
    "NVIDIA_L4": "custom_model_training_nvidia_l4_gpus",
    "NVIDIA_RTX_PRO_6000": "custom_model_training_nvidia_rtx_pro_6000_gpus",
    "NVIDIA_B200": "custom_model_training_nvidia_b200_gpus",
    "NVIDIA_GB200": "custom_model_training_nvidia_gb200_gpus",
}


@pytest.mark.parametrize("subnetwork", ["inside", f"projects/other/{REGION}/subnetworks/inside"])
def test_machines_of_batch_in_a_named_subnetwork_have_no_external_addresses(
    settings: GoogleCloudSettings, subnetwork: str
) -> None:
    inside = settings.model_copy(update={"subnetwork": subnetwork})
    policy = Job(batch_job(inside, inside.training, [], "gs://b/o")).allocation_policy
    (interface,) = policy.network.network_interfaces
    assert interface.no_external_ip_address
    project = "other" if "other" in subnetwork else "local-project"
    assert interface.subnetwork == f"projects/{project}/{REGION}/subnetworks/inside"
    plain = Job(batch_job(settings, settings.training, [], "gs://b/o")).allocation_policy
    assert not plain.network.network_interfaces


@pytest.mark.parametrize("machine_type", ATTACHED)
def test_every_machine_gets_a_disk_and_a_quota_that_exist(
    settings: GoogleCloudSettings, machine_type: str
) -> None:
    accelerator, count = ATTACHED[machine_type]
    described = machine(machine_type, accelerator, count)
    machines = MachineSettings.model_validate(described | {"replicas": 3, "boot_disk_gb": 500})
    job = aiplatform_v1.CustomJob(custom_job(settings, machines, [], "gs://local-bucket/output"))
    check_job(job)
    assert {pool.disk_spec.boot_disk_size_gb for pool in job.job_spec.worker_pool_specs} == {500}
    training = next(iter(needs(settings.model_copy(update={"training": machines}), Uses())))
    assert training.metric == f"aiplatform.googleapis.com/{QUOTAS[accelerator]}"
    assert training.number == 3 * count


ATTACHED_GPUS = ("n1-standard-8", "NVIDIA_TESLA_T4", 2)
BUILT_IN_GPUS = ("g2-standard-24", "NVIDIA_L4", 2)
NO_GPUS = ("n1-standard-4", None, 0)
NO_PERSISTENT_DISK = ("n4-standard-8", None, 0)


@pytest.mark.parametrize("strategy", ["STANDARD", "SPOT", "FLEX_START"])
@pytest.mark.parametrize(
    ("given", "attached"),
    [
        (ATTACHED_GPUS, [("nvidia-tesla-t4", 2)]),
        (BUILT_IN_GPUS, []),
        (NO_GPUS, []),
        (NO_PERSISTENT_DISK, []),
    ],
    ids=["attached", "built in", "none", "of a newer family"],
)
@pytest.mark.parametrize("zones", [(), ("us-central1-a", "us-central1-c")], ids=["all", "two"])
def test_a_machine_of_batch_gets_its_gpus_their_drivers_and_its_zones(
    settings: GoogleCloudSettings,
    given: tuple[str, str | None, int],
    attached: list[tuple[str, int]],
    zones: tuple[str, ...],
    strategy: str,
) -> None:
    asked = {"strategy": strategy, "zones": zones, "replicas": 2}
    machines = MachineSettings.model_validate(machine(*given) | asked)
    job = batch_v1.Job(batch_job(settings, machines, ["--spec", "s"], "gs://b/output"))
    parent = settings.parent
    check_machines_job(batch_v1.CreateJobRequest(parent=parent, job_id="a", job=job))
    allocation, (group,) = job.allocation_policy, job.task_groups
    (instance,) = allocation.instances
    policy = instance.policy
    assert (policy.machine_type, policy.provisioning_model.name) == (given[0], strategy)
    assert [(added.type_, added.count) for added in policy.accelerators] == attached
    places = [f"zones/{zone}" for zone in zones] or ["regions/us-central1"]
    assert list(allocation.location.allowed_locations) == places
    container = group.task_spec.runnables[0].container
    drivers = [volume for volume in container.volumes if volume in DRIVERS]
    with_gpus = given[1] is not None
    assert drivers == (list(DRIVERS) if with_gpus else [])
    assert ("--privileged" in container.options.split()) == with_gpus
    assert instance.install_gpu_drivers == with_gpus
    assert group.task_count == group.parallelism == 2 and group.require_hosts_file


OUTDATED = {"NVIDIA_TESLA_K80", "NVIDIA_TESLA_P4"}
"""Accelerators for which PyTorch is no longer built, or with too little memory to train."""


def test_every_accelerator_of_vertex_ai_is_known_or_left_out_by_name() -> None:
    offered = {one.name for one in aiplatform_v1.AcceleratorType if one.name.startswith("NVIDIA_")}
    assert offered == ACCELERATORS.keys() | OUTDATED
    assert BUILT_IN.keys() == ATTACHED.keys()


@pytest.mark.parametrize("accelerator", ["NVIDIA_B200", "NVIDIA_GB200", "NVIDIA_RTX_PRO_6000"])
def test_newest_accelerators_train_in_bfloat16(
    google: LocalGoogle, tmp_path: Path, accelerator: str
) -> None:
    name = next(name for name, (kind, _) in BUILT_IN.items() if kind == accelerator)
    given = cloud_settings(google) | {"training": machine(name, *BUILT_IN[name])}
    path = write_cloud(tmp_path, given)
    assert VertexTrainingRunner(cloud_config_path=str(path)).precision() == "bfloat16"


@pytest.mark.fault(
    "Google Cloud",
    "a machine type and accelerators that do not fit together",
    sees="what the machine type has, or which machines fit",
    then="nothing is started",
)
@pytest.mark.parametrize(
    ("described", "told"),
    [
        (("a2-highgpu-1g", "NVIDIA_L4", 1), "a2-highgpu-1g comes with 1 NVIDIA_TESLA_A100"),
        (("a2-highgpu-1g", "NVIDIA_TESLA_A100", 3), "and accelerator_count to 1"),
        (("a2-highgpu-3g",), "is not one of the machine types with accelerators: a2-h"),
        (("a3-highgpu-3g", "NVIDIA_H100_80GB", 3), "is not one of the machine types with acc"),
        (("n2-standard-8", "NVIDIA_L4", 1), "have to be null and 0"),
        (("n2-standard-8", "NVIDIA_TESLA_T4", 1), "which comes with n1 machines"),
        (("n1-standard-8", "NVIDIA_TESLA_T4", 3), "_T4 and 4, not NVIDIA_TESLA_T4 and 3"),
        (("g2-standard-8",), "comes with 1 NVIDIA_L4"),
    ],
)
def test_a_machine_that_vertex_ai_does_not_have_is_refused(
    described: tuple[Any, ...], told: str
) -> None:
    for kind in (MachineSettings, EndpointMachineSettings):
        with pytest.raises(ValidationError, match=told):
            kind.model_validate(machine(*described))


def test_a_flex_start_job_waits_as_long_as_it_asked_for(settings: GoogleCloudSettings) -> None:
    queued = MachineSettings(strategy="FLEX_START", max_wait_hours=48)
    at_once = MachineSettings(strategy="SPOT", max_wait_hours=48)
    assert settings.pending_hours == 6
    assert job_limits(settings, queued).pending_seconds == 54 * 3600
    assert job_limits(settings, at_once).pending_seconds == 6 * 3600


def test_account_that_the_caller_may_not_act_as_is_told_with_its_role(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    google.iam.denied.add("iam.serviceAccounts.actAs")
    client = aiplatform_v1.JobServiceClient(client_options={"api_endpoint": google.endpoint})
    job = custom_job(settings, settings.training, [], "gs://local-bucket/jobs/output")
    with pytest.raises(PermissionDenied, match="act as service_account") as raised:
        client.create_custom_job(parent=settings.parent, custom_job=job)
    place = JobService(
        "Vertex AI", "aiplatform.googleapis.com", "role", "local-project", "us-central1"
    )
    text = failure_of(raised.value, "submitting", place).description or ""
    assert "roles/iam.serviceAccountUser on the job's service account" in text


def test_job_names_a_secret_and_does_not_hold_it(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    google.secrets.values["wandb-key"] = "hush-hush"
    secrets = settings.secrets.model_copy(update={"weights_and_biases_key": "wandb-key"})
    settings = settings.model_copy(update={"secrets": secrets})
    job = str(custom_job(settings, settings.training, [], "gs://local-bucket/jobs/output"))
    assert "SECRET_WANDB_API_KEY" in job and "secrets/wandb-key/versions/latest" in job
    assert "hush-hush" not in job


ALLOCATION = "spark.dynamicAllocation"


def test_settings_of_a_batch_are_sparks_properties(settings: GoogleCloudSettings) -> None:
    batch = BatchSettings(
        minimum_executors=4,
        maximum_executors=200,
        scale_up_ratio=0.5,
        time_to_live_hours=2,
        executor_cores=8,
        compute_tier="premium",
        shuffle_tier="premium",
        properties={"spark.executor.memory": "24g"},
    )
    made = spark_batch(settings.model_copy(update={"batch": batch}), "gs://b/main.py", [])
    assert made["runtime_config"]["properties"] == {
        f"{ALLOCATION}.minExecutors": "4",
        f"{ALLOCATION}.maxExecutors": "200",
        f"{ALLOCATION}.executorAllocationRatio": "0.5",
        "spark.executor.cores": "8",
        "spark.dataproc.driver.compute.tier": "premium",
        "spark.dataproc.executor.compute.tier": "premium",
        "spark.dataproc.driver.disk.tier": "premium",
        "spark.dataproc.executor.disk.tier": "premium",
        "spark.executor.memory": "24g",
    }
    assert made["environment_config"]["execution_config"]["ttl"] == {"seconds": 2 * 3600}
    assert BatchSettings().spark_properties() == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minimum_executors": 5, "maximum_executors": 4}, "smaller than minimum_executors"),
        ({"shuffle_tier": "premium"}, "set `compute_tier: premium`"),
        ({"minimum_executors": 1}, "greater than or equal to 2"),
        ({"runtime_version": "2.2"}, "the stages run on 2.3"),
        ({"runtime_version": "3.0"}, "the stages run on 2.3"),
        # What a batch costs is reckoned from these.
        ({"properties": {"spark.driver.cores": "four"}}, "under `properties` is four"),
        ({"properties": {f"{ALLOCATION}.maxExecutors": "four"}}, "under `properties` is four"),
    ],
)
def test_settings_of_a_batch_that_cannot_be_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BatchSettings.model_validate(given)
    assert BatchSettings(runtime_version="2.3.15")


def test_evaluation_on_more_than_one_machine_is_refused(google: LocalGoogle) -> None:
    content = cloud_settings(google)
    content["evaluation"] = content["evaluation"] | {"replicas": 2}
    with pytest.raises(ValueError, match=r"evaluation\n.*the evaluation runs on one machine"):
        GoogleCloudSettings.model_validate(content)


TPU = {"accelerator_type": None, "accelerator_count": 0}


def tpu_settings(google: LocalGoogle, **training: Any) -> dict[str, Any]:
    """A cloud project's file whose training has a TPU machine of its own."""
    given = cloud_settings(google)
    given["training"] = machine("ct5lp-hightpu-4t") | {"zones": ["us-central1-a"]} | training
    given["images"] |= {"tpu": "somewhere/tpu:1"}
    return given


@pytest.mark.parametrize("machine_type", TPU_MACHINES)
def test_a_machine_with_tpus_gets_its_topology_and_its_image(
    google: LocalGoogle, machine_type: str
) -> None:
    given = tpu_settings(google, machine_type=machine_type)
    settings = GoogleCloudSettings.model_validate(given)
    del given["images"]["tpu"]
    with pytest.raises(ValidationError, match=r"images\.tpu is missing: images/build\.sh tpu"):
        GoogleCloudSettings.model_validate(given)

    job = aiplatform_v1.CustomJob(custom_job(settings, settings.training, [], "gs://b/output"))

    check_job(job)
    (pool,) = job.job_spec.worker_pool_specs
    assert pool.container_spec.image_uri == "somewhere/tpu:1"
    chips = int(machine_type.rpartition("-")[2].removesuffix("t"))
    one = estimate_training(settings, 10**12, 10**9).hours - START_HOURS
    peak = 197e12 if machine_type.startswith("ct5lp") else 918e12
    assert one * chips == pytest.approx(6e21 / (peak * UTILIZATION) / 3600)
    assert hourly(settings, settings.training) is not None, "so that `cost` limits take it"
    queued = tpu_job(settings, settings.training, [], "gs://b/output")["queued_resource"]
    place = f"{settings.parent}-a"
    queued["tpu"]["node_spec"][0] |= {"parent": place, "node_id": "a"}
    request = {"parent": place, "queued_resource_id": "a", "queued_resource": queued}
    check_queued_resource(tpu_v2.CreateQueuedResourceRequest(request))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"accelerator_type": "NVIDIA_L4", "accelerator_count": 1}, "have to be null and 0"),
        (TPU | {"replicas": 2}, "TPUs train on one machine"),
        (TPU | {"machine_type": "ct5p-hightpu-4t"}, "is not one of ct5lp-hightpu-1t"),
        (TPU | {"reservation": "mine", "strategy": "SPOT"}, "`strategy: STANDARD`"),
        (TPU | {"reservation": "mine", "machine_type": "n1-standard-4"}, "with TPUs"),
    ],
)
def test_what_does_not_fit_a_machine_with_tpus_is_refused(
    changed: dict[str, object], named: str
) -> None:
    with pytest.raises(ValidationError, match=named):
        MachineSettings.model_validate({"machine_type": "ct5lp-hightpu-4t"} | changed)


@pytest.mark.parametrize(
    ("machine_type", "device", "told"),
    [
        ("n1-standard-4", "tpu", "which has no TPUs. Set `device` to auto"),
        ("ct5lp-hightpu-4t", "auto", "which has TPUs. Set `device` to tpu"),
    ],
)
def test_training_on_another_device_than_the_machine_has_is_refused(
    google: LocalGoogle, tmp_path: Path, machine_type: str, device: str, told: str
) -> None:
    path = write_cloud(tmp_path, tpu_settings(google, machine_type=machine_type))
    with pytest.raises(UserError, match=told):
        VertexTrainingRunner(cloud_config_path=str(path)).resolve(settings_of(device=device))


@pytest.mark.parametrize(
    ("training", "tier", "reservation"),
    [
        ({"strategy": "SPOT"}, "spot", ""),
        ({"strategy": "STANDARD"}, None, ""),
        ({"reservation": "mine"}, "guaranteed", "/us-central1-a/reservations/mine"),
    ],
)
def test_a_queued_resource_asks_for_one_machine_in_one_zone_and_not_for_ever(
    google: LocalGoogle, training: dict[str, Any], tier: str | None, reservation: str
) -> None:
    given = tpu_settings(google, **training) | {"pending_hours": 2.0}
    settings = GoogleCloudSettings.model_validate(given)
    job = tpu_job(settings, settings.training, ["--spec", "s"], "gs://b/output")
    resource = tpu_v2.QueuedResource(job["queued_resource"])
    assert tpu_v2.QueuedResource.pb(resource).WhichOneof("tier") == tier
    place = "projects/local-project/locations"
    assert resource.reservation_name == (reservation and f"{place}{reservation}")
    (spec,) = resource.tpu.node_spec
    assert spec.node.accelerator_type == "v5litepod-4"
    assert resource.queueing_policy.valid_until_duration.total_seconds() == 7200
    container = job["container"]
    assert (container["image"], container["seconds"]) == ("somewhere/tpu:1", 72 * 3600)
    assert container["environment"]["JOB_LEASE"] == "gs://b/output.lease"


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"zones": []}, r"`training\.zones` in .* names 0\. Name one that has v5litepod-4"),
        ({"zones": ["us-central1-a", "us-central1-b"]}, "names 2"),
        ({"strategy": "FLEX_START"}, "is FLEX_START. Set it to SPOT or STANDARD"),
        ({"machine_type": "n1-standard-4"}, "trains on TPUs alone"),
    ],
)
def test_a_tpu_machine_that_cannot_be_asked_for_is_refused_before_anything_is_made(
    google: LocalGoogle, tmp_path: Path, training: dict[str, Any], told: str
) -> None:
    path = write_cloud(tmp_path, tpu_settings(google, **training))
    device = "auto" if "machine_type" in training else "tpu"
    with pytest.raises(UserError, match=told):
        TpuVmTrainingRunner(cloud_config_path=str(path)).resolve(settings_of(device=device))
    assert google.tpu.jobs() == []


@pytest.mark.parametrize("name", ["tpu_gpt2_124m_from_scratch", "tpu_gsm8k_lora", "tpu_alpaca"])
def test_a_shipped_file_for_tpus_goes_with_the_machine_that_it_asks_for(
    google: LocalGoogle, tmp_path: Path, name: str
) -> None:
    shipped = Path("config") / f"{name}.yaml"
    header = [line[2:] for line in shipped.read_text().splitlines() if line.startswith("#   ")]
    asked = yaml.safe_load("\n".join(header))
    path = write_cloud(tmp_path, tpu_settings(google, **asked["training"]))
    settings = load_settings(shipped)
    assert settings.training.runner == "tpu_vm"
    runner = TpuVmTrainingRunner(cloud_config_path=str(path))
    resolved = runner.resolve(settings.checkpoint)
    assert resolved.precision == "bfloat16" and resolved.placement.world_size == 1
    rows = (
        resolved.placement.device_batch_size * TPU_MACHINES[asked["training"]["machine_type"]].chips
    )
    assert resolved.budget.global_batch_size % rows == 0, "no chip waits in a step"
    told = runner.estimate(10**9, 10**9)
    assert told is not None and "USD" in told


@pytest.mark.fault(
    "Google Cloud",
    "a model that does not fit the chips of a TPU machine",
    sees="how much memory it needs, how much there is, and the machines that it fits",
    then="no machine is requested",
)
@pytest.mark.parametrize(
    ("machine_type", "parameters", "lora", "told"),
    [
        (
            "ct5lp-hightpu-1t",
            1_235_814_400,
            None,
            r"take 19\.8 GB.* to one of ct5lp-hightpu-4t, ct",
        ),
        ("ct5lp-hightpu-1t", 1_235_814_400, {"rank": 8}, None),
        ("ct5lp-hightpu-4t", 1_235_814_400, None, None),
        ("ct6e-standard-8t", 70_553_706_496, None, "Train it on GPUs, or choose a smaller"),
    ],
)
def test_a_model_that_cannot_fit_a_tpu_machine_is_refused_before_it_is_paid_for(
    google: LocalGoogle,
    tmp_path: Path,
    machine_type: str,
    parameters: int,
    lora: dict[str, int] | None,
    told: str | None,
) -> None:
    path = write_cloud(tmp_path, tpu_settings(google, machine_type=machine_type))
    runner = TpuVmTrainingRunner(cloud_config_path=str(path))
    training = training_settings({"placement": {"device": "tpu"}, "lora": lora})
    refused = pytest.raises(UserError, match=told) if told else nullcontext()
    with refused:
        runner.check_state(training, parameters)


TORCHTUNE = {
    "recipe": "torchtune",
    "run": "full_finetune_distributed",
    "config": "llama3_2/1B_full",
    "overrides": {"optimizer_in_bwd": False},
}


@pytest.fixture
def sixteen(google: LocalGoogle, tmp_path: Path) -> VertexTrainingRunner:
    """Trains on two machines of eight accelerators each."""
    given = cloud_settings(google)
    given["training"] = machine("a3-highgpu-8g", "NVIDIA_H100_80GB", 8) | {"replicas": 2}
    path = write_cloud(tmp_path, given)
    return VertexTrainingRunner(cloud_config_path=str(path))


def test_a_run_is_planned_for_every_accelerator_of_every_machine(
    sixteen: VertexTrainingRunner,
) -> None:
    assert sixteen.place(settings_of()).placement.world_size == 16
    asked = training_settings(TORCHTUNE)
    rows = asked.budget.global_batch_size
    assert sixteen.place(asked).budget.global_batch_size == 16 * rows


@pytest.mark.fault(
    "Google Cloud",
    "settings planned for another number of training processes than the job starts",
    sees="both numbers, and what to change",
    then="no job is started",
)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"placement": {"workers": 8}}, r"is 8, but a job starts 16 processes: one for each of 8"),
        (
            TORCHTUNE | {"run": "full_finetune_single_device", "overrides": {"compile": False}},
            r"16 processes train .* Set `run: full_finetune_distributed`",
        ),
    ],
    ids=["workers", "one device"],
)
def test_another_number_of_processes_than_a_job_starts_is_refused(
    sixteen: VertexTrainingRunner, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        sixteen.place(training_settings(given))


def test_a_run_that_is_made_once_more_is_refused_on_machines_that_would_take_other_rows(
    sixteen: VertexTrainingRunner,
) -> None:
    spec = TrainingSpec.model_construct(
        run_folder="run", training=training_settings(TORCHTUNE).placed(8)
    )
    with pytest.raises(UserError, match=r"planned for 8 .* but a job starts 16, with which a step"):
        sixteen.train(build_asset_context(), spec)
