"""`config/google_cloud.yaml`: the cloud project, shared by all pipelines that run in it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from artifacts.settings import Settings
from llm_assets.settings_file import read_settings_file

# From the page "Configure compute resources for training" and the vendors' data sheets.
TPU_FAMILIES = ("cloud-tpu", "ct")
"""Prefixes of machine types with TPUs."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, by its vendor's data sheet."""

    teraflops: float
    """Peak of dense bfloat16; of half precision where `bfloat16` is false."""
    gigabytes: float
    """Memory that programs see, in GiB, rounded down."""
    bfloat16: bool = True
    """Whether its units multiply bfloat16."""


ACCELERATORS = {
    "NVIDIA_TESLA_P100": Accelerator(18.7, 15.5, bfloat16=False),
    "NVIDIA_TESLA_V100": Accelerator(112, 15.5, bfloat16=False),
    "NVIDIA_TESLA_T4": Accelerator(65, 14.5, bfloat16=False),
    "NVIDIA_L4": Accelerator(121, 22),
    "NVIDIA_TESLA_A100": Accelerator(312, 39),
    "NVIDIA_A100_80GB": Accelerator(312, 79),
    "NVIDIA_H100_80GB": Accelerator(989, 79),
    "NVIDIA_H100_MEGA_80GB": Accelerator(989, 79),
    "NVIDIA_H200_141GB": Accelerator(989, 139),
    "NVIDIA_RTX_PRO_6000": Accelerator(503, 94),
    "NVIDIA_B200": Accelerator(2_250, 178),
    "NVIDIA_GB200": Accelerator(2_500, 184),
}
BUILT_IN = {
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g2-standard-{cores}": ("NVIDIA_L4", 1) for cores in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("NVIDIA_L4", 2),
    "g2-standard-48": ("NVIDIA_L4", 4),
    "g2-standard-96": ("NVIDIA_L4", 8),
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
"""Machine types that have accelerators of their own: kind and number."""
ADDED = {
    "NVIDIA_TESLA_P100": (1, 2, 4),
    "NVIDIA_TESLA_V100": (1, 2, 4, 8),
    "NVIDIA_TESLA_T4": (1, 2, 4),
}
"""Accelerators that are added to a machine of the family n1, and how many."""
FAMILIES_WITH_ACCELERATORS = re.compile(r"(a\d+x?|g\d+)-")
"""A machine type of these families that is not in the list is misspelled, or newer than it."""


@dataclass(frozen=True)
class TpuGeneration:
    """What chips of one kind have in common, by Google's pages "TPU v5e" and "TPU v6e"."""

    name: str
    """As Google's quotas have it."""
    runtime_version: str
    """What Cloud TPU boots its machines with (page "TPU software versions")."""
    teraflops: float
    """Peak of one chip in bfloat16."""
    gigabytes: float
    """Memory of one chip."""
    quotas: str | None
    """What the names of Cloud TPU's quotas for it begin with, some of which are for serving; None
    where they are not known."""


@dataclass(frozen=True)
class TpuMachine:
    """One machine with TPU chips, which its type alone describes."""

    chips: int
    topology: str
    """How they are wired, as Vertex AI names it."""
    accelerator_type: str
    """The machine, as Cloud TPU names it."""
    generation: TpuGeneration


V5E = TpuGeneration("v5e", "v2-alpha-tpuv5-lite", 197, 16, "tpu.googleapis.com/tpu-v5s-litepod")
V6E = TpuGeneration("v6e", "v2-alpha-tpuv6e", 918, 32, None)


TPU_MACHINES = {
    "ct5lp-hightpu-1t": TpuMachine(1, "1x1", "v5litepod-1", V5E),
    "ct5lp-hightpu-4t": TpuMachine(4, "2x2", "v5litepod-4", V5E),
    "ct5lp-hightpu-8t": TpuMachine(8, "2x4", "v5litepod-8", V5E),
    "ct6e-standard-1t": TpuMachine(1, "1x1", "v6e-1", V6E),
    "ct6e-standard-4t": TpuMachine(4, "2x2", "v6e-4", V6E),
    "ct6e-standard-8t": TpuMachine(8, "2x4", "v6e-8", V6E),
}
"""Single machines with TPUs, by type."""


def check_accelerator(machine_type: str, accelerator_type: str | None, count: int) -> None:
    """Raise ValueError where Google has no such machine with such accelerators."""
    pair = (accelerator_type, count)
    if own := BUILT_IN.get(machine_type):
        if pair == own:
            return
        raise ValueError(
            f"{machine_type} comes with {own[1]} {own[0]}: set accelerator_type to {own[0]} and "
            f"accelerator_count to {own[1]}"
        )
    if FAMILIES_WITH_ACCELERATORS.match(machine_type):
        raise ValueError(
            f"{machine_type} is not one of the machine types with accelerators: "
            f"{', '.join(BUILT_IN)}"
        )
    # Other machine types have none, except for n1, to which accelerators can be added.
    allowed: list[tuple[str | None, int]] = [(None, 0)]
    if machine_type.startswith("n1-"):
        allowed += [(kind, number) for kind, numbers in ADDED.items() for number in numbers]
    if pair in allowed:
        return
    with_it = [name for name, (kind, _) in BUILT_IN.items() if kind == accelerator_type]
    with_it += ["n1 machines"] if accelerator_type in ADDED else []
    elsewhere = f", which comes with {', '.join(with_it)}" if with_it else ""
    choices = " or ".join(f"{kind or 'null'} and {number}" for kind, number in allowed)
    raise ValueError(
        f"accelerator_type and accelerator_count of {machine_type} have to be {choices}, not "
        f"{accelerator_type or 'null'} and {count}{elsewhere}"
    )


GIGABYTE = 1024**3

PROJECT = r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$"
REGION = r"^[a-z]+-[a-z]+[0-9]+$"
# No slash after the last colon, or the port of a registry would pass for a tag.
IMAGE = r"^[^\s]+(:|@sha256:)[^\s/]+$"
ACCOUNT = r"^[^@\s]+@[^@\s]+\.gserviceaccount\.com$"
"""Accounts of one's own end in `.iam.gserviceaccount.com`; Google's default accounts do not."""


class ImageSettings(Settings):
    """Container images, as `images/build.sh` prints them: repository, name and tag."""

    spark: str = Field(pattern=IMAGE)
    """Image for the Dataproc Serverless batches."""
    cuda: str = Field(pattern=IMAGE)
    """Image for training and evaluation on GPUs or CPUs."""
    tpu: str | None = Field(default=None, pattern=IMAGE)
    """Image for training on TPUs; needed if the training machine has them."""
    serve: str = Field(pattern=IMAGE)
    """Image for the Vertex AI endpoint; model versions are registered with it."""


class SecretSettings(Settings):
    """Secrets in Secret Manager, by name; their values are never written anywhere."""

    hugging_face_token: str | None = None
    """Name of the secret with the Hugging Face token; needed for gated models such as Llama."""
    weights_and_biases_key: str | None = None
    """Name of the secret with the Weights & Biases key, which training reads where it runs; needed
    with `checkpoint.logging.weights_and_biases`."""


ROLES = ("driver", "executor")
"""Parts of a batch, each with tiers of its own."""


class BatchSettings(Settings):
    """How the Spark stages run on Dataproc Serverless; its own defaults apply to what is unset."""

    runtime_version: str = "2.3"
    """Dataproc Serverless runtime: 2.3 or one of its patch releases. It has Spark 3.5, with which
    the stages are tested, and is supported until November 2027."""
    minimum_executors: int | None = Field(default=None, ge=2, le=2000)
    """Minimum number of executors, which are never removed; a batch has at least two."""
    maximum_executors: int | None = Field(default=None, ge=2, le=2000)
    """Maximum number of executors that autoscaling may start; also limits a batch's price per
    hour."""
    scale_up_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of the executors needed by waiting tasks that autoscaling requests; 1 is fastest, but
    most expensive if tasks are short."""
    executor_cores: Literal[4, 8, 16] | None = None
    """Cores per executor."""
    compute_tier: Literal["standard", "premium"] | None = None
    """Tier of the processors of the driver and the executors; `premium` costs more per hour."""
    shuffle_tier: Literal["standard", "premium"] | None = None
    """Tier of the disks for shuffles; `premium` is faster, which helps with very large numbers of
    documents, and needs `compute_tier: premium`."""
    properties: dict[str, str] = Field(default_factory=dict)
    """Additional Spark properties by name, such as `spark.executor.memory`; passed on unchanged, in
    place of what the settings above say."""
    time_to_live_hours: float = Field(default=24.0, ge=0.17, le=336)
    """A batch is ended after this many hours, whatever it is doing; Dataproc accepts 10 minutes to
    14 days."""

    def spark_properties(self) -> dict[str, str]:
        """The settings as Spark and Dataproc name them."""
        allocation = "spark.dynamicAllocation."
        properties: dict[str, Any] = {
            f"{allocation}minExecutors": self.minimum_executors,
            f"{allocation}maxExecutors": self.maximum_executors,
            f"{allocation}executorAllocationRatio": self.scale_up_ratio,
            "spark.executor.cores": self.executor_cores,
        }
        for role in ROLES:
            properties[f"spark.dataproc.{role}.compute.tier"] = self.compute_tier
            properties[f"spark.dataproc.{role}.disk.tier"] = self.shuffle_tier
        # What is unset stays out, so that Dataproc's own default applies and not the word None.
        set_here = {name: str(value) for name, value in properties.items() if value is not None}
        return set_here | self.properties

    @property
    def driver_cores(self) -> int:
        """Cores of the driver; Dataproc's four where nothing is said."""
        return int(self.spark_properties().get("spark.driver.cores", 4))

    @property
    def cores_of_executor(self) -> int:
        """Cores of an executor; Dataproc's four where nothing is said."""
        return int(self.spark_properties().get("spark.executor.cores", 4))

    @property
    def first_executors(self) -> int:
        """Executors that a batch begins with; two where nothing is said."""
        properties, allocation = self.spark_properties(), "spark.dynamicAllocation."
        names = [f"{allocation}minExecutors", f"{allocation}initialExecutors"]
        names.append("spark.executor.instances")
        # Spark begins with the largest of these three.
        return max(int(properties.get(name, 2)) for name in names)

    @property
    def most_executors(self) -> int | None:
        """The most that autoscaling may start, where that is said."""
        most = self.spark_properties().get("spark.dynamicAllocation.maxExecutors")
        return int(most) if most else None

    @property
    def is_premium(self) -> bool:
        """Whether the driver or the executors have processors of the premium tier."""
        properties = self.spark_properties()
        tiers = [properties.get(f"spark.dataproc.{role}.compute.tier") for role in ROLES]
        return "premium" in tiers

    @model_validator(mode="after")
    def _agree(self) -> "BatchSettings":
        if not re.fullmatch(r"2\.3(\.\d+)?", self.runtime_version):
            raise ValueError(
                f"runtime_version is {self.runtime_version}, but the stages run on 2.3: support "
                "for 2.2 has ended, and later ones have Spark 4"
            )
        most, least = self.maximum_executors, self.minimum_executors
        if most is not None and least is not None and most < least:
            raise ValueError("maximum_executors is smaller than minimum_executors")
        for name, value in self.properties.items():
            # Costs are estimated from these, so they have to be numbers.
            counts = name.endswith((".cores", "Executors", ".instances"))
            if counts and not re.fullmatch(r"[1-9][0-9]*", value):
                raise ValueError(
                    f"{name} under `properties` is {value}, not a whole number above 0"
                )
        if self.shuffle_tier == "premium" != self.compute_tier:
            raise ValueError(
                "Dataproc Serverless has `shuffle_tier: premium` only with premium processors: set "
                "`compute_tier: premium`, or leave it out"
            )
        return self


class MachineSettings(Settings):
    """Machines for a job on Vertex AI or, depending on `training.runner`, Google Batch or Cloud
    TPU."""

    machine_type: str = "a2-highgpu-1g"
    """Machine type; must match the accelerator. For training, it may have TPUs, such as
    `ct5lp-hightpu-4t`."""
    accelerator_type: str | None = "NVIDIA_TESLA_A100"
    """Accelerator, as Vertex AI names it; `null` for none, or for TPUs."""
    accelerator_count: int = Field(default=1, ge=0)
    """Accelerators per machine, each with its own training process; 0 for none, or for TPUs, which
    have one process for all chips."""
    replicas: int = Field(default=1, ge=1)
    """Number of machines; training is spread over all of them. Evaluation and TPUs have one."""
    reservation: str | None = None
    """Name of a reservation, in the zone that `zones` names, from which `training.runner: tpu_vm`
    takes its TPU machine, with `strategy: STANDARD`; if unset, it takes what is free."""
    zones: tuple[str, ...] = ()
    """Zones of the region in which Google Batch may create the machines, such as `us-central1-a`;
    if empty, all. Vertex AI chooses by itself; Cloud TPU needs exactly one."""
    boot_disk_gb: int = Field(default=200, ge=100)
    """Size of the boot disk, in GB, on Vertex AI and Google Batch; it must hold the image and what
    programs cache."""
    strategy: Literal["STANDARD", "SPOT", "FLEX_START"] = "STANDARD"
    """How machines are obtained: on demand (`STANDARD`), cheaper but preemptible (`SPOT`), or
    queued until some become available (`FLEX_START`, not with `training.runner: tpu_vm`)."""
    timeout_hours: float = Field(default=72.0, gt=0, le=168)
    """A job is ended after this many hours, whatever it is doing; at most seven days."""
    max_wait_hours: float = Field(default=24.0, gt=0)
    """How many hours a FLEX_START job may wait for machines."""

    @model_validator(mode="after")
    def _accelerators_agree(self) -> "MachineSettings":
        check_accelerator(self.machine_type, self.accelerator_type, self.accelerator_count)
        if self.reservation and (self.tpu is None or self.strategy != "STANDARD"):
            raise ValueError(
                "reservation is for a machine with TPUs and `strategy: STANDARD`; leave it out"
            )
        if self.tpu is None and self.machine_type.startswith(TPU_FAMILIES):
            raise ValueError(
                f"{self.machine_type} has TPUs, but is not one of {', '.join(TPU_MACHINES)}"
            )
        if self.tpu and self.replicas > 1:
            raise ValueError(
                f"{self.machine_type}: TPUs train on one machine; leave `replicas` out"
            )
        return self

    @property
    def processes(self) -> int:
        """Training processes over all machines; TPUs and machines without accelerators have one."""
        return max(1, self.accelerator_count) * self.replicas

    @property
    def is_cheaper(self) -> bool:
        """Whether they are spot or flex-start machines."""
        return self.strategy != "STANDARD"

    @property
    def tpu(self) -> TpuMachine | None:
        """The machine's TPU chips, if it has them."""
        return TPU_MACHINES.get(self.machine_type)


class VllmSettings(Settings):
    """How vLLM serves a model on accelerators."""

    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of prompt and answer together, in tokens; if unset, what the model allows, as
    far as it fits into the accelerators' memory."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of an accelerator's memory that vLLM uses."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of `vllm serve`, one word per entry; they override all others."""


class EndpointMachineSettings(Settings):
    """The Vertex AI endpoint: its machines, who can reach it, and how long its changes may take."""

    machine_type: str = "g2-standard-8"
    """Machine type of a replica; must match the accelerator."""
    accelerator_type: str | None = "NVIDIA_L4"
    """Accelerator, as Vertex AI names it; `null` for none."""
    accelerator_count: int = Field(default=1, ge=0)
    """Accelerators per replica."""
    minimum_replicas: int = Field(default=1, ge=1)
    """Replicas of a version that are always running and paid for; two versions have them during a
    rollout."""
    maximum_replicas: int = Field(default=1, ge=1)
    """Maximum number of replicas of a version under load."""
    target_utilization: int = Field(default=60, ge=1, le=100)
    """Utilization of the accelerator, or of the CPU if there is none, in percent, above which
    replicas are added."""
    access_logging: bool = False
    """Write a line to Cloud Logging, which is billed, for each request."""
    spot: bool = False
    """Use spot machines, which are cheaper but may be preempted while they answer."""
    openai_routes: bool = False
    """Let clients of OpenAI's API call the endpoint through `invoke_route_prefix`, a preview
    feature of Vertex AI; `:predict` and `:rawPredict` are then not available."""
    vllm: VllmSettings | None = VllmSettings()
    """How vLLM serves if there are accelerators; `null` for an image with another engine."""
    start_minutes: float = Field(default=30.0, gt=0, le=120)
    """How many minutes a container may take to load its model and answer a test prompt."""
    request_seconds: float = Field(default=120.0, gt=0, le=3600)
    """How many seconds one answer may take; Vertex AI's own timeout is set to it when the endpoint
    is created, and not changed later."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """Seconds between the end of a version's traffic and its removal."""
    private_projects: tuple[str, ...] = ()
    """Projects that reach the endpoint through Private Service Connect; if empty, the endpoint is
    public. Used only when the endpoint is created."""
    private_address: str | None = None
    """URL of your own forwarding rule to a private endpoint; rollouts send their requests to it."""

    @model_validator(mode="after")
    def _agree(self) -> "EndpointMachineSettings":
        check_accelerator(self.machine_type, self.accelerator_type, self.accelerator_count)
        if self.maximum_replicas < self.minimum_replicas:
            raise ValueError("maximum_replicas is smaller than minimum_replicas")
        if self.private_address and not self.private_projects:
            raise ValueError("private_address is for an endpoint with private_projects")
        if self.openai_routes and self.private_projects:
            raise ValueError("openai_routes needs a public endpoint, so no private_projects")
        return self

    @property
    def is_cheaper(self) -> bool:
        """Whether its machines are spot machines."""
        return self.spot


class CostSettings(Settings):
    """Limits on what jobs may cost, at Google's list prices of a given date or at your own."""

    run_limit: float | None = Field(default=None, gt=0)
    """Dollars that the jobs of one run may cost together. Once they are spent, the jobs are
    canceled; after the limit is raised, work resumes from what they saved."""
    monthly_limit: float | None = Field(default=None, gt=0)
    """Dollars that all jobs which begin in a calendar month (UTC) may cost together. The endpoint
    is not included; set a budget alert for it."""
    prices: dict[str, Annotated[float, Field(ge=0, le=100_000)]] = Field(default_factory=dict)
    """Your own prices, in dollars per hour, for machine types with their accelerators; `dcu` is
    Dataproc's compute unit. With a limit, machine types that the built-in list does not have must
    be priced here."""
    spot_factor: float = Field(default=0.4, gt=0, le=1)
    """Approximate price of spot and flex-start machines, as a share of the full price."""

    @property
    def has_limits(self) -> bool:
        """Whether there is a ceiling, which needs the prices of all machines."""
        return self.run_limit is not None or self.monthly_limit is not None


class GoogleCloudSettings(Settings):
    """All settings of `config/google_cloud.yaml`, or of the file that `LLM_ASSETS_GOOGLE_CLOUD`
    names."""

    project: str = Field(pattern=PROJECT)
    """The cloud project's id."""
    region: str = Field(pattern=REGION)
    """One region for everything: jobs, bucket and images."""
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$")
    """Bucket for artifacts, specs and messages, without gs://."""
    service_account: str = Field(pattern=ACCOUNT)
    """The account that jobs run as."""
    serving_account: str | None = Field(default=None, pattern=ACCOUNT)
    """The account that the endpoint's containers run as; it needs no permissions at all. If unset,
    it is that of the jobs, which may change the store and start jobs."""
    builder_account: str | None = Field(default=None, pattern=ACCOUNT)
    """The account that images are built as; if unset, Cloud Build's default account."""
    subnetwork: str | None = None
    """Subnetwork of the Spark batches and of the Google Batch machines; the machines then have no
    external IP addresses. If unset, the project's default subnetwork."""
    images: ImageSettings
    """Container images."""
    secrets: SecretSettings = SecretSettings()
    """Secrets by name."""
    tensorboard: str | None = None
    """Full resource name of a Vertex AI TensorBoard that training on Vertex AI writes to; if unset,
    none."""
    batch: BatchSettings = BatchSettings()
    """The Spark stages."""
    training: MachineSettings = MachineSettings()
    """Machines for training."""
    evaluation: MachineSettings = MachineSettings()
    """The machine for evaluation; there is only one."""
    endpoint: EndpointMachineSettings = EndpointMachineSettings()
    """The endpoint that serves the champion."""
    cost: CostSettings = CostSettings()
    """Spending limits and prices."""
    web_access: bool = False
    """Allow opening a shell in running Vertex AI jobs from the console."""
    pending_hours: float = Field(default=6.0, gt=0)
    """A job that has waited this many hours for machines is canceled, with advice; for a FLEX_START
    job, this time is added to its `max_wait_hours`."""
    lease_hours: float = Field(default=12.0, gt=0)
    """A training or evaluation job that no Dagster run has followed for this many hours saves its
    state and ends by itself."""
    restarts: int = Field(default=10, ge=0)
    """How many times in a row a run restarts a preempted or interrupted job; a new checkpoint
    resets the count."""
    api_endpoint: str | None = None
    """Address to use instead of Google's gRPC APIs, for local tests; if unset, Google's own."""
    rest_endpoint: str | None = None
    """URL to use instead of Google's REST APIs and image registry, for local tests."""

    @field_validator("evaluation")
    @classmethod
    def _one_machine(cls, evaluation: MachineSettings) -> MachineSettings:
        if evaluation.replicas > 1:
            raise ValueError(
                "the evaluation runs on one machine: leave `replicas` out, or set it to 1"
            )
        if evaluation.tpu:
            raise ValueError("the evaluation runs on GPUs or CPUs, not on TPUs")
        return evaluation

    @model_validator(mode="after")
    def _agree(self) -> "GoogleCloudSettings":
        if self.training.tpu and self.images.tpu is None:
            raise ValueError(
                "training.machine_type has TPUs, for which images.tpu is missing: "
                "images/build.sh tpu prints it"
            )
        for name, machines in (("training", self.training), ("evaluation", self.evaluation)):
            if elsewhere := [z for z in machines.zones if z.rpartition("-")[0] != self.region]:
                raise ValueError(
                    f"{name}.zones: {', '.join(elsewhere)} is not in the region {self.region}"
                )
        return self

    @property
    def account_that_serves(self) -> str:
        """The account that the endpoint's containers run as."""
        return self.serving_account or self.service_account

    @property
    def parent(self) -> str:
        """The project and region as Google's APIs name them."""
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def whole_subnetwork(self) -> str | None:
        """The subnetwork with its project and region; a name alone is that of the jobs' region."""
        if self.subnetwork is None:
            return None
        whole = self.subnetwork.partition("projects/")[2]
        own = f"{self.project}/regions/{self.region}/subnetworks/{self.subnetwork}"
        return f"projects/{whole or own}"

    @property
    def client_options(self) -> dict[str, str] | None:
        """Of Google's clients that have one address for all regions."""
        return {"api_endpoint": self.api_endpoint} if self.api_endpoint else None

    @property
    def tpu_parent(self) -> str | None:
        """The project and zone of TPU machines; None where training names no zone."""
        zones = self.training.zones if self.training.tpu else ()
        return f"projects/{self.project}/locations/{zones[0]}" if len(zones) == 1 else None


CLOUD_CONFIG_VARIABLE = "LLM_ASSETS_GOOGLE_CLOUD"
DEFAULT_CLOUD_CONFIG = "config/google_cloud.yaml"


def cloud_config_path() -> Path:
    """The cloud project's file in force: `LLM_ASSETS_GOOGLE_CLOUD`, else the default one."""
    return Path(os.environ.get(CLOUD_CONFIG_VARIABLE, DEFAULT_CLOUD_CONFIG))


def load_cloud_settings(path: Path | None = None) -> GoogleCloudSettings:
    """Read and check the cloud project's file; raises UserError listing every fault."""
    return read_settings_file(
        path or cloud_config_path(), GoogleCloudSettings, CLOUD_CONFIG_VARIABLE
    )
