"""The jobs of this project as Google's APIs describe them, made from the settings.

Secrets are read from Secret Manager when needed and kept nowhere. A version is served by the
`serve` image, with its routes and its machines.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from artifacts.errors import UserError
from artifacts.program.entry import CHECK_VARIABLE
from llm_assets.cloud.settings import (
    ACCELERATORS,
    BUILT_IN,
    GIGABYTE,
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
)
from recipes.launcher import environment

HUB_VARIABLE = "HF_TOKEN"


def read_secret(settings: GoogleCloudSettings, name: str) -> str:
    """The newest value of a secret; raises what Google raises (NotFound, PermissionDenied)."""
    return environment.read_secret(_newest(settings, name), settings.api_endpoint)


def is_enabled(settings: GoogleCloudSettings, name: str) -> bool:
    """Whether a secret's newest version has a value; raises what Google raises."""
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient, SecretVersion

    version = SecretManagerServiceClient(client_options=settings.client_options).get_secret_version(
        name=_newest(settings, name), timeout=environment.CALL_SECONDS
    )
    return version.state == SecretVersion.State.ENABLED


def _newest(settings: GoogleCloudSettings, name: str) -> str:
    """The full name of a secret's newest version."""
    return f"projects/{settings.project}/secrets/{name}/versions/latest"


@contextmanager
def hub_access(settings: GoogleCloudSettings) -> Iterator[None]:
    """Give this process the Hugging Face token while the block runs, and no longer.

    A token that the environment holds already is left alone.

    Raises:
        UserError: the secret cannot be read.
    """
    from google.api_core.exceptions import GoogleAPICallError

    name = settings.secrets.hugging_face_token
    if name is None or HUB_VARIABLE in os.environ:
        yield
        return
    try:
        os.environ[HUB_VARIABLE] = read_secret(settings, name)
    except GoogleAPICallError as error:
        raise UserError(
            f"The secret {name} of project {settings.project} cannot be read ({error.message}). It "
            "is named by `secrets.hugging_face_token`; `llm-assets check` says what is missing."
        ) from error
    try:
        yield
    finally:
        # Programs that this process starts later inherit its environment, so the token must not
        # stay.
        os.environ.pop(HUB_VARIABLE, None)


PORT = 8080
SHARED_MEMORY_MB = 16_384
"""For the tensors that the processes of several accelerators exchange."""
PREDICT_ROUTE = "/predict"
HEALTH_ROUTE = "/health"
PROBE_SECONDS = 10
PROBE_TIMEOUT_SECONDS = 15
"""Longer than `PROBE_SECONDS`, as `Probe.timeout_seconds` requires."""
RESERVED_GIGABYTES = 3.0
"""Accelerator memory that vLLM takes beside weights and cache: activations, CUDA graphs."""


def container_spec(
    settings: GoogleCloudSettings, name: str, version: int, fingerprint: str
) -> dict[str, Any]:
    """A `ModelContainerSpec`; the container tells clients which version answered them.

    Clients call the model by the pipeline's name. The startup probe gives the container
    `endpoint.start_minutes` to load it; without one, Vertex AI ends it after less than a minute.
    """
    variables = {
        "MODEL_NAME": name,
        "MODEL_VERSION": str(version),
        "MODEL_FINGERPRINT": fingerprint,
    }
    # The container derives from it how long a context fits beside the weights.
    memory = engine_memory(settings.endpoint)
    if memory is not None:
        variables["ENGINE_MEMORY_BYTES"] = str(memory)
    seconds = round(settings.endpoint.start_minutes * 60)
    by_prefix = settings.endpoint.openai_routes
    routes = {"invoke_route_prefix": "/*"} if by_prefix else {"predict_route": PREDICT_ROUTE}
    spec: dict[str, Any] = {
        "image_uri": settings.images.serve,
        "ports": [{"container_port": PORT}],
        **routes,
        "health_route": HEALTH_ROUTE,
        "env": _as_env(variables),
        "args": engine_arguments(settings.endpoint),
        "deployment_timeout": {"seconds": seconds},
        "startup_probe": {
            "http_get": {"path": HEALTH_ROUTE, "port": PORT},
            "period_seconds": PROBE_SECONDS,
            "timeout_seconds": PROBE_TIMEOUT_SECONDS,
            "failure_threshold": math.ceil(seconds / PROBE_SECONDS),
        },
    }
    if settings.endpoint.accelerator_count > 1:
        spec["shared_memory_size_mb"] = SHARED_MEMORY_MB
    return spec


