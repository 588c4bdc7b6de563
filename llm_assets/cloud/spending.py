"""What jobs cost: estimated before, added up after, and held under ceilings.

Machines are priced per hour, by Google's list of a given date or by your own prices. What jobs have
cost is recorded in the bucket.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.settings import first_fault
from artifacts.storage import files
from artifacts.store.manifest import COST
from llm_assets.cloud.jobs import HOUR, serving_check_machine
from llm_assets.cloud.settings import (
    ACCELERATORS,
    BUILT_IN,
    TPU_MACHINES,
    EndpointMachineSettings,
    GoogleCloudSettings,
    MachineSettings,
)
from llm_assets.config import TrainingPlace
from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.failures import DISABLED_API, refusal
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.remote_job import end_job
from llm_assets.pipes.service import RUN_LABEL, RemoteJob, RemoteService
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs

PRICES_AS_OF = (
    "Google's list prices of 2025 in us-central1, unless `cost.prices` has your own; see "
    "https://cloud.google.com/vertex-ai/pricing"
)
DOLLARS_AN_HOUR = {
    "n1-standard-4": 0.22,
    "n1-standard-8": 0.44,
    "g2-standard-8": 0.98,
    "g2-standard-48": 4.60,
    "a2-highgpu-1g": 4.22,
    "a2-highgpu-2g": 8.45,
    "a2-highgpu-4g": 16.9,
    "a2-highgpu-8g": 33.8,
    "a2-megagpu-16g": 64.1,
    "a2-ultragpu-1g": 5.80,
    "a2-ultragpu-8g": 46.4,
    "a3-highgpu-8g": 101.0,
    "ct5lp-hightpu-1t": 1.38,
    "ct5lp-hightpu-4t": 5.52,
    "ct5lp-hightpu-8t": 11.04,
    "ct6e-standard-1t": 3.10,
    "ct6e-standard-4t": 12.42,
    "ct6e-standard-8t": 24.84,
}
"""A machine with its accelerators, Vertex AI's fee included."""
VERTEX_AI_FEE = 1.15
"""Vertex AI's price of a machine as a multiple of Compute Engine's or Cloud TPU's: 0.219 and 0.190
USD for n1-standard-4, 4.22 and 3.67 for a2-highgpu-1g, 1.38 and 1.20 for a chip of TPU v5e (2025,
pages cloud.google.com/vertex-ai/pricing, /compute/all-pricing and /tpu/pricing); 2.70 for v6e."""
DOLLARS_A_DCU_HOUR = 0.06
DOLLARS_A_PREMIUM_DCU_HOUR = 0.089
"""With processors of the premium tier (2025, page cloud.google.com/dataproc-serverless/pricing)."""
DCU = "dcu"
"""Name of Dataproc's compute unit among your own prices."""
SPARK_DCUS = 16.0
"""Data compute units of a batch with the driver and the two executors that Dataproc begins with."""
SPARK_CORES = 12
"""Their cores."""


def hourly(
    settings: GoogleCloudSettings,
    machines: MachineSettings | EndpointMachineSettings,
    service: type[RemoteService] = VertexCustomJobs,
) -> float | None:
    """Dollars of one machine in an hour, as it is bought; None where its price is not known."""
    return machine_price(settings, machines.machine_type, machines.is_cheaper, service)


def machine_price(
    settings: GoogleCloudSettings,
    machine_type: str,
    is_cheaper: bool,
    service: type[RemoteService] = VertexCustomJobs,
) -> float | None:
    """Dollars of a machine in an hour, spot or flex-start if `is_cheaper`; None if not known.

    Your own prices apply to every service. The list does not include accelerators that the settings
    add to a machine, so such a machine has no list price.
    """
    machines = (settings.training, settings.evaluation, settings.endpoint)
    added = {m.machine_type for m in machines if m.accelerator_count} - BUILT_IN.keys()
    # The settings may add accelerators to one machine of a type and none to another; then the type
    # has no list price at all, rather than one that is too low.
    list_price = None if machine_type in added else DOLLARS_AN_HOUR.get(machine_type)
    if list_price and service is not VertexCustomJobs:
        # The list has Vertex AI's prices; on the other services a machine costs no fee.
        list_price /= VERTEX_AI_FEE
    price = settings.cost.prices.get(machine_type, list_price)
    # `price and`, here and below: both an unknown price and one of 0 stay what they are.
    return price and price * (settings.cost.spot_factor if is_cheaper else 1.0)


