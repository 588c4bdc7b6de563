"""The container of an endpoint, as Vertex AI's own messages take it."""

from typing import Any

from google.cloud.aiplatform_v1 import ModelContainerSpec

from llm_assets.cloud.jobs import container_spec, engine_memory
from llm_assets.cloud.settings import GoogleCloudSettings, load_cloud_settings


def settings(**endpoint: Any) -> GoogleCloudSettings:
    content = load_cloud_settings().model_dump(mode="json")
    content["endpoint"] |= endpoint
    return GoogleCloudSettings.model_validate(content)


def spec(**endpoint: Any) -> ModelContainerSpec:
    return ModelContainerSpec(container_spec(settings(**endpoint), "manuals", 3, "abc"))


def test_startup_probe_waits_as_long_as_the_settings_say() -> None:
    made = spec(start_minutes=20)
    probe = made.startup_probe
    assert (probe.http_get.path, probe.http_get.port) == (made.health_route, 8080)
    assert probe.period_seconds * probe.failure_threshold == 20 * 60
    assert probe.period_seconds < probe.timeout_seconds, "as `Probe` asks"
    assert made.deployment_timeout.total_seconds() == 20 * 60


def test_engine_is_told_name_memory_and_the_arguments_of_the_settings() -> None:
    made = spec(
        machine_type="g2-standard-24",
        accelerator_count=2,
        vllm={
            "gpu_memory_utilization": 0.8,
            "max_model_len": 4096,
            "arguments": ["--enforce-eager"],
        },
    )
    variables = {variable.name: variable.value for variable in made.env}
    assert variables["MODEL_NAME"] == "manuals" and variables["MODEL_VERSION"] == "3"
    assert int(variables["ENGINE_MEMORY_BYTES"]) == int(2 * (22 * 0.8 - 3) * 1024**3)
    assert list(made.args) == [
        *("--gpu-memory-utilization", "0.8", "--tensor-parallel-size", "2"),
        *("--max-model-len", "4096", "--enforce-eager"),
    ]


def test_accelerator_without_bfloat16_computes_in_half_precision() -> None:
    made = spec(machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4")
    assert "half" in made.args


def test_another_engine_gets_no_arguments_of_vllm() -> None:
    made = spec(vllm=None)
    assert not made.args and engine_memory(settings(vllm=None).endpoint) is None
    plain = spec(machine_type="n1-standard-8", accelerator_type=None, accelerator_count=0)
    assert not plain.args