def engine_memory(machines: EndpointMachineSettings) -> int | None:
    """Bytes that vLLM has for weights and cache; None without accelerators, or with unknown ones.

    Several accelerators share one copy of the model.
    """
    accelerator = ACCELERATORS.get(machines.accelerator_type or "")
    if accelerator is None or machines.vllm is None:
        return None
    each = accelerator.gigabytes * machines.vllm.gpu_memory_utilization - RESERVED_GIGABYTES
    return int(each * machines.accelerator_count * GIGABYTE)


def engine_arguments(machines: EndpointMachineSettings) -> list[str]:
    """Arguments of `vllm serve`, appended to the image's; of repeated ones, the last counts."""
    if machines.vllm is None or machines.accelerator_type is None:
        return []
    vllm = machines.vllm
    arguments = ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
    if machines.accelerator_count > 1:
        arguments += ["--tensor-parallel-size", str(machines.accelerator_count)]
    accelerator = ACCELERATORS.get(machines.accelerator_type)
    if accelerator is not None and not accelerator.bfloat16:
        # vLLM refuses to serve weights in bfloat16 on accelerators that cannot multiply it.
        arguments += ["--dtype", "half"]
    if vllm.max_model_len is not None:
        arguments += ["--max-model-len", str(vllm.max_model_len)]
    return [*arguments, *vllm.arguments]


def dedicated_resources(machines: EndpointMachineSettings) -> dict[str, Any]:
    """A `DedicatedResources`: machines and how their number follows the load."""
    machine: dict[str, Any] = {"machine_type": machines.machine_type}
    metric = "cpu/utilization"
    if machines.accelerator_type:
        machine["accelerator_type"] = machines.accelerator_type
        machine["accelerator_count"] = machines.accelerator_count
        metric = "accelerator/duty_cycle"
    target = {
        "metric_name": f"aiplatform.googleapis.com/prediction/online/{metric}",
        "target": machines.target_utilization,
    }
    return {
        "machine_spec": machine,
        "min_replica_count": machines.minimum_replicas,
        "max_replica_count": machines.maximum_replicas,
        "autoscaling_metric_specs": [target],
        "spot": machines.spot,
    }


FOLDERS = {
    "AIP_MODEL_DIR": "model",
    "AIP_CHECKPOINT_DIR": "checkpoints",
    "AIP_TENSORBOARD_LOG_DIR": "logs",
}
"""Vertex AI's variables for a job's output folders, which the launcher reads."""
HOUR = 3600
SERVING_CHECK_HOURS = 1.0
"""Ends an image of one's own that serves instead of parsing its arguments and exiting."""
EVERY_API = "https://www.googleapis.com/auth/cloud-platform"
"""Scope of a machine's token; what it may do is decided by its account's roles."""
HYPERDISK_MACHINES = ("a3-ultragpu-", "a4-", "a4x-", "g4-", "c4-", "c4d-", "n4-", "n4d-")
"""Machine families that boot only from a hyperdisk; all others take an SSD persistent disk."""


def spark_batch(settings: GoogleCloudSettings, main: str, arguments: Sequence[str]) -> Any:
    """A Dataproc Serverless batch that runs a Python file of the bucket in the Spark image."""
    execution: dict[str, Any] = {
        "service_account": settings.service_account,
        "ttl": {"seconds": round(settings.batch.time_to_live_hours * HOUR)},
        "staging_bucket": settings.bucket,
    }
    if settings.subnetwork:
        execution["subnetwork_uri"] = settings.subnetwork
    return {
        "pyspark_batch": {"main_python_file_uri": main, "args": list(arguments)},
        "runtime_config": {
            "version": settings.batch.runtime_version,
            "container_image": settings.images.spark,
            "properties": settings.batch.spark_properties(),
        },
        "environment_config": {"execution_config": execution},
    }


def custom_job(
    settings: GoogleCloudSettings, machines: MachineSettings, arguments: Sequence[str], output: str
) -> Any:
    """A Vertex AI custom job that runs the launcher of the machines' image on every machine."""
    container = {
        "image_uri": settings.images.tpu if machines.tpu else settings.images.cuda,
        "args": list(arguments),
        "env": _as_env(_variables(settings, output)),
    }
    return _job(settings, machines, container, output)


MOUNT = "/mnt/disks/gcs"
"""Where a machine of one's own has the bucket, and its container; Batch's image mounts only there.
"""
HOSTS_FILE = "/etc/cloudbatch-taskgroup-hosts"
"""The file that BATCH_HOSTS_FILE names on a machine; containers see it only if it is mounted."""
DRIVERS = (
    "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64",
    "/var/lib/nvidia/bin:/usr/local/nvidia/bin",
)
"""Where Batch installs the GPU drivers, and where images expect them (page "Create and run a job
that uses GPUs")."""


