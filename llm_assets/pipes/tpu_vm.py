"""Runs containers on TPU machines, made by queued resources and deleted, with Dagster Pipes."""

import json
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dagster import PipesSession

from llm_assets.pipes import service, tpu_machine
from llm_assets.pipes.failures import NO_MACHINES, JobService
from llm_assets.pipes.remote_job import RemoteJobPipesClient

DELETION_SECONDS = 600.0
"""What Google may take to delete a machine."""
REPORT_SECONDS = 60.0
"""How often a machine says that it is there."""
SILENT_SECONDS = 600.0
"""A machine that has been silent for so long is lost."""
BOOT_SECONDS = 1800.0
"""The same for a machine that has never reported, counted from its creation."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""How long a request that has ended, which costs nothing, stays in Google's list, counted from its
creation. The record of how it ended stays longer: `infrastructure/storage.tf` deletes it after 30
days."""
PYTHON = "#!/usr/bin/env python3\n"
WITH_MACHINE = ("ACTIVE", "SUSPENDING")
PHASES = {"DELETING": service.Phase.CANCELLING, "FAILED": service.Phase.FAILED}


class TpuVms(service.RemoteService):
    """The queued resources (`tpu_v2.QueuedResource`) of one project and zone.

    Each is a job on a machine of its own. A queued resource does not end by itself: its machine
    exists until somebody deletes it. So the machine writes into the bucket how its container ended,
    and deletes itself, which makes the request SUSPENDED; the record in the bucket says why.
    """

    kind = JobService(
        "Cloud TPU",
        "tpu.googleapis.com",
        "roles/tpu.admin",
        addresses="A TPU machine of your own needs an external address, for its packages and "
        "images; one of Vertex AI does not (`training.runner: google_cloud`).",
    )
    generated = "google.cloud.tpu_v2", "TpuClient"
    address = "tpu.googleapis.com"
    collection = "queuedResources"
    page = "compute/tpus/details/{region}/{job}"
    log_filter = 'log_id("gcplogs-docker-driver") jsonPayload.container.name="/{job}"'

    _storage: Any = None

    @classmethod
    def parents(cls, client: Any, parent: str) -> list[str]:
        """The zones of a region that Cloud TPU has, whether or not they have TPUs now."""
        project, region = service.parse_parent(parent)
        request, zones = {"name": f"projects/{project}"}, list[str]()
        while True:
            page = client.list_locations(request, timeout=service.CALL_SECONDS)
            zones += [place.location_id for place in page.locations]
            if not page.next_page_token:
                break
            request["page_token"] = page.next_page_token
        own_zones = sorted(zone for zone in zones if zone.rpartition("-")[0] == region)
        return [f"projects/{project}/locations/{zone}" for zone in own_zones]

    def list_all(self, request: Mapping[str, str]) -> Iterable[Any]:
        return self._client.list_queued_resources(request, timeout=service.CALL_SECONDS)

    def labels_of(self, job: Any) -> dict[str, str]:
        specs = job.tpu.node_spec
        return dict(specs[0].node.labels) if len(specs) == 1 else {}

    def submit(
        self, short: str, labels: Mapping[str, str], session: PipesSession
    ) -> service.RemoteJob:
        self._forget_old()
        request = {
            "parent": self._parent,
            "queued_resource_id": short,
            "queued_resource": self._enrich(short, labels, session),
        }
        self._client.create_queued_resource(request, timeout=service.CALL_SECONDS)
        # The call returns an operation, which does not describe the request.
        return self.get(self.full_name(short))

    def look_up(self, name: str) -> Any:
        return self._client.get_queued_resource(name=name, timeout=service.CALL_SECONDS)

    def cancel(self, job: service.RemoteJob) -> None:
        """Delete the request and its machine, and return once both are gone."""
        # Without `force`, Cloud TPU refuses a request whose machine still exists.
        request, forget = {"name": job.name, "force": True}, self._client.delete_queued_resource
        ask = partial(forget, request, timeout=service.CALL_SECONDS)
        service.delete(ask, DELETION_SECONDS)

    def release(self, job: service.RemoteJob) -> None:
        """Delete an ended job's machine, where it has not done so itself."""
        from google.api_core.exceptions import FailedPrecondition

        if not job.holds_machines:
            return
        node = _node(job.name)
        ask = partial(self._client.delete_node, name=node, timeout=service.CALL_SECONDS)
        try:
            service.delete(ask, DELETION_SECONDS)
        except FailedPrecondition:
            # It is deleting itself just now.
            current = self._client.get_node(name=node, timeout=service.CALL_SECONDS)
            if current.state.name != "DELETING":
                raise

    def describe(self, job: Any) -> service.RemoteJob:
        (spec,), labels, state = job.tpu.node_spec, self.labels_of(job), job.state.state.name
        # A request without a machine has no record yet, and asking the bucket costs a call.
        record = self._read_record(job) if state in (*WITH_MACHINE, "SUSPENDED") else {}
        made_at = self._made(job) if state in WITH_MACHINE else 0.0
        phase, detail, lost = self._judge(job, record, made_at)
        return service.RemoteJob(
            name=job.name,
            phase=phase,
            detail=detail,
            labels=labels,
            created=service.seconds(job.create_time),
            # Only a program that failed the job has one here, so 0 counts as none.
            exit_status=record.get("exit") or None,
            lost_machines=lost,
            started=made_at or record.get("started", 0.0),
            # A machine that was lost existed at least until it was last heard of.
            ended=record.get("ended") or (record.get("seen", 0.0) if phase.ended else 0.0),
            machines=1,
            machine_type=spec.node.accelerator_type,
            is_cheaper="spot" in job,
            # The name of a deleted request can be used again.
            uid=labels.get(service.MESSAGES_LABEL, ""),
            holds_machines=phase.ended and state in WITH_MACHINE,
        )

    def _judge(
        self, job: Any, record: Mapping[str, Any], made_at: float
    ) -> tuple[service.Phase, str, bool]:
        """Its phase, why, and whether its machine was lost."""
        state, failed = job.state.state.name, service.Phase.FAILED
        # The record comes before the state, which is SUSPENDED both if a machine deleted itself
        # after success and if Google took it away.
        if "ended" in record:
            if record.get("exit") == 0:
                return service.Phase.SUCCEEDED, "", False
            reason = record.get("told") or f"its container ended with exit code {record['exit']}"
            return failed, reason, False
        if state == "ACTIVE":
            # A machine without a record may still be booting, counted from its creation.
            last_heard = record.get("seen", made_at)
            allowed = SILENT_SECONDS if "seen" in record else BOOT_SECONDS
            if not last_heard or time.time() - last_heard <= allowed:
                return service.Phase.RUNNING, "", False
            return failed, "nothing was heard of its machine any more", True
        if state in ("SUSPENDING", "SUSPENDED"):
            # The machine deletes itself only after it has tried to write how it ended, so a
            # deletion without that word most likely came from elsewhere.
            if job.state.state_initiator.name == "USER":
                return service.Phase.CANCELLED, "somebody deleted its machine", False
            return failed, "Google took its machine away", True
        # A state that is not named there, from ACCEPTED to PROVISIONING, waits for a machine.
        phase = PHASES.get(state, service.Phase.WAITING)
        if phase is not failed:
            return phase, "", False
        reason = job.state.failed_data.error.message or "Google gives no reason"
        return phase, reason, bool(NO_MACHINES.search(reason))

    def _made(self, job: Any) -> float:
        """When its machine was created, which is when it begins to cost money; 0 without one."""
        from google.api_core.exceptions import NotFound

        try:
            node = self._client.get_node(name=_node(job.name), timeout=service.CALL_SECONDS)
        except NotFound:
            return 0.0
        return float(node.create_time.timestamp())

    def _read_record(self, job: Any) -> dict[str, Any]:
        from google.api_core.exceptions import NotFound
        from google.cloud.storage import Client

        attribute = json.loads(job.tpu.node_spec[0].node.metadata.get(tpu_machine.ATTRIBUTE, "{}"))
        if not attribute:
            return {}
        self._storage = self._storage or Client(project=self.place.project)
        blob = self._storage.bucket(attribute["record_bucket"]).blob(attribute["record"])
        try:
            return dict(json.loads(blob.download_as_bytes()))
        except NotFound:
            return {}

    def _forget_old(self) -> None:
        """Delete requests of this package from Google's list that ended a while ago."""
        for resource in self.list_all({"parent": self._parent}):
            # Only old ones: how a request ended has to be read from the bucket.
            age = time.time() - resource.create_time.timestamp()
            if service.KEY_LABEL in self.labels_of(resource) and age > KEPT_SECONDS:
                job = self.describe(resource)
                if job.phase.ended:
                    self.cancel(job)

    def _enrich(self, name: str, labels: Mapping[str, str], session: PipesSession) -> Any:
        job = self.type_named("QueuedResource")(self._job["queued_resource"])
        container, messages = self._job["container"], session.message_reader_params
        attribute = {
            "options": [],
            **container,
            "environment": {**container["environment"], **session.get_bootstrap_env_vars()},
            "name": name,
            "node": _node(self.full_name(name)),
            "record_bucket": messages["bucket"],
            "record": f"{messages['key_prefix']}/machine.json",
            "report_seconds": REPORT_SECONDS,
        }
        (spec,) = job.tpu.node_spec
        spec.parent, spec.node_id = self._parent, name
        spec.node.labels = {**spec.node.labels, **labels}
        spec.node.metadata = {
            **spec.node.metadata,
            "startup-script": PYTHON + Path(tpu_machine.__file__).read_text(),
            tpu_machine.ATTRIBUTE: json.dumps(attribute),
        }
        return job


