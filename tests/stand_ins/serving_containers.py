"""The containers behind a Vertex AI endpoint: started, probed and ended as Google does it."""

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.cloud import aiplatform_v1

from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.processes import LocalImage, RealProcess, free_port

LIVENESS_FAILURES = 4
"""Connections refused in a row after which a container is ended; "Custom container requirements for
inference", section "Liveness checks"."""
LIVENESS_SECONDS = 10.0
"""Between two of them, by the same page."""


@dataclass
class Replica:
    """The container of a deployed model."""

    process: RealProcess
    port: int
    predict_route: str
    """Empty where the container's own routes are asked."""


class ServingContainers:
    """Starts containers from images, each a real process on a port of loopback."""

    def __init__(
        self,
        folder: Path,
        images: Mapping[str, LocalImage],
        environment: Mapping[str, str],
        copy_model: Callable[[str], str],
    ) -> None:
        """Nothing is started yet.

        Args:
            copy_model: copies a folder of a bucket into Google's own and returns its address:
                `AIP_STORAGE_URI` is never the address that was uploaded.
        """
        self.liveness_seconds = LIVENESS_SECONDS
        self._folder = folder
        self._images = images
        self._environment = environment
        self._copy_model = copy_model

    def start(
        self, endpoint: str, deployed: aiplatform_v1.DeployedModel, model: aiplatform_v1.Model
    ) -> Replica:
        """Start a deployed model's container, with what Vertex AI puts into its environment."""
        spec = model.container_spec
        image = self._images.get(spec.image_uri)
        if image is None:
            raise RpcFailed(
                grpc.StatusCode.NOT_FOUND, f"Failed to pull image {spec.image_uri}: not found."
            )
        # A container has ports of its own; here all share one machine.
        port = free_port()
        machine = deployed.dedicated_resources.machine_spec
        environment = {
            "AIP_MODE": "PREDICTION",
            "AIP_HTTP_PORT": str(port),
            "AIP_HEALTH_ROUTE": spec.health_route,
            "AIP_STORAGE_URI": self._copy_model(model.artifact_uri),
            "AIP_ENDPOINT_ID": endpoint.rsplit("/", 1)[1],
            "AIP_DEPLOYED_MODEL_ID": deployed.id,
            "AIP_MACHINE_TYPE": machine.machine_type,
        }
        if spec.predict_route:
            environment["AIP_PREDICT_ROUTE"] = spec.predict_route
        if machine.accelerator_type:
            environment["AIP_ACCELERATOR_TYPE"] = machine.accelerator_type.name
        given = {variable.name: variable.value for variable in spec.env}
        command = [*(list(spec.command) or image.entrypoint), *spec.args]
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{deployed.id}.log"
        whole = {**self._environment, **environment, **image.environment, **given}
        return Replica(image.start(command, whole, log, {}), port, spec.predict_route)

    def wait_healthy(
        self, replica: Replica, spec: aiplatform_v1.ModelContainerSpec, hold: threading.Event
    ) -> None:
        """Return once the container is healthy and nothing holds it; raise where it cannot be.

        A startup probe, where there is one, keeps the liveness check away until it has succeeded,
        and ends the container after `failure_threshold` failures (Kubernetes' documentation, which
        `ModelContainerSpec.startup_probe` refers to). Without one, a port that is not open is no
        sign of life.
        """
        started = time.monotonic()
        threshold = spec.startup_probe.failure_threshold or 3
        allowed = spec.startup_probe.period_seconds * threshold or float("inf")
        deadline = started + min(spec.deployment_timeout.total_seconds(), allowed)
        looked, refused = started, 0
        route = spec.startup_probe.http_get.path or spec.health_route
        while not _is_healthy(replica.port, route) or hold.is_set():
            now = time.monotonic()
            if not spec.startup_probe and now - looked > self.liveness_seconds:
                looked, refused = now, 0 if _listens(replica.port) else refused + 1
            if replica.process.poll() is not None or now > deadline:
                self._fail(replica, "Model server exited unexpectedly.")
            if refused >= LIVENESS_FAILURES:
                self._fail(replica, "Model server failed its liveness check and was ended.")
            time.sleep(0.1)

    def _fail(self, replica: Replica, message: str) -> None:
        replica.process.end()
        raise RpcFailed(
            grpc.StatusCode.INTERNAL,
            f"{message} Model server logs: {replica.process.log()[-2000:]}",
        )


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _is_healthy(port: int, route: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{route}", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