def batch_job(
    settings: GoogleCloudSettings, machines: MachineSettings, arguments: Sequence[str], output: str
) -> Any:
    """A Google Batch job that runs the launcher of the cuda image, one task on each machine.

    Batch retries no task by itself, since all machines of a training have to restart together.
    """
    bucket, several = f"{MOUNT}/{settings.bucket}", machines.replicas > 1
    with_accelerators = machines.accelerator_type is not None
    # Processes of several machines connect to each other on ports that nobody knows before.
    options = f"--network host --shm-size {SHARED_MEMORY_MB}m"
    container = {
        "image_uri": settings.images.cuda,
        "commands": list(arguments),
        "volumes": [
            f"{bucket}:{bucket}:rw",
            *([f"{HOSTS_FILE}:{HOSTS_FILE}:ro"] if several else []),
            *(DRIVERS if with_accelerators else ()),
        ],
        # As Google's page on jobs with GPUs has it: the container needs the machine's devices.
        "options": f"{options} --privileged" if with_accelerators else options,
    }
    task = {
        "runnables": [{"container": container}],
        "environment": {"variables": _variables_of_own(settings, output)},
        "max_run_duration": {"seconds": round(machines.timeout_hours * HOUR)},
        "volumes": [
            {
                "gcs": {"remote_path": settings.bucket},
                "mount_path": bucket,
                # Otherwise gcsfuse shows only folders with an object, and nothing here makes those.
                "mount_options": ["--implicit-dirs"],
            }
        ],
    }
    group = {
        "task_spec": task,
        "task_count": machines.replicas,
        # All at once: the processes of a training wait until every one of them has joined.
        "parallelism": machines.replicas,
        # By itself, Batch would put several tasks on one machine if they seemed to fit.
        "task_count_per_node": 1,
        "require_hosts_file": several,
    }
    policy: dict[str, Any] = {
        "machine_type": machines.machine_type,
        "provisioning_model": machines.strategy,
        "boot_disk": {
            "type_": boot_disk_type(machines.machine_type),
            "size_gb": machines.boot_disk_gb,
        },
    }
    if with_accelerators and machines.machine_type not in BUILT_IN:
        kind = str(machines.accelerator_type).lower().replace("_", "-")
        policy["accelerators"] = [{"type_": kind, "count": machines.accelerator_count}]
    network: dict[str, Any] = {}
    if subnetwork := settings.whole_subnetwork:
        interface = {"subnetwork": subnetwork, "no_external_ip_address": True}
        network = {"network": {"network_interfaces": [interface]}}
    # Batch looks for machines in all zones of a region where none is named.
    places = [f"zones/{zone}" for zone in machines.zones] or [f"regions/{settings.region}"]
    return {
        "task_groups": [group],
        "allocation_policy": {
            "instances": [{"policy": policy, "install_gpu_drivers": with_accelerators}],
            "location": {"allowed_locations": places},
            "service_account": {"email": settings.service_account},
            **network,
        },
        "logs_policy": {"destination": "CLOUD_LOGGING"},
    }


def tpu_job(
    settings: GoogleCloudSettings, machines: MachineSettings, arguments: Sequence[str], output: str
) -> Any:
    """A queued resource whose machine runs the launcher of the tpu image.

    The request is valid for as long as the run waits, so no machine is granted after it gave up.
    """
    assert machines.tpu is not None
    account = {"email": settings.service_account, "scope": [EVERY_API]}
    node = {
        "accelerator_type": machines.tpu.accelerator_type,
        "runtime_version": machines.tpu.generation.runtime_version,
        # Its packages and images come from the internet.
        "network_config": {"enable_external_ips": True},
        "service_account": account,
    }
    wait = {"seconds": round(settings.pending_hours * HOUR)}
    resource: dict[str, Any] = {
        "tpu": {"node_spec": [{"node": node}]},
        "queueing_policy": {"valid_until_duration": wait},
    }
    # Without either, Cloud TPU takes the request for a machine on demand.
    if machines.strategy == "SPOT":
        resource["spot"] = {}
    elif machines.reservation:
        resource["guaranteed"] = {}
        place = f"{settings.tpu_parent}/reservations/{machines.reservation}"
        resource["reservation_name"] = place
    container = {
        "image": settings.images.tpu,
        "arguments": list(arguments),
        "environment": _variables_of_own(settings, output),
        "options": [f"--shm-size={SHARED_MEMORY_MB}m"],
        "bucket": settings.bucket,
        "mount": f"{MOUNT}/{settings.bucket}",
        "seconds": round(machines.timeout_hours * HOUR),
    }
    return {"queued_resource": resource, "container": container}


