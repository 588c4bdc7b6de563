"""Cloud TPU: queued resources, whose machines run their startup script and bill until deleted."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.cloud import tpu_v2
from google.cloud.location import locations_pb2
from google.protobuf import empty_pb2

from tests.stand_ins import discovery
from tests.stand_ins.conformance import check_rights
from tests.stand_ins.faults import RpcFailed, already_exists, not_found
from tests.stand_ins.grpc_server import plain_types
from tests.stand_ins.http_server import Answer, HttpServer, json_answer, start_http_server
from tests.stand_ins.job_rules import check_queued_resource
from tests.stand_ins.machine_service import POLL_SECONDS, MachineService, MadeMachine, now
from tests.stand_ins.processes import RealProcess

State = tpu_v2.QueuedResourceState.State
By = tpu_v2.QueuedResourceState.StateInitiator
LOCATION_METHODS = {
    "/google.cloud.location.Locations/ListLocations": plain_types(
        locations_pb2.ListLocationsRequest, locations_pb2.ListLocationsResponse
    ),
}
"""Every service has them; of Cloud TPU alone they are asked for."""
COMMANDS = Path(__file__).parent / "tpu_commands"
DELETE_NODE = "tpu.projects.locations.nodes.delete"
NO_QUOTA = (
    "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 "
    "in zone us-central1-a."
)
TOO_LATE = "The request could not be fulfilled before its valid until time."


@dataclass
class TpuRequest:
    """A queued resource, and its machine if it has one."""

    job: tpu_v2.QueuedResource
    machine: MadeMachine | None = None
    process: RealProcess | None = None
    metadata: HttpServer | None = None
    made: Any = None
    """When its machine was."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Its machine, or the wish for one."""


