"""Vertex AI endpoints: real serving processes behind a traffic split."""

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.cloud import aiplatform_v1
from google.protobuf import empty_pb2

from tests.stand_ins.faults import RpcFailed, not_found
from tests.stand_ins.grpc_server import Operations
from tests.stand_ins.models import VertexModels, refuse
from tests.stand_ins.prediction import PredictionServer
from tests.stand_ins.processes import LocalImage, RealProcess, free_port

ENDPOINT_ID = re.compile(r"[a-z][a-z0-9-]{0,61}[a-z0-9]|[1-9][0-9]{0,8}")
DEPLOYED_ID = re.compile(r"[0-9]{1,10}")
NEW_MODEL = "0"
"""Stands in a deploy request's traffic split for the model that is being deployed."""


@dataclass
class Replica:
    """The container of a deployed model."""

    process: RealProcess
    port: int
    predict_route: str


class VertexEndpoints:
    """The endpoint service of one region."""

    def __init__(
        self,
        folder: Path,
        images: Mapping[str, LocalImage],
        environment: Mapping[str, str],
        models: VertexModels,
        operations: Operations,
        authorize: Callable[[str | None], None],
    ) -> None:
        self.quota = 100
        """Models that may be deployed at once, for lack of more machines."""
        self.hold_deployments = threading.Event()
        """While set, deployments are under way and do not end."""
        self._folder = folder
        self._images = images
        self._environment = environment
        self._models = models
        self._operations = operations
        self._endpoints: dict[str, aiplatform_v1.Endpoint] = {}
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._deploying: dict[tuple[str, str], Replica | None] = {}
        self._lock = threading.RLock()
        self.prediction = PredictionServer(self.find, self.replica, authorize)

    def stop(self) -> None:
        """End every process and the prediction server."""
        self.reset()
        self.prediction.stop()

    def reset(self) -> None:
        """Forget all endpoints, ending their processes."""
        self.hold_deployments.clear()
        with self._lock:
            for replica in [*self._replicas.values(), *self._deploying.values()]:
                if replica is not None:
                    replica.process.end()
            self._replicas.clear()
            self._endpoints.clear()
            self._deploying.clear()
            self.quota = 100
            self.prediction.reset()

    def find(self, name: str) -> aiplatform_v1.Endpoint:
        with self._lock:
            if name not in self._endpoints:
                raise not_found(name)
            return self._endpoints[name]

    def endpoints(self) -> list[aiplatform_v1.Endpoint]:
        """All endpoints."""
        return list(self._endpoints.values())

    def replica(self, endpoint: str, deployed_id: str) -> Replica:
        """The container of a deployed model."""
        return self._replicas[endpoint, deployed_id]

    def processes(self) -> list[RealProcess]:
        """The containers that run."""
        return [replica.process for replica in self._replicas.values()]

    def create_endpoint(self, request: aiplatform_v1.CreateEndpointRequest) -> Any:
        if not ENDPOINT_ID.fullmatch(request.endpoint_id):
            raise refuse(f"endpoint_id {request.endpoint_id!r} is not valid.")
        name = f"{request.parent}/endpoints/{request.endpoint_id}"
        with self._lock:
            if name in self._endpoints:
                raise RpcFailed(grpc.StatusCode.ALREADY_EXISTS, f"{name} already exists.")
            endpoint = aiplatform_v1.Endpoint(request.endpoint)
            endpoint.name = name
            if endpoint.dedicated_endpoint_enabled:
                endpoint.dedicated_endpoint_dns = self.prediction.url
            self._endpoints[name] = endpoint
        return self._operations.run(name, lambda: endpoint)

    def get_endpoint(self, request: aiplatform_v1.GetEndpointRequest) -> Any:
        return aiplatform_v1.Endpoint(self.find(request.name))

    def update_endpoint(self, request: aiplatform_v1.UpdateEndpointRequest) -> Any:
        endpoint = self.find(request.endpoint.name)
        if list(request.update_mask.paths) != ["traffic_split"]:
            raise refuse("Only traffic_split is updated here.")
        self._split(endpoint, dict(request.endpoint.traffic_split))
        return aiplatform_v1.Endpoint(endpoint)

    def deploy_model(self, request: aiplatform_v1.DeployModelRequest) -> Any:
        endpoint = self.find(request.endpoint)
        deployed = aiplatform_v1.DeployedModel(request.deployed_model)
        if not DEPLOYED_ID.fullmatch(deployed.id):
            raise refuse(f"deployed_model.id {deployed.id!r} is not valid.")
        model = self._models.find(deployed.model)
        deployed.model, deployed.model_version_id = model.name, model.version_id
        key = (endpoint.name, deployed.id)
        with self._lock:
            if key in self._deploying or deployed.id in {d.id for d in endpoint.deployed_models}:
                raise RpcFailed(grpc.StatusCode.ALREADY_EXISTS, f"{deployed.id} is there already.")
            self._deploying[key] = None
        split = dict(request.traffic_split)
        return self._operations.run(
            endpoint.name, lambda: self._deploy(endpoint, deployed, model, split)
        )

    def undeploy_model(self, request: aiplatform_v1.UndeployModelRequest) -> Any:
        endpoint = self.find(request.endpoint)
        wanted = request.deployed_model_id
        with self._lock:
            if wanted not in {d.id for d in endpoint.deployed_models}:
                raise not_found(wanted)
            last = len(endpoint.deployed_models) == 1
            if endpoint.traffic_split.get(wanted) and not last and not request.traffic_split:
                raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, f"{wanted} still has traffic.")
        return self._operations.run(endpoint.name, lambda: self._undeploy(endpoint, wanted))

    def delete_endpoint(self, request: aiplatform_v1.DeleteEndpointRequest) -> Any:
        endpoint = self.find(request.name)
        if endpoint.deployed_models:
            raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, "There are deployed models.")
        del self._endpoints[request.name]
        return self._operations.run(request.name, empty_pb2.Empty)

    def _split(self, endpoint: aiplatform_v1.Endpoint, split: dict[str, int]) -> None:
        known = {deployed.id for deployed in endpoint.deployed_models}
        if not set(split) <= known or (split and sum(split.values()) != 100):
            raise refuse(f"The traffic split {split} does not fit {sorted(known)} or is not 100.")
        with self._lock:
            endpoint.traffic_split = split

    def _deploy(
        self,
        endpoint: aiplatform_v1.Endpoint,
        deployed: aiplatform_v1.DeployedModel,
        model: aiplatform_v1.Model,
        split: dict[str, int],
    ) -> aiplatform_v1.DeployModelResponse:
        key = (endpoint.name, deployed.id)
        try:
            replica = self._start(key, deployed, model)
            while self.hold_deployments.is_set():
                time.sleep(0.05)
            self._wait_healthy(replica, model)
        finally:
            self._deploying.pop(key, None)
        with self._lock:
            self._replicas[key] = replica
            endpoint.deployed_models = [*endpoint.deployed_models, deployed]
            if split:
                self._split(
                    endpoint,
                    {deployed.id if id == NEW_MODEL else id: share for id, share in split.items()},
                )
        return aiplatform_v1.DeployModelResponse(deployed_model=deployed)

    def _start(
        self,
        key: tuple[str, str],
        deployed: aiplatform_v1.DeployedModel,
        model: aiplatform_v1.Model,
    ) -> Replica:
        if len(self._replicas) >= self.quota:
            raise RpcFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "The following quotas are exceeded: CustomModelServingL4GPUsPerProject",
            )
        spec = model.container_spec
        image = self._images.get(spec.image_uri)
        if image is None:
            raise RpcFailed(
                grpc.StatusCode.NOT_FOUND, f"Failed to pull image {spec.image_uri}: not found."
            )
        # A container has ports of its own; here all share one machine.
        port = free_port()
        environment = {
            "AIP_MODE": "PREDICTION",
            "AIP_HTTP_PORT": str(port),
            "AIP_PREDICT_ROUTE": spec.predict_route,
            "AIP_HEALTH_ROUTE": spec.health_route,
            "AIP_STORAGE_URI": model.artifact_uri,
            "AIP_ENDPOINT_ID": key[0].rsplit("/", 1)[1],
            "AIP_DEPLOYED_MODEL_ID": deployed.id,
            "AIP_MACHINE_TYPE": deployed.dedicated_resources.machine_spec.machine_type,
        }
        given = {variable.name: variable.value for variable in spec.env}
        command = [*(list(spec.command) or image.entrypoint), *spec.args]
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{deployed.id}.log"
        whole = {**self._environment, **environment, **image.environment, **given}
        with self._lock:
            if key not in self._deploying:
                raise RpcFailed(grpc.StatusCode.CANCELLED, "The endpoint was forgotten.")
            process = RealProcess(command, image.root, whole, log)
            replica = self._deploying[key] = Replica(process, port, spec.predict_route)
        return replica

    def _wait_healthy(self, replica: Replica, model: aiplatform_v1.Model) -> None:
        url = f"http://127.0.0.1:{replica.port}{model.container_spec.health_route}"
        deadline = time.monotonic() + model.container_spec.deployment_timeout.total_seconds()
        while not _is_healthy(url):
            status = replica.process.poll()
            if status is not None or time.monotonic() > deadline:
                replica.process.end()
                raise RpcFailed(
                    grpc.StatusCode.INTERNAL,
                    "Model server exited unexpectedly. Model server logs: "
                    + replica.process.log()[-2000:],
                )
            time.sleep(0.1)

    def _undeploy(
        self, endpoint: aiplatform_v1.Endpoint, wanted: str
    ) -> aiplatform_v1.UndeployModelResponse:
        self._replicas.pop((endpoint.name, wanted)).process.end(grace_seconds=5)
        with self._lock:
            endpoint.deployed_models = [d for d in endpoint.deployed_models if d.id != wanted]
            split = {key: share for key, share in endpoint.traffic_split.items() if key != wanted}
            endpoint.traffic_split = split
        return aiplatform_v1.UndeployModelResponse()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