def dcu_hourly(settings: GoogleCloudSettings) -> float:
    """Dollars of one of Dataproc's compute units in an hour."""
    list_price = DOLLARS_A_PREMIUM_DCU_HOUR if settings.batch.is_premium else DOLLARS_A_DCU_HOUR
    return settings.cost.prices.get(DCU, list_price)


def first_dcus(settings: GoogleCloudSettings) -> float:
    """Dataproc's compute units of a batch with the executors that it begins with, about."""
    batch = settings.batch
    return _dcus(batch.driver_cores + batch.first_executors * batch.cores_of_executor)


def _dcus(cores: int) -> float:
    return SPARK_DCUS * cores / SPARK_CORES


def machines_without_price(
    settings: GoogleCloudSettings, runner: TrainingPlace = "google_cloud"
) -> list[str]:
    """Machine types of training and evaluation whose price is not known."""
    machines = (settings.training, settings.evaluation) if runner != "local" else ()
    return sorted({m.machine_type for m in machines if hourly(settings, m) is None})


def how_to_price(machines: Sequence[str]) -> str:
    """What to write where a ceiling needs prices that are not known."""
    prices = ", ".join(f"{machine}: ..." for machine in machines)
    return (
        f"`cost` limits what runs may cost, and the price of {', '.join(machines)} is not known. "
        "Give it in the cloud project's file, in dollars per hour of one machine with its "
        "accelerators: "
        f"`cost: {{prices: {{{prices}}}}}`"
    )


def most_of_run(
    settings: GoogleCloudSettings, runner: TrainingPlace = "google_cloud", batches: bool = True
) -> str:
    """The most that a run's jobs cost if no limit ends them, in words, as far as known.

    `batches` says whether Spark stages run as batches.
    """
    batch, starts = settings.batch, settings.restarts + 1
    batch_cost = "no `batch.maximum_executors` bounds a Spark batch"
    if batch.most_executors is not None:
        dcus = _dcus(batch.driver_cores + batch.most_executors * batch.cores_of_executor)
        dollars = dcu_hourly(settings) * dcus * batch.time_to_live_hours
        batch_cost = f"a Spark batch costs at most about {dollars:,.2f} USD"
    lines = [f"{batch_cost} in its `time_to_live_hours`"] if batches else []
    jobs = {"training": settings.training, "evaluation": settings.evaluation}
    for name, machines in jobs.items() if runner != "local" else ():
        price = _dollars(settings, machines, machines.timeout_hours * starts)
        if price is None:
            lines.append(f"the price of the {name}'s {machines.machine_type} is not known")
        else:
            lines.append(
                f"the {name} at most about {price:,.2f} USD ({machines.replicas} machine(s), "
                f"`timeout_hours: {machines.timeout_hours:g}`, {starts} starts without a new "
                "checkpoint)"
            )
    return "; ".join(lines)


LEDGER = "costs"
"""Folder of the bucket; one object a job: `costs/<month>/<job>.json`."""
RECORD_SECONDS = 60.0
READ_AT_ONCE = 32
"""Entries of the ledger that are waited for together."""


class MachineHours(NamedTuple):
    """Hours that the machines of jobs existed together, in the unit that is paid for."""

    total: float = 0.0
    spot: float = 0.0
    """Of these, hours of spot and flex-start machines."""
    lost: float = 0.0
    """Hours since the newest checkpoint, or all without one, of jobs that lost their machines."""


