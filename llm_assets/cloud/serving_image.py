"""How a model version is served on Vertex AI: the `serve` image, its routes and its machines."""

import math
from typing import Any

from llm_assets.cloud.accelerators import ACCELERATORS, GIGABYTE
from llm_assets.cloud.settings import EndpointMachineSettings, GoogleCloudSettings

PORT = 8080
SHARED_MEMORY_MB = 16_384
"""For the tensors that the processes of several accelerators exchange."""
PREDICT_ROUTE = "/predict"
HEALTH_ROUTE = "/health"
NAME_VARIABLE = "MODEL_NAME"
VERSION_VARIABLE = "MODEL_VERSION"
FINGERPRINT_VARIABLE = "MODEL_FINGERPRINT"
MEMORY_VARIABLE = "ENGINE_MEMORY_BYTES"
PROBE_SECONDS = 10
PROBE_TIMEOUT_SECONDS = 15
"""Longer than the time between two probes, as `Probe.timeout_seconds` asks."""
RESERVED_GIGABYTES = 3.0
"""What vLLM takes of an accelerator beside weights and cache: activations, CUDA's graphs."""


def container_spec(
    settings: GoogleCloudSettings, name: str, version: int, fingerprint: str
) -> dict[str, Any]:
    """A `ModelContainerSpec`; the container tells clients which version answered them.

    The startup probe gives the container `endpoint.start_minutes` to load the model; without one,
    Vertex AI ends it after less than a minute.

    Args:
        name: what clients call the model: the pipeline's.
    """
    named = {
        NAME_VARIABLE: name,
        VERSION_VARIABLE: str(version),
        FINGERPRINT_VARIABLE: fingerprint,
    }
    memory = engine_memory(settings.endpoint)
    if memory is not None:
        named[MEMORY_VARIABLE] = str(memory)
    seconds = round(settings.endpoint.start_minutes * 60)
    spec: dict[str, Any] = {
        "image_uri": settings.images.serve,
        "ports": [{"container_port": PORT}],
        "predict_route": PREDICT_ROUTE,
        "health_route": HEALTH_ROUTE,
        "env": [{"name": name, "value": value} for name, value in named.items()],
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
    known = ACCELERATORS.get(machines.accelerator_type or "")
    if known is None or machines.vllm is None:
        return None
    each = known.gigabytes * machines.vllm.gpu_memory_utilization - RESERVED_GIGABYTES
    return int(each * machines.accelerator_count * GIGABYTE)


def serves_with_vllm(machines: EndpointMachineSettings) -> bool:
    """Whether the endpoint's engine is vLLM, which needs accelerators."""
    return machines.vllm is not None and machines.accelerator_type is not None


def engine_arguments(machines: EndpointMachineSettings) -> list[str]:
    """Arguments of `vllm serve` behind those of the image; later ones hold."""
    if machines.vllm is None or machines.accelerator_type is None:
        return []
    wanted = machines.vllm
    arguments = ["--gpu-memory-utilization", str(wanted.gpu_memory_utilization)]
    if machines.accelerator_count > 1:
        arguments += ["--tensor-parallel-size", str(machines.accelerator_count)]
    known = ACCELERATORS.get(machines.accelerator_type)
    if known is not None and not known.bfloat16:
        arguments += ["--dtype", "half"]
    if wanted.max_model_len is not None:
        arguments += ["--max-model-len", str(wanted.max_model_len)]
    return [*arguments, *wanted.arguments]


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
