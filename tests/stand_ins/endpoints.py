"""Vertex AI endpoints: real serving processes behind a traffic split.

The rules of a split and of a removal are those of `Endpoint.traffic_split` and
`UndeployModelRequest.traffic_split`: shares sum to 100 or there are none, and a deployed model goes
only when it has no traffic, the last one too.
"""

import re
import threading
from collections.abc import Callable
from typing import Any

import grpc
from google.cloud import aiplatform_v1
from google.protobuf import empty_pb2

from tests.stand_ins.faults import RpcFailed, already_exists, invalid, not_found
from tests.stand_ins.grpc_server import Operations
from tests.stand_ins.job_rules import check_machine
from tests.stand_ins.models import VertexModels
from tests.stand_ins.prediction import PredictionServer
from tests.stand_ins.processes import RealProcess
from tests.stand_ins.serving_containers import LIVENESS_SECONDS, Replica, ServingContainers

ENDPOINT_ID = re.compile(r"[a-z][a-z0-9-]{0,61}[a-z0-9]|[1-9][0-9]{0,8}")
DEPLOYED_ID = re.compile(r"[0-9]{1,10}")
NEW_MODEL = "0"
"""Stands in a deploy request's traffic split for the model that is being deployed."""


class VertexEndpoints:
    """The endpoint service of one region."""

    def __init__(
        self,
        containers: ServingContainers,
        models: VertexModels,
        operations: Operations,
        authorize: Callable[[str | None], None],
    ) -> None:
        self.hold_deployments = threading.Event()
        """While set, deployments are under way and do not end."""
        self.containers = containers
        self._models = models
        self._operations = operations
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._deploying: dict[tuple[str, str], Replica | None] = {}
        self._lock = threading.RLock()
        self.reset()
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
            self._deploying.clear()
            self._endpoints: dict[str, aiplatform_v1.Endpoint] = {}
            self.quota = 100
            """Models that may be deployed at once, for lack of more machines."""
            self.containers.liveness_seconds = LIVENESS_SECONDS

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
            raise invalid(f"endpoint_id {request.endpoint_id!r} is not valid.")
        name = f"{request.parent}/endpoints/{request.endpoint_id}"
        with self._lock:
            if name in self._endpoints:
                raise already_exists(name)
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
        self._refuse_while_changing(endpoint.name)
        if list(request.update_mask.paths) != ["traffic_split"]:
            raise invalid("Only traffic_split is updated here.")
        self._split(endpoint, dict(request.endpoint.traffic_split))
        return aiplatform_v1.Endpoint(endpoint)

    def deploy_model(self, request: aiplatform_v1.DeployModelRequest) -> Any:
        endpoint = self.find(request.endpoint)
        deployed = aiplatform_v1.DeployedModel(request.deployed_model)
        if not DEPLOYED_ID.fullmatch(deployed.id):
            raise invalid(f"deployed_model.id {deployed.id!r} is not valid.")
        resources = deployed.dedicated_resources
        check_machine(resources.machine_spec)
        least, most = resources.min_replica_count, resources.max_replica_count
        if least < 1 or 0 < most < least:
            raise invalid(f"From {least} to {most} replicas are not valid.")
        model = self._models.find(deployed.model)
        if model.container_spec.invoke_route_prefix and not endpoint.dedicated_endpoint_enabled:
            raise invalid("Models with invoke_route_prefix need dedicated endpoints.")
        deployed.model, deployed.model_version_id = model.name, model.version_id
        key = (endpoint.name, deployed.id)
        with self._lock:
            if key in self._deploying or deployed.id in {d.id for d in endpoint.deployed_models}:
                raise already_exists(deployed.id)
            self._refuse_while_changing(endpoint.name)
            self._deploying[key] = None
        split = dict(request.traffic_split)
        return self._operations.run(
            endpoint.name, lambda: self._deploy(endpoint, deployed, model, split)
        )

    def undeploy_model(self, request: aiplatform_v1.UndeployModelRequest) -> Any:
        endpoint = self.find(request.endpoint)
        self._refuse_while_changing(endpoint.name)
        wanted, split = request.deployed_model_id, dict(request.traffic_split)
        if wanted not in {deployed.id for deployed in endpoint.deployed_models}:
            raise not_found(wanted)
        if (split or endpoint.traffic_split).get(wanted):
            raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, f"{wanted} still has traffic.")
        return self._operations.run(endpoint.name, lambda: self._undeploy(endpoint, wanted, split))

    def delete_endpoint(self, request: aiplatform_v1.DeleteEndpointRequest) -> Any:
        endpoint = self.find(request.name)
        self._refuse_while_changing(endpoint.name)
        if endpoint.deployed_models:
            raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, "There are deployed models.")
        del self._endpoints[request.name]
        return self._operations.run(request.name, empty_pb2.Empty)

    def _refuse_while_changing(self, name: str) -> None:
        """One change at a time, as Vertex AI's own words have it."""
        running = self._operations.running(name)
        if running:
            text = f"There are other operations running on the Endpoint {name}: {running[0]}"
            raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, text)

    def _split(self, endpoint: aiplatform_v1.Endpoint, split: dict[str, int]) -> None:
        known = {deployed.id for deployed in endpoint.deployed_models}
        if not set(split) <= known or (split and sum(split.values()) != 100):
            raise invalid(f"The traffic split {split} does not fit {sorted(known)} or is not 100.")
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
            self.containers.wait_healthy(replica, model.container_spec, self.hold_deployments)
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
            text = "The following quotas are exceeded: CustomModelServingL4GPUsPerProject"
            raise RpcFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        replica = self.containers.start(key[0], deployed, model)
        with self._lock:
            if key not in self._deploying:
                replica.process.end()
                raise RpcFailed(grpc.StatusCode.CANCELLED, "The endpoint was forgotten.")
            self._deploying[key] = replica
        return replica

    def _undeploy(
        self, endpoint: aiplatform_v1.Endpoint, wanted: str, split: dict[str, int]
    ) -> aiplatform_v1.UndeployModelResponse:
        self._replicas.pop((endpoint.name, wanted)).process.end(grace_seconds=5)
        with self._lock:
            endpoint.deployed_models = [d for d in endpoint.deployed_models if d.id != wanted]
        if split:
            self._split(endpoint, split)
        return aiplatform_v1.UndeployModelResponse()