@dataclass
class Spending:
    """The jobs of one asset in one Dagster run.

    A job is recorded in the ledger, under its own name, while it runs and when it has ended. So it
    is counted once, whoever follows it, and a run that dies leaves out a minute at most.
    """

    settings: GoogleCloudSettings
    machines: str
    """What is paid for: a machine type, or Dataproc's unit."""
    dollars_per_hour: float | None
    """Of one of them; None where the price is not known."""
    number: float
    """How many a job has, as far as the service does not count them itself."""
    run: str
    """The Dagster run's id."""
    last_saved: Callable[[], float | None] = lambda: None
    """When the newest checkpoint was saved, in seconds since the epoch; None without one."""
    training: TrainingPlace = "google_cloud"
    """Where training and evaluation run."""
    _jobs: dict[str, MachineHours] = field(default_factory=dict)
    _seen: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Per job: when it got its machines, which a service may no longer know once they are gone;
    when it was last looked at; the hours until then of units beyond its first ones."""
    # Read before each submission and not at each look, so what other runs spend while a job runs
    # counts only when the next job is submitted.
    _before: tuple[float, float] | None = None
    """Dollars of other jobs in the ledger, of this month and of this run; None until read."""
    _recorded: float = 0.0

    @property
    def hours(self) -> MachineHours:
        """Of the jobs that were followed here, so far."""
        return MachineHours(*map(sum, zip(*self._jobs.values(), strict=True)))

    @property
    def dollars(self) -> float:
        """The same in money; 0 where the price is not known."""
        return self.hours.total * (self.dollars_per_hour or 0.0)

    def check_before(self) -> None:
        """Refuse another job if a limit is reached, or if a limit is set and a price is not known.

        Raises:
            UserError: with the line to change.
        """
        if not self.settings.cost.has_limits:
            return
        # Checked for later stages as well: otherwise the first ones would be paid for in vain.
        own = [self.machines] if self.dollars_per_hour is None else []
        if unknown := own or machines_without_price(self.settings, self.training):
            raise UserError(how_to_price(unknown))
        self._before = self._read_ledger()
        reason = self._over()
        if reason:
            raise UserError(f"No job was started: {reason}")

    def objection(self, job: RemoteJob) -> str | None:
        """Record a job's cost so far; returns why it must not go on, if it exceeds a limit."""
        if not job.started:
            return None
        # Before the price is looked at: hours are shown even where nothing can be said about
        # dollars.
        self._jobs[_entry_name(job)] = self._count(job)
        if self.dollars_per_hour is None:
            return None
        now = time.monotonic()
        # At its end in any case: the last look may come within a minute of the one before.
        if job.phase.ended or now - self._recorded > RECORD_SECONDS:
            self._recorded = now
            self._record(job)
        # A job that has ended costs no more, and an objection would throw its result away.
        return None if job.phase.ended else self._over()

    def metadata(self) -> dict[str, Any]:
        """What an asset shows of it; no dollars where the price is not known."""
        hours = self.hours
        if not hours.total:
            return {}
        values: dict[str, Any] = {"billed": f"{hours.total:.4g} hours of {self.machines}"}
        if self.dollars_per_hour is not None:
            values[COST] = round(self.dollars, 4)
        if self.machines != DCU:
            values["spot_share"] = round(hours.spot / hours.total, 4)
            values["hours_lost"] = round(hours.lost, 4)
        return values

    def _count(self, job: RemoteJob) -> MachineHours:
        end, name = job.ended or time.time(), _entry_name(job)
        start, last_look, extra_hours = self._seen.get(name, (job.started, job.started, 0.0))
        start = min(job.started, start)
        # Dataproc reports a batch's billed hours only at its end, but adds executors long before.
        extra_hours += (end - last_look) / HOUR * max(0.0, job.units - self.number)
        self._seen[name] = start, end, extra_hours
        total = job.billed_hours or (end - start) / HOUR * self.number + extra_hours
        lost = 0.0
        if job.phase.ended and job.lost_machines:
            # What was saved before this job began says nothing of the hours that it lost.
            saved = max(start, self.last_saved() or 0.0)
            lost = max(0.0, end - saved) / HOUR * self.number
        return MachineHours(total, total if job.is_cheaper else 0.0, lost)

    def _over(self) -> str | None:
        """Which limit the recorded costs and these jobs reach together, in words."""
        limits = self.settings.cost
        if not limits.has_limits:
            return None
        if self._before is None:
            # For a job that an earlier process started, `check_before` was not called here.
            self._before = self._read_ledger()
        of_month, of_run = (recorded + self.dollars for recorded in self._before)
        for spent, limit, key in (
            (of_run, limits.run_limit, "run_limit"),
            (of_month, limits.monthly_limit, "monthly_limit"),
        ):
            if limit is not None and spent >= limit:
                return (
                    f"{spent:,.2f} USD have been spent, by the prices of this project, and "
                    f"`cost.{key}` is {limit:g}. Raise it in the cloud project's file and "
                    "materialize again: work resumes from what was saved."
                )
        return None

    def _read_ledger(self) -> tuple[float, float]:
        """Dollars of this month and of this run, without the jobs that are followed here."""
        of_month, of_run, _ = self._read_month(month := datetime.now(UTC))
        while True:
            # No job takes a month, so a month without jobs of this run is older than the run.
            month = month.replace(day=1) - timedelta(days=1)
            _, earlier, has_jobs = self._read_month(month)
            of_run += earlier
            if not has_jobs:
                return of_month, of_run

    def _read_month(self, month: datetime) -> tuple[float, float, bool]:
        """The same of one month; whether any job of this run began in it."""
        folder = f"gs://{self.settings.bucket}/{LEDGER}/{month:%Y-%m}"
        paths = [f"{folder}/{name}" for name in files.list_names(folder)]
        # Storage takes some 50 ms for each, so that one after the other a month takes minutes.
        with ThreadPoolExecutor(READ_AT_ONCE) as readers:
            entries = list(readers.map(_read_entry, paths))
        of_run = [entry for entry in entries if entry.run == self.run]
        dollars, dollars_of_run = (
            sum(entry.dollars for entry in some if entry.job not in self._jobs)
            for some in (entries, of_run)
        )
        return dollars, dollars_of_run, bool(of_run)

    def _record(self, job: RemoteJob) -> None:
        name = _entry_name(job)
        hours = self._jobs[name].total
        # By its start, so that an entry that is written again in the next month keeps its place.
        month = datetime.fromtimestamp(job.started, UTC).strftime("%Y-%m")
        dollars = hours * (self.dollars_per_hour or 0.0)
        entry = _Entry(job=name, run=self.run, machines=self.machines, hours=hours, dollars=dollars)
        path = f"gs://{self.settings.bucket}/{LEDGER}/{month}/{name.rsplit('/', 1)[-1]}.json"
        files.write(path, entry.model_dump_json().encode())