class Tpu(MachineService[TpuRequest]):
    """The Cloud TPU of all zones, and its bill."""

    def __init__(
        self,
        token: Callable[[], object],
        authorize: Callable[[str | None], str],
        allows: Callable[[str, str, str], bool],
        *parts: Any,
    ) -> None:
        """Nothing is asked for yet.

        Args:
            token: a new one of the machines' account.
            authorize: the account of a request's credentials; refuses others.
        """
        super().__init__(*parts)
        self._token, self._authorize, self._allows = token, authorize, allows

    def log(self, name: str) -> str:
        """What a request's machine printed."""
        process = self._made[name].process
        return process.log() if process else ""

    def preempt(self, name: str) -> None:
        """Take a machine away, or what was to become one."""
        self._suspend(self._made[name], By.SERVICE)

    def hang(self, name: str) -> None:
        """Have a machine do nothing any more, of which nobody is told."""
        process = self._made[name].process
        assert process is not None
        process.end()

    def create_queued_resource(self, request: tpu_v2.CreateQueuedResourceRequest) -> Any:
        check_queued_resource(request)
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        with self._lock:
            if name in self._made:
                raise already_exists(name)
            resource = tpu_v2.QueuedResource(request.queued_resource)
            resource.name, resource.create_time = name, now()
            resource.state.state = State.CREATING
            made = self._made[name] = TpuRequest(resource)
        threading.Thread(target=self._grant, args=(made,), daemon=True).start()
        return self._operations.run(request.parent, lambda: tpu_v2.QueuedResource(resource))

    def get_queued_resource(self, request: tpu_v2.GetQueuedResourceRequest) -> Any:
        return tpu_v2.QueuedResource(self._find(request.name).job)

    def list_queued_resources(self, request: tpu_v2.ListQueuedResourcesRequest) -> Any:
        found = [job for job in self.jobs() if job.name.startswith(f"{request.parent}/")]
        return tpu_v2.ListQueuedResourcesResponse(queued_resources=found)

    def delete_queued_resource(self, request: tpu_v2.DeleteQueuedResourceRequest) -> Any:
        found = self._find(request.name)
        if found.machine and not found.machine.until and not request.force:
            text = f"{request.name} has a running node: delete that first, or use force."
            raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, text)

        def mark() -> None:
            found.job.state.state = State.DELETING

        return self._delete(request.name, mark)

    def list_locations(self, request: locations_pb2.ListLocationsRequest) -> Any:
        zones = ("europe-west4-a", *(f"us-central1-{letter}" for letter in "abcf"))
        found = [
            locations_pb2.Location(name=f"{request.name}/locations/{zone}", location_id=zone)
            for zone in zones
        ]
        return locations_pb2.ListLocationsResponse(locations=found)

    def get_node(self, request: tpu_v2.GetNodeRequest) -> Any:
        found = self._of_node(request.name)
        node = tpu_v2.Node(found.job.tpu.node_spec[0].node)
        node.name, node.create_time = request.name, found.made
        node.state = tpu_v2.Node.State.READY
        return node

    def delete_node(self, request: tpu_v2.DeleteNodeRequest) -> Any:
        found = self._of_node(request.name)

        def delete() -> empty_pb2.Empty:
            self._suspend(found, By.USER)
            return empty_pb2.Empty()

        return self._operations.run(request.name.rpartition("/nodes/")[0], delete)

    def _of_node(self, name: str) -> TpuRequest:
        found = self._find(name.replace("/nodes/", "/queuedResources/"))
        if found.machine is None or found.machine.until is not None:
            raise not_found(name)
        return found

    def _grant(self, request: TpuRequest) -> None:
        """From the queue to a machine that runs."""
        state, policy = request.job.state, request.job.queueing_policy
        seconds = policy.valid_until_duration.total_seconds()
        deadline = time.monotonic() + (seconds or float("inf"))
        if self.over_quota:
            self._fail(request, grpc.StatusCode.RESOURCE_EXHAUSTED, NO_QUOTA)
            return
        self._set(request, State.WAITING_FOR_RESOURCES)
        while self.hold_pending and not request.gone.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                self._fail(request, grpc.StatusCode.DEADLINE_EXCEEDED, TOO_LATE)
                return
        self._set(request, State.PROVISIONING)
        with self._lock:
            if request.gone.is_set():
                return
            request.machine = MadeMachine(request.job.name, time.monotonic())
            request.made = now()
            self.bill.append(request.machine)
            self._mount.pull()
            self._boot(request)
            state.state = State.ACTIVE

    def _set(self, request: TpuRequest, state: Any) -> None:
        with self._lock:
            if not request.gone.is_set():
                request.job.state.state = state

    def _fail(self, request: TpuRequest, code: grpc.StatusCode, message: str) -> None:
        state = request.job.state
        state.failed_data.error = {"code": code.value[0], "message": message}
        self._set(request, State.FAILED)

    def _boot(self, request: TpuRequest) -> None:
        """Run the startup script, which finds metadata server, Google's APIs and docker."""
        node = request.job.tpu.node_spec[0].node
        folder = self._folder / str(next(self._numbers))
        folder.mkdir(parents=True)
        script = folder / "startup-script"
        script.write_text(node.metadata["startup-script"])
        script.chmod(0o755)
        request.metadata = start_http_server(lambda *asked: self._answer(request.job, node, *asked))
        images = {
            name: {
                "root": str(image.root),
                "entrypoint": list(image.entrypoint),
                "environment": dict(image.environment),
            }
            for name, image in self._images.items()
        }
        python = Path(sys.executable).parent
        environment = {
            **self._environment,
            "PATH": f"{COMMANDS}:{python}:{os.environ['PATH']}",
            "GCE_METADATA_HOST": request.metadata.url.removeprefix("http://"),
            "TPU_API_HOST": request.metadata.url,
            "GCS_MOUNT": str(self._mount.view(f"tpu-{folder.name}")),
            "LOCAL_IMAGES": json.dumps(images),
            "MACHINE": str(folder),
        }
        request.process = RealProcess([str(script)], folder, environment, folder / "log")

    def _answer(
        self,
        resource: tpu_v2.QueuedResource,
        node: tpu_v2.Node,
        verb: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
    ) -> Answer:
        """What a machine asks its metadata server, and Cloud TPU's REST API."""
        _, inside, path = target.partition("/computeMetadata/v1/instance/")
        if inside:
            if headers.get("metadata-flavor") != "Google":
                return 403, [], b""
            if path == "service-accounts/default/token":
                return json_answer(200, self._token())
            value = node.metadata.get(path.removeprefix("attributes/"))
            return (404, [], b"") if value is None else (200, [], value.encode())
        if verb != "DELETE" or not discovery.pattern("tpu.v2", DELETE_NODE).fullmatch(target):
            return 404, [], b""
        try:
            caller = self._authorize(headers.get("authorization"))
            check_rights(DELETE_NODE, None, {"caller": caller}, self._allows)
            self.delete_node(tpu_v2.DeleteNodeRequest(name=target.removeprefix("/v2/")))
        except RpcFailed as failure:
            return json_answer(403, {"error": {"message": failure.message}})
        return json_answer(200, {"name": f"{resource.name}/operations/own"})

    def _suspend(self, request: TpuRequest, by: Any) -> None:
        """Delete a request's machine, or end its wait for one, by whose wish it says."""
        state = request.job.state
        with self._lock:
            if request.gone.is_set():
                return
            state.state, state.state_initiator = State.SUSPENDING, by
            request.gone.set()
        time.sleep(self.deletion_seconds)
        self._take_down(request)
        if state.state == State.SUSPENDING:
            state.state = State.SUSPENDED

    def _take_down(self, request: TpuRequest) -> None:
        with self._lock:
            request.gone.set()
        if request.process:
            request.process.end()
            self._mount.push()
        if request.metadata:
            request.metadata.stop()
            request.metadata = None
        if request.machine:
            request.machine.until = request.machine.until or time.monotonic()
