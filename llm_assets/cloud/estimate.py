"""What a run will cost and take, roughly, before it starts."""

from dataclasses import dataclass

from llm_assets.cloud.accelerators import ACCELERATORS
from llm_assets.cloud.jobs import serving_check_machine
from llm_assets.cloud.prices import SPARK_DCUS, dcu_hourly, hourly
from llm_assets.cloud.serving_image import serves_with_vllm
from llm_assets.cloud.settings import GoogleCloudSettings, MachineSettings

UTILIZATION = 0.35
"""Share of the peak that training reaches here, about."""
SPARK_MEGABYTES_A_SECOND = 60.0
"""Both Spark stages together, on that many units, about."""
MONTH_HOURS = 730.0
START_HOURS = 0.15
"""Machines, image and model: about nine minutes a job."""


@dataclass(frozen=True)
class Estimate:
    """One stage's expected time and price."""

    stage: str
    hours: float
    dollars: float | None
    """None where the machine's price is not known here."""

    def line(self) -> str:
        """`checkpoint: about 2.3 h, 9.70 USD`."""
        price = "price unknown" if self.dollars is None else f"{self.dollars:,.2f} USD"
        return f"{self.stage}: about {self.hours:,.1f} h, {price}"


def estimate(
    settings: GoogleCloudSettings, corpus_bytes: int, training_tokens: int, parameters: int
) -> list[Estimate]:
    """Hours and dollars by stage.

    A forward pass takes 2 operations a parameter and token.

    Args:
        corpus_bytes: text that the Spark stages read.
        training_tokens: tokens of the whole training, repeats counted.
        parameters: of the model.
    """
    spark = START_HOURS + corpus_bytes / 1e6 / SPARK_MEGABYTES_A_SECOND / 3600
    measured = min(training_tokens, 10_000_000)
    evaluation = _compute_hours(settings.evaluation, 3 * 2.0 * parameters * measured)
    batches = spark * SPARK_DCUS * dcu_hourly(settings)
    return [
        Estimate("clean_corpus, tokenized_shards", spark, batches),
        estimate_training(settings, training_tokens, parameters),
        Estimate("eval_metrics", evaluation, _dollars(settings, settings.evaluation, evaluation)),
        Estimate("endpoint, a month of it", MONTH_HOURS, _endpoint_dollars(settings)),
    ]


def estimate_smoke(settings: GoogleCloudSettings) -> list[Estimate]:
    """Hours and dollars of the smallest batch and jobs: mostly the start of their machines."""
    batch = START_HOURS * SPARK_DCUS * dcu_hourly(settings)
    machines = [settings.evaluation]
    if serves_with_vllm(settings.endpoint):
        machines.append(serving_check_machine(settings))
    return [
        Estimate("the smallest batch", START_HOURS, batch),
        *(
            Estimate(f"a job on {m.machine_type}", START_HOURS, _dollars(settings, m, START_HOURS))
            for m in machines
        ),
    ]


def estimate_training(settings: GoogleCloudSettings, tokens: int, parameters: int) -> Estimate:
    """Hours and dollars of `checkpoint`: 6 operations a parameter and token (Kaplan et al. 2020).

    Args:
        settings: the cloud project's.
        tokens: of the whole training, repeats counted.
        parameters: of the model.
    """
    hours = _compute_hours(settings.training, 6.0 * parameters * tokens)
    return Estimate("checkpoint", hours, _dollars(settings, settings.training, hours))


def _compute_hours(machines: MachineSettings, operations: float) -> float:
    chips = machines.tpu.chips if machines.tpu else machines.accelerator_count
    accelerators = max(1, chips) * machines.replicas
    known = machines.tpu or ACCELERATORS.get(machines.accelerator_type or "")
    peak = (known.teraflops if known else 1.0) * 1e12
    return START_HOURS + operations / (peak * UTILIZATION * accelerators) / 3600


def _dollars(
    settings: GoogleCloudSettings, machines: MachineSettings, hours: float
) -> float | None:
    price = hourly(settings, machines)
    return None if price is None else price * hours * machines.replicas


def _endpoint_dollars(settings: GoogleCloudSettings) -> float | None:
    """A month of the replicas that are always there."""
    price = hourly(settings, settings.endpoint)
    return None if price is None else price * MONTH_HOURS * settings.endpoint.minimum_replicas
