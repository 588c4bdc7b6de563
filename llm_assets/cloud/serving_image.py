"""How a model version is served on Vertex AI: the `serve` image, its routes and its machines."""

from typing import Any

from llm_assets.cloud.settings import EndpointMachineSettings, GoogleCloudSettings

PORT = 8080
SHARED_MEMORY_MB = 16_384
"""For the tensors that the processes of several accelerators exchange."""
PREDICT_ROUTE = "/predict"
HEALTH_ROUTE = "/health"
VERSION_VARIABLE = "MODEL_VERSION"
FINGERPRINT_VARIABLE = "MODEL_FINGERPRINT"


def container_spec(settings: GoogleCloudSettings, version: int, fingerprint: str) -> dict[str, Any]:
    """A `ModelContainerSpec`; the container tells clients which version answered them.

    Several accelerators share one copy of the model, by an argument of vLLM.
    """
    named = {
        VERSION_VARIABLE: str(version),
        FINGERPRINT_VARIABLE: fingerprint,
    }
    spec: dict[str, Any] = {
        "image_uri": settings.images.serve,
        "ports": [{"container_port": PORT}],
        "predict_route": PREDICT_ROUTE,
        "health_route": HEALTH_ROUTE,
        "env": [{"name": name, "value": value} for name, value in named.items()],
        "deployment_timeout": {"seconds": round(settings.endpoint.start_minutes * 60)},
    }
    accelerators = settings.endpoint.accelerator_count
    if accelerators > 1:
        spec["args"] = ["--tensor-parallel-size", str(accelerators)]
        spec["shared_memory_size_mb"] = SHARED_MEMORY_MB
    return spec


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
