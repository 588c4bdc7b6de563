"""What jobs have cost, kept in the bucket, and the ceilings that they are held under."""

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from artifacts.errors import UserError
from artifacts.storage import files
from artifacts.store.manifest import COST
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.pipes.service import RemoteJob

LEDGER = "costs"
"""Folder of the bucket; one object a job: `costs/<month>/<job>.json`."""
RECORD_SECONDS = 60.0
HOUR = 3600.0


@dataclass
class Spending:
    """The jobs of one asset in one Dagster run.

    A job is entered into the ledger while it runs and when it has ended, by its own name. So each
    is counted once, whoever follows it, and a run that dies leaves at most a minute out.
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
    dollars: float = 0.0
    """Of the jobs that were followed here, so far."""
    hours: float = 0.0
    """Of all their machines, so far."""
    _jobs: dict[str, tuple[float, float]] = field(default_factory=dict)
    _before: tuple[float, float] = (0.0, 0.0)
    """Of this month and of this run, in the ledger by other jobs."""
    _recorded: float = 0.0

    def check_before(self) -> None:
        """Refuse another job where a ceiling is reached, or nobody knows what it would cost.

        Raises:
            UserError: with the line to change.
        """
        limits = self.settings.cost
        if limits.run_limit is None and limits.monthly_limit is None:
            return
        if self.dollars_per_hour is None:
            raise UserError(
                f"`cost` limits what runs may cost, and the price of {self.machines} is not "
                "known. Say it in the cloud project's file, in dollars per hour of one machine: "
                f"`cost: {{prices: {{{self.machines}: ...}}}}`"
            )
        self._before = self._read_ledger()
        reason = self._over()
        if reason:
            raise UserError(f"No job was started: {reason}")

    def objection(self, job: RemoteJob) -> str | None:
        """Enter a job's cost so far; says why it must not go on, where a ceiling is passed."""
        if self.dollars_per_hour is None or not job.started:
            return None
        seconds = (job.ended or time.time()) - job.started
        hours = job.billed_hours or seconds / HOUR * self.number
        self._jobs[job.name] = (hours, hours * self.dollars_per_hour)
        self.hours = sum(hours for hours, _ in self._jobs.values())
        self.dollars = sum(dollars for _, dollars in self._jobs.values())
        now = time.monotonic()
        if job.phase.ended or now - self._recorded > RECORD_SECONDS:
            self._recorded = now
            self._record(job)
        return None if job.phase.ended else self._over()

    def metadata(self) -> dict[str, Any]:
        """What an asset shows of it; nothing where the price is not known."""
        if self.dollars_per_hour is None:
            return {}
        return {
            COST: round(self.dollars, 4),
            "billed": f"{self.hours:.4g} hours of {self.machines}",
        }

    def _over(self) -> str | None:
        """In words, which ceiling is reached by what others cost and these jobs."""
        of_month, of_run = (before + self.dollars for before in self._before)
        limits = self.settings.cost
        for spent, limit, key in (
            (of_run, limits.run_limit, "run_limit"),
            (of_month, limits.monthly_limit, "monthly_limit"),
        ):
            if limit is not None and spent >= limit:
                return (
                    f"{spent:,.2f} USD of `cost.{key}: {limit:g}` are spent, by the prices of this "
                    "project. Raise it in the cloud project's file and materialize again: what was "
                    "saved is gone on with."
                )
        return None

    def _read_ledger(self) -> tuple[float, float]:
        """Dollars of this month and of this run, without the jobs that are followed here."""
        folder = f"gs://{self.settings.bucket}/{LEDGER}/{datetime.now(UTC):%Y-%m}"
        entries = [json.loads(files.read(f"{folder}/{n}")) for n in files.list_names(folder)]
        others = [entry for entry in entries if entry["job"] not in self._jobs]
        of_run = sum(entry["dollars"] for entry in others if entry["run"] == self.run)
        return sum(entry["dollars"] for entry in others), of_run

    def _record(self, job: RemoteJob) -> None:
        hours, dollars = self._jobs[job.name]
        month = datetime.fromtimestamp(job.started, UTC).strftime("%Y-%m")
        entry = {
            "job": job.name,
            "run": self.run,
            "machines": self.machines,
            "hours": hours,
            "dollars": dollars,
        }
        name = job.name.rsplit("/", 1)[-1]
        path = f"gs://{self.settings.bucket}/{LEDGER}/{month}/{name}.json"
        files.write(path, json.dumps(entry).encode())
