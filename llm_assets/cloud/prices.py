"""What machines cost by the hour: Google's list prices of a date, or your own."""

from llm_assets.cloud.settings import (
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
)

PRICES_AS_OF = "2025, us-central1, list prices; see https://cloud.google.com/vertex-ai/pricing"
DOLLARS_AN_HOUR = {
    "n1-standard-4": 0.22,
    "n1-standard-8": 0.44,
    "g2-standard-8": 0.98,
    "g2-standard-48": 4.60,
    "a2-highgpu-1g": 4.22,
    "a2-highgpu-8g": 33.8,
    "a2-ultragpu-1g": 5.80,
    "a2-ultragpu-8g": 46.4,
    "a3-highgpu-8g": 101.0,
}
"""A machine with its accelerators, Vertex AI's fee included."""
DOLLARS_A_DCU_HOUR = 0.06
DCU = "dcu"
"""Name of Dataproc's compute unit among your own prices."""
SPARK_DCUS = 16.0
"""Data compute units of a batch with its first few executors."""


def hourly(
    settings: GoogleCloudSettings, machines: MachineSettings | EndpointMachineSettings
) -> float | None:
    """Dollars of one machine in an hour, as it is bought; None where its price is not known."""
    price = settings.cost.prices.get(machines.machine_type)
    price = DOLLARS_AN_HOUR.get(machines.machine_type) if price is None else price
    if price is None:
        return None
    if isinstance(machines, EndpointMachineSettings):
        cheaper = machines.spot
    else:
        cheaper = machines.strategy != "STANDARD"
    return price * (settings.cost.spot_factor if cheaper else 1.0)


def dcu_hourly(settings: GoogleCloudSettings) -> float:
    """Dollars of one of Dataproc's compute units in an hour."""
    return settings.cost.prices.get(DCU, DOLLARS_A_DCU_HOUR)
