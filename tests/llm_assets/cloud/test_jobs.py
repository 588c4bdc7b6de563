"""The jobs that the settings make, on machines of every kind that Vertex AI has."""

import pytest
from google.cloud import aiplatform_v1

from llm_assets.cloud.jobs import custom_job
from llm_assets.cloud.quota import needs
from llm_assets.cloud.settings import GoogleCloudSettings, MachineSettings
from tests.stand_ins.google import LocalGoogle
from tests.stand_ins.job_rules import ATTACHED, check_job
from tests.stand_ins.project import cloud_settings

# Quota names as the page "Vertex AI quotas and limits" and its API write them.
QUOTAS = {
    "NVIDIA_TESLA_A100": "custom_model_training_nvidia_a100_gpus",
    "NVIDIA_A100_80GB": "custom_model_training_nvidia_a100_80gb_gpus",
    "NVIDIA_H100_80GB": "custom_model_training_nvidia_h100_gpus",
    "NVIDIA_H100_MEGA_80GB": "custom_model_training_nvidia_h100_mega_gpus",
    "NVIDIA_H200_141GB": "custom_model_training_nvidia_h200_gpus",
    "NVIDIA_L4": "custom_model_training_nvidia_l4_gpus",
}


@pytest.fixture
def settings(google: LocalGoogle) -> GoogleCloudSettings:
    return GoogleCloudSettings.model_validate(cloud_settings(google))


@pytest.mark.parametrize("machine_type", ATTACHED)
def test_every_machine_gets_a_disk_and_a_quota_that_exist(
    settings: GoogleCloudSettings, machine_type: str
) -> None:
    accelerator, count = ATTACHED[machine_type]
    machines = MachineSettings(
        machine_type=machine_type,
        accelerator_type=accelerator,
        accelerator_count=count,
        replicas=3,
    )
    job = custom_job(settings, machines, [], "gs://local-bucket/jobs/output")
    check_job(aiplatform_v1.CustomJob(job))
    training = next(iter(needs(settings.model_copy(update={"training": machines}))))
    assert training.metric == f"aiplatform.googleapis.com/{QUOTAS[accelerator]}"
    assert training.accelerators == 3 * count