def serving_check_job(settings: GoogleCloudSettings, spec: str, output: str) -> Any:
    """A Vertex AI custom job in which the serve image parses its arguments, answers, and ends.

    It has the endpoint's command: that of the image, with the arguments of the settings.
    """
    container = {
        "image_uri": settings.images.serve,
        "args": engine_arguments(settings.endpoint),
        "env": _as_env({CHECK_VARIABLE: spec}),
    }
    return _job(settings, serving_check_machine(settings), container, output)


def serving_check_machine(settings: GoogleCloudSettings) -> MachineSettings:
    """One of the evaluation's machines where vLLM needs its accelerators, else the endpoint's.

    vLLM's parser asks for the device that it would run on.
    """
    machines = settings.evaluation
    if None in (machines.accelerator_type, settings.endpoint.accelerator_type):
        fields = {"machine_type", "accelerator_type", "accelerator_count"}
        machines = MachineSettings.model_validate(settings.endpoint.model_dump(include=fields))
    return machines.model_copy(update={"timeout_hours": SERVING_CHECK_HOURS})


def _job(
    settings: GoogleCloudSettings, machines: MachineSettings, container: dict[str, Any], output: str
) -> Any:
    """A Vertex AI custom job that runs one container on every machine.

    The first worker pool has one machine and the second the others, as Vertex AI wants it.
    """
    machine: dict[str, Any] = {"machine_type": machines.machine_type}
    if machines.accelerator_type:
        machine["accelerator_type"] = machines.accelerator_type
        machine["accelerator_count"] = machines.accelerator_count
    if machines.tpu:
        machine["tpu_topology"] = machines.tpu.topology
    pool = {
        "machine_spec": machine,
        "disk_spec": {
            "boot_disk_type": boot_disk_type(machines.machine_type),
            "boot_disk_size_gb": machines.boot_disk_gb,
        },
        "container_spec": container,
    }
    pools = [{**pool, "replica_count": 1}]
    if machines.replicas > 1:
        pools.append({**pool, "replica_count": machines.replicas - 1})
    scheduling: dict[str, Any] = {
        "timeout": {"seconds": round(machines.timeout_hours * HOUR)},
        "strategy": machines.strategy,
        # The workers of a training are one group, which restarts as a whole or not at all.
        "restart_job_on_worker_restart": True,
    }
    if machines.strategy == "FLEX_START":
        scheduling["max_wait_duration"] = {"seconds": round(machines.max_wait_hours * HOUR)}
    spec: dict[str, Any] = {
        "worker_pool_specs": pools,
        "scheduling": scheduling,
        "service_account": settings.service_account,
        "base_output_directory": {"output_uri_prefix": output},
        "enable_web_access": settings.web_access,
    }
    if settings.tensorboard:
        spec["tensorboard"] = settings.tensorboard
    return {"job_spec": spec}


def boot_disk_type(machine_type: str) -> str:
    """The disk that a machine can boot from."""
    return "hyperdisk-balanced" if machine_type.startswith(HYPERDISK_MACHINES) else "pd-ssd"


def lease_of(output: str) -> str:
    """The lease of a job with this output folder, which a run that follows it renews."""
    return f"{output}.lease"


def _variables_of_own(settings: GoogleCloudSettings, output: str) -> dict[str, str]:
    """Variables for services that neither set the output folders nor mount the bucket
    themselves."""
    folders = {name: f"{output}/{folder}/" for name, folder in FOLDERS.items()}
    return {**_variables(settings, output), environment.MOUNT_VARIABLE: MOUNT, **folders}


def _as_env(variables: dict[str, str]) -> list[dict[str, str]]:
    """Variables as Vertex AI takes them."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def _variables(settings: GoogleCloudSettings, output: str) -> dict[str, str]:
    """What the launcher reads: the job's lease, and secrets by name, never their values."""
    lease = {
        environment.LEASE_VARIABLE: lease_of(output),
        environment.SECONDS_VARIABLE: str(round(settings.lease_hours * HOUR)),
    }
    # Whoever may list jobs sees their variables, so a secret is only named, and read by the job.
    key = settings.secrets.weights_and_biases_key
    if key is None:
        return lease
    endpoint = (
        {environment.ENDPOINT_VARIABLE: settings.api_endpoint} if settings.api_endpoint else {}
    )
    return {**lease, f"{environment.PREFIX}WANDB_API_KEY": _newest(settings, key), **endpoint}