class _Entry(BaseModel):
    """What one job has cost so far."""

    job: str
    run: str
    machines: str
    hours: float
    dollars: float


def _read_entry(path: str) -> _Entry:
    try:
        return _Entry.model_validate_json(files.read(path))
    except ValidationError as error:
        raise UserError(
            f"{path}, which should say what a job has cost, cannot be read ({first_fault(error)}), "
            "and `cost` limits what all may cost together. Restore it, or move it away: then its "
            "job counts as free."
        ) from None


def _entry_name(job: RemoteJob) -> str:
    """A job's name in the ledger: its uid, since the name of a deleted job can be used again."""
    return job.uid or job.name


UTILIZATION = 0.35
"""Approximate share of the peak that training reaches here."""
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

    The Spark stages read `corpus_bytes` of text; repeats are counted among `training_tokens`.
    """
    spark = START_HOURS + corpus_bytes / 1e6 / SPARK_MEGABYTES_A_SECOND / 3600
    evaluated_tokens = min(training_tokens, 10_000_000)
    # Three models are measured, and a forward pass takes 2 operations a parameter and token.
    evaluation = _compute_hours(settings.evaluation, 3 * 2.0 * parameters * evaluated_tokens)
    batches = spark * SPARK_DCUS * dcu_hourly(settings)
    # Only the replicas that always run: how many the load adds is not known.
    price = hourly(settings, settings.endpoint)
    replicas = price and price * settings.endpoint.minimum_replicas
    return [
        Estimate("clean_corpus, tokenized_shards", spark, batches),
        estimate_training(settings, training_tokens, parameters),
        Estimate("eval_metrics", evaluation, _dollars(settings, settings.evaluation, evaluation)),
        Estimate("endpoint, a month of it", MONTH_HOURS, replicas and replicas * MONTH_HOURS),
    ]


def estimate_smoke(settings: GoogleCloudSettings, nodes: int = 1) -> list[Estimate]:
    """Hours and dollars of the smallest batch and jobs: mostly the start of their machines."""
    batch = START_HOURS * first_dcus(settings) * dcu_hourly(settings)
    training = settings.evaluation.model_copy(update={"replicas": nodes})
    machines = [training, serving_check_machine(settings)]
    return [
        Estimate("the smallest batch", START_HOURS, batch),
        *(
            Estimate(f"a job on {m.machine_type}", START_HOURS, _dollars(settings, m, START_HOURS))
            for m in machines
        ),
    ]


def estimate_training(
    settings: GoogleCloudSettings,
    tokens: int,
    parameters: int,
    service: type[RemoteService] = VertexCustomJobs,
) -> Estimate:
    """Hours and dollars of `checkpoint`: 6 operations a parameter and token (Kaplan et al. 2020).

    Repeats are counted among the tokens; `service` makes the machines.
    """
    hours = _compute_hours(settings.training, 6.0 * parameters * tokens)
    return Estimate("checkpoint", hours, _dollars(settings, settings.training, hours, service))


def _compute_hours(machines: MachineSettings, operations: float) -> float:
    chips = machines.tpu.chips if machines.tpu else machines.accelerator_count
    accelerators = max(1, chips) * machines.replicas
    chip = machines.tpu.generation if machines.tpu else None
    processor = chip or ACCELERATORS.get(machines.accelerator_type or "")
    peak = (processor.teraflops if processor else 1.0) * 1e12
    return START_HOURS + operations / (peak * UTILIZATION * accelerators) / 3600


def _dollars(
    settings: GoogleCloudSettings,
    machines: MachineSettings,
    hours: float,
    service: type[RemoteService] = VertexCustomJobs,
) -> float | None:
    price = hourly(settings, machines, service)
    return price and price * hours * machines.replicas


@dataclass(frozen=True)
class ActiveJob:
    """A job of a service that has not ended."""

    service: RemoteService
    job: RemoteJob
    dollars_per_hour: float | None
    """Of one of its machines; None where the price is not known."""

    @property
    def run(self) -> str:
        """The id of the Dagster run that submitted it; runs that adopted it are not known."""
        # Dataproc's values have to begin with a letter, so `as_dns_labels` put `x-` before an id
        # that begins with a digit.
        return self.job.labels.get(RUN_LABEL, "").removeprefix("x-")

    @property
    def hours(self) -> float:
        """Since it has its machines; 0 before."""
        return (time.time() - self.job.started) / HOUR if self.job.started else 0.0

    @property
    def dollars(self) -> float | None:
        """What it has cost so far; None where that is not known."""
        if self.dollars_per_hour is None or not self.job.machines:
            return None
        return self.hours * self.job.machines * self.dollars_per_hour

    def as_json(self) -> dict[str, Any]:
        """Its JSON values."""
        return {
            "job": self.job.name,
            "service": self.service.place.service,
            "state": self.job.phase.value,
            "machines": self.job.machines,
            "machine_type": self.job.machine_type,
            "since": datetime.fromtimestamp(self.job.created, UTC).isoformat(),
            "hours": self.hours,
            "dollars": self.dollars,
            "run": self.run,
        }

    def line(self) -> str:
        """In words, for one line."""
        kind = f"{self.job.machines} {self.job.machine_type}, " if self.job.machines else ""
        since = datetime.fromtimestamp(self.job.created, UTC)
        cost = "cost unknown" if self.dollars is None else f"{self.dollars:,.2f} USD so far"
        return (
            f"{self.job.name.rsplit('/', 1)[-1]} ({self.service.place.service}): "
            f"{self.job.in_words}, {kind}submitted {since:%Y-%m-%d %H:%M} UTC by run "
            f"{self.run[:8]}, {self.hours:.1f} h with machines, {cost}"
        )


SERVICES: tuple[type[RemoteService], ...] = (
    BatchJobs,
    VertexCustomJobs,
    DataprocBatches,
    TpuVms,
)


def active_jobs(settings: GoogleCloudSettings) -> tuple[list[ActiveJob], list[str]]:
    """All jobs of this project's runs that have not ended, or have machines.

    They are those of every service, whatever the settings are now. A service whose API is off has
    none.

    Returns:
        the jobs, and in words which services could not be asked.
    """
    jobs: list[ActiveJob] = []
    faults: list[str] = []
    # Cloud TPU names machine types differently.
    types = {machine.accelerator_type: name for name, machine in TPU_MACHINES.items()}
    for kind in SERVICES:
        try:
            client = kind.connect(settings.region, settings.api_endpoint)
            for service in (kind(client, at) for at in kind.parents(client, settings.parent)):
                for job in service.find():
                    if not job.phase.ended or job.holds_machines:
                        machine_type = types.get(job.machine_type, job.machine_type)
                        # By the service that has the job, not the one in the settings: prices
                        # differ by Vertex AI's fee.
                        price = machine_price(settings, machine_type, job.is_cheaper, kind)
                        jobs.append(ActiveJob(service, job, price))
        except Exception as error:
            # Whatever is wrong with one service, the machines of the others cost money.
            if not DISABLED_API.search(str(error)):
                place = replace(kind.kind, project=settings.project, region=settings.region)
                faults.append(" ".join(refusal(error, "to list its jobs", place)).strip())
    return jobs, faults


def end_jobs(jobs: Iterable[ActiveJob], report: Report) -> tuple[list[ActiveJob], list[str]]:
    """Have jobs ended, asking again while Google is busy.

    Returns:
        those that were, and in words why others were not.
    """
    ended: list[ActiveJob] = []
    faults: list[str] = []
    for job in jobs:
        try:
            end_job(job.service, job.job, report)
            ended.append(job)
        except Exception as error:
            # Whatever is wrong with one job, the others cost money and are ended.
            lines = refusal(error, f"to end {job.job.name}", job.service.place)
            faults.append(" ".join(lines).strip())
    return ended, faults
