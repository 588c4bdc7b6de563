"""The jobs that cost money now: which there are, since when, for how much, and their end."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from artifacts.progress import Report
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.spending import machine_price
from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.remote_job import end_job
from llm_assets.pipes.service import RUN_LABEL, RemoteJob, RemoteService
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs

HOUR = 3600.0


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
        cost = "price unknown" if self.dollars is None else f"{self.dollars:,.2f} USD so far"
        return (
            f"{self.job.name.rsplit('/', 1)[-1]} ({self.service.place.service}): "
            f"{self.job.in_words}, {kind}since {since:%Y-%m-%d %H:%M} UTC, {self.hours:.1f} h, "
            f"{cost}, of run {self.run[:8]}"
        )

    def end(self, report: Report) -> None:
        """Have it ended, asking again while Google is busy; raises what Google raises for good."""
        end_job(self.service, self.job, report)


def active_jobs(settings: GoogleCloudSettings) -> Iterator[ActiveJob]:
    """All jobs of this project's runs that have not ended, of every service."""
    for kind in (BatchJobs, VertexCustomJobs, DataprocBatches):
        client = kind.connect(settings.region, settings.api_endpoint)
        service = kind(client, settings.parent)
        for job in service.find():
            if not job.phase.ended:
                price = machine_price(settings, job.machine_type, job.is_cheaper)
                yield ActiveJob(service, job, price)
