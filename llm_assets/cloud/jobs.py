"""The jobs of this project as Google's APIs describe them, made from the settings."""

from collections.abc import Sequence
from typing import Any

from artifacts.program.smoke import CHECK_VARIABLE
from llm_assets.cloud.serving_image import engine_arguments
from llm_assets.cloud.settings import GoogleCloudSettings, MachineSettings
from recipes.launcher.secrets import ENDPOINT_VARIABLE, PREFIX

HOUR = 3600
SERVING_CHECK_HOURS = 1.0
"""A container of one's own that serves instead of parsing its arguments is ended then."""
HYPERDISK_MACHINES = ("a3-ultragpu-", "a4-", "a4x-")
"""Machine families that boot from a hyperdisk alone; all others take an SSD persistent disk."""


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
        "env": [{"name": n, "value": v} for n, v in _secrets(settings).items()],
    }
    return _job(settings, machines, container, output)


def serving_check_job(settings: GoogleCloudSettings, spec: str, output: str) -> Any:
    """A Vertex AI custom job in which the serve image parses its engine's arguments, and ends.

    It has the endpoint's command: that of the image, with the arguments of the settings.
    """
    container = {
        "image_uri": settings.images.serve,
        "args": engine_arguments(settings.endpoint),
        "env": [{"name": CHECK_VARIABLE, "value": spec}],
    }
    return _job(settings, serving_check_machine(settings), container, output)


def serving_check_machine(settings: GoogleCloudSettings) -> MachineSettings:
    """One of the evaluation's machines where they have accelerators, else one as the endpoint's.

    vLLM's parser asks for the device that it would run on.
    """
    machines = settings.evaluation
    if machines.accelerator_type is None:
        named = {"machine_type", "accelerator_type", "accelerator_count"}
        machines = MachineSettings.model_validate(settings.endpoint.model_dump(include=named))
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


def _secrets(settings: GoogleCloudSettings) -> dict[str, str]:
    """Variables from which the launcher reads secrets; the job's description holds names alone."""
    key = settings.secrets.weights_and_biases_key
    if key is None:
        return {}
    name = f"projects/{settings.project}/secrets/{key}/versions/latest"
    endpoint = {ENDPOINT_VARIABLE: settings.api_endpoint} if settings.api_endpoint else {}
    return {f"{PREFIX}WANDB_API_KEY": name, **endpoint}