def _node(name: str) -> str:
    """The name of the machine of a request."""
    return name.replace("/queuedResources/", "/nodes/")


class PipesTpuVmClient(RemoteJobPipesClient):
    """A `RemoteJobPipesClient` for TPU machines, by queued resources of Cloud TPU.

    Google makes a job's machine once one is free, which may be a spot machine, and the machine
    deletes itself when its container has ended; so does the run that follows it. One that is heard
    of no more counts as taken. Of a cancelled job, request and machine are deleted.

    A job is a dict: `queued_resource`, as the generated client describes it, with one node, and
    `container`: `image`, `arguments`, `environment`, `seconds` (after so many the machine ends
    it), and if it needs them `options` of `docker run`, and a `bucket` and the folder to `mount`
    it on. The parent is a zone. The machine's account needs to write to the bucket of the messages
    and the right `tpu.nodes.delete`.

    Example:
        >>> node = {
        ...     "accelerator_type": "v5litepod-4",
        ...     "runtime_version": "v2-alpha-tpuv5-lite",
        ...     "network_config": {"enable_external_ips": True},
        ... }
        >>> container = {"image": "my-image", "arguments": ["train"], "environment": {}}
        >>> job = {
        ...     "queued_resource": {"tpu": {"node_spec": [{"node": node}]}, "spot": {}},
        ...     "container": container | {"seconds": 86_400},
        ... }
    """

    jobs = TpuVms
