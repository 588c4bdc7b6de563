"""Serving on Google Cloud: a Vertex AI endpoint that follows the champion."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster import DagsterExecutionInterruptedError

from artifacts.errors import UserError, first_line
from artifacts.model import longest_context
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.identity import hash_json
from artifacts.store.store import Store
from llm_assets.cloud.jobs import PREDICT_ROUTE, dedicated_resources, engine_memory
from llm_assets.cloud.settings import load_cloud_settings
from llm_assets.cloud.vertex import Vertex, VertexRefused, open_session
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveAddress, ServingPlatform
from llm_assets.pipes.failures import Backoff
from llm_assets.registry.state import ModelVersion
from llm_assets.registry.vertex import VertexModelRegistry
from serving.rollout import (
    LIMIT,
    PROBE,
    Bets,
    CanaryFailed,
    NoLongerWanted,
    RolledBack,
    RolloutFailed,
    TrafficSample,
    roll_out,
)

CHANGE_SECONDS = 900.0
"""Timeout of every change except a deployment."""


class VertexEndpoint:
    """An endpoint with a deterministic name, made when it is first needed."""

    def __init__(self, vertex: Vertex, pipeline: str) -> None:
        self.vertex = vertex
        # An endpoint's id may have lower-case letters, digits and hyphens alone.
        self._id = pipeline.replace("_", "-")
        self.name = f"{vertex.parent}/endpoints/{self._id}"

    def find(self) -> Any | None:
        """The endpoint as it is now, or None where there is none."""
        from google.api_core.exceptions import NotFound

        try:
            return self.vertex.call(
                "a look at the endpoint", self.vertex.endpoints.get_endpoint, name=self.name
            )
        except NotFound:
            return None

    def read(self) -> Any:
        """The endpoint as it is now; raises VertexRefused where there is none."""
        endpoint = self.find()
        if endpoint is None:
            raise VertexRefused(f"The endpoint {self.name} is gone: somebody deleted it.")
        return endpoint

    def url(self, deployed_id: str | None = None) -> str | None:
        """Where requests are answered; None for a private endpoint whose address nobody told.

        With `endpoint.openai_routes` the routes of the container follow it.

        Args:
            deployed_id: the version to ask, whatever its share, which `:predict` cannot.
        """
        if not self._host:
            return None
        address = f"{'' if '://' in self._host else 'https://'}{self._host}/v1/{self.name}"
        if not self.vertex.settings.endpoint.openai_routes:
            return f"{address}:predict"
        version = f"/deployedModels/{deployed_id}" if deployed_id else ""
        return f"{address}{version}/invoke"

    @cached_property
    def _host(self) -> str:
        """Empty for a private endpoint whose address nobody told."""
        address = self.vertex.settings.endpoint.private_address
        return address or str(self.read().dedicated_endpoint_dns)

    def create(self) -> None:
        """Make the endpoint where there is none: a dedicated one, public or private."""
        from google.api_core.exceptions import AlreadyExists
        from google.cloud import aiplatform_v1

        if self.find() is not None:
            return
        settings = self.vertex.settings.endpoint
        endpoint = aiplatform_v1.Endpoint(
            display_name=self._id,
            client_connection_config={
                "inference_timeout": {"seconds": round(settings.request_seconds)}
            },
        )
        if settings.private_projects:
            endpoint.private_service_connect_config = {
                "enable_private_service_connect": True,
                "project_allowlist": list(settings.private_projects),
            }
        else:
            endpoint.dedicated_endpoint_enabled = True
        request = aiplatform_v1.CreateEndpointRequest(
            parent=self.vertex.parent, endpoint=endpoint, endpoint_id=self._id
        )
        # Another run created it, or this one whose reply was lost; every user waits in `settle`.
        with contextlib.suppress(AlreadyExists):
            self.vertex.change(
                "the endpoint's creation",
                self.vertex.endpoints.create_endpoint,
                CHANGE_SECONDS,
                request=request,
            )

    def settle(self, seconds: float) -> None:
        """Wait until no change of the endpoint is under way, such as one of a killed run."""
        from google.longrunning.operations_pb2 import ListOperationsRequest

        backoff, deadline, page = Backoff(0.2, 10.0), time.monotonic() + seconds, ""
        while True:
            answer = self.vertex.call(
                "a look at running changes",
                self.vertex.endpoints.list_operations,
                request=ListOperationsRequest(name=self.name, page_token=page),
            )
            page = answer.next_page_token
            if running := [operation.name for operation in answer.operations if not operation.done]:
                if time.monotonic() > deadline:
                    raise VertexRefused(
                        f"The endpoint {self.name} was still being changed after {seconds:.0f} s "
                        f"by {running[0]}. Look at {self.vertex.console_url}"
                    )
                time.sleep(backoff.take())
                # From the first page on: what was over there may not have been all.
                page = ""
            elif not page:
                return

    def deploy(self, deployed: dict[str, Any], seconds: float) -> None:
        """Start a version's machines, without any traffic, and wait until it is healthy."""
        from google.api_core.exceptions import AlreadyExists, NotFound

        doing = f"the deployment of {deployed['display_name']}"
        try:
            self._change(
                doing,
                self.vertex.endpoints.deploy_model,
                seconds,
                endpoint=self.name,
                deployed_model=deployed,
            )
        except AlreadyExists:
            # The id is a hash of the whole deployment, so what exists is this very one: a reply was
            # lost, or the call of a killed run went through.
            self.settle(seconds)
        except NotFound as error:
            raise self.vertex.refusal(doing, error) from error

    def split(self, shares: dict[str, int]) -> None:
        """Set the percentage of the requests that each deployed model gets, by its id.

        Args:
            shares: sum to 100, or are empty if no request is to be answered.
        """
        from google.cloud import aiplatform_v1
        from google.protobuf.field_mask_pb2 import FieldMask

        endpoint = aiplatform_v1.Endpoint(name=self.name, traffic_split=shares)
        self.vertex.call(
            "another traffic split",
            self.vertex.endpoints.update_endpoint,
            endpoint=endpoint,
            update_mask=FieldMask(paths=["traffic_split"]),
        )

    def undeploy(self, deployed_id: str) -> None:
        """Remove a version without traffic and its machines; one that is gone stays gone."""
        from google.api_core.exceptions import NotFound

        with contextlib.suppress(NotFound):
            self._change(
                "a version's removal",
                self.vertex.endpoints.undeploy_model,
                CHANGE_SECONDS,
                endpoint=self.name,
                deployed_model_id=deployed_id,
            )

    def delete(self) -> None:
        """Take the traffic away, then every version, then the endpoint itself."""
        from google.api_core.exceptions import NotFound

        self.settle(CHANGE_SECONDS)
        endpoint = self.read()
        # Vertex AI undeploys no version that has traffic, and deletes no endpoint that has a
        # version.
        if endpoint.traffic_split:
            self.split({})
        for deployed in endpoint.deployed_models:
            self.undeploy(deployed.id)
        with contextlib.suppress(NotFound):
            self._change(
                "the endpoint's removal",
                self.vertex.endpoints.delete_endpoint,
                CHANGE_SECONDS,
                name=self.name,
            )

    def _change(
        self, doing: str, function: Callable[..., Any], seconds: float, **arguments: Any
    ) -> None:
        """Change the endpoint, which takes one change at a time.

        If a change is under way (after a lost reply, this very one), its end is awaited first.
        """
        from google.api_core.exceptions import FailedPrecondition

        try:
            self.vertex.change(doing, function, seconds, **arguments)
        except VertexRefused as error:
            if not isinstance(error.__cause__, FailedPrecondition):
                raise
            self.settle(seconds)
            self.vertex.change(doing, function, seconds, **arguments)


PRIVATE = "its private address"
AUTHORIZATION = '"Authorization: Bearer $(gcloud auth print-access-token)"'


class VertexServingPlatform(ServingPlatform):
    """A dedicated endpoint of Vertex AI, named after the pipeline."""

    cloud_config_path: str
    """The cloud project's file."""

    def _endpoint(
        self, settings: PipelineSettings, report: Report = lambda _: None
    ) -> VertexEndpoint:
        cloud = load_cloud_settings(Path(self.cloud_config_path))
        return VertexEndpoint(Vertex(cloud, report), settings.name)

    def serve(
        self,
        settings: PipelineSettings,
        version: ModelVersion,
        report: Report,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> LiveAddress:
        endpoint, store = self._endpoint(settings, report), Store(settings.store)
        cloud = endpoint.vertex.settings.endpoint
        registry = VertexModelRegistry(store, settings.name, endpoint.vertex)
        traffic = VertexTraffic(endpoint, registry.resource_name(version.version), version)
        with store.lease(
            f"endpoint-{settings.name}", lambda holder: report(f"waiting for {holder}")
        ):
            if not still_wanted():
                raise NoLongerWanted
            # Serving was asked for, so automation may deploy again, which it does not while this
            # mark exists.
            files.remove(f"{store.root}/{layout.stopped(settings.name)}")
            changed = not traffic.is_alone()
            if changed:
                # A model that does not fit on the accelerators is refused before they are paid for.
                if (memory := engine_memory(cloud)) is not None:
                    tokens = longest_context(version.model_url, memory)
                    report(f"the accelerators hold texts of up to {tokens:,} tokens")
                rollout, seconds = settings.endpoint.rollout, cloud.request_seconds
                try:
                    _run(roll_out(traffic, rollout, seconds, report, still_wanted))
                except (KeyboardInterrupt, DagsterExecutionInterruptedError):
                    # Otherwise the machines of both versions keep running, and are paid for.
                    report(f"canceled: version {version.version} is taken out of the endpoint")
                    _run(traffic.roll_back())
                    raise
                except RolledBack as error:
                    raise RolloutFailed(
                        f"Version {version.version} is not served: {error}\n{_who_serves(endpoint)}"
                    ) from error
        url = endpoint.url() or PRIVATE
        return LiveAddress(
            url=url,
            predict_url=f"{url}{PREDICT_ROUTE}" if cloud.openai_routes else url,
            authorization=AUTHORIZATION,
            changed=changed,
        )

    def serves(self, settings: PipelineSettings) -> bool:
        endpoint = self._endpoint(settings).find()
        return endpoint is not None and bool(_serving(endpoint))

    def stop(self, settings: PipelineSettings) -> bool:
        endpoint, store = self._endpoint(settings), Store(settings.store)
        with store.lease(f"endpoint-{settings.name}"):
            # First of all, so that automation does not deploy again while the endpoint is deleted.
            store.write_bytes(layout.stopped(settings.name), b"")
            if endpoint.find() is None:
                return False
            endpoint.delete()
        return True


def _run(rollout: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Unlike `asyncio.run`, a signal interrupts the call that is under way."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(rollout)
    finally:
        loop.close()


def _serving(endpoint: Any) -> list[Any]:
    """The deployed models that get requests, in an order that stays."""
    models = sorted(endpoint.deployed_models, key=lambda deployed: deployed.id)
    return [deployed for deployed in models if endpoint.traffic_split.get(deployed.id)]


def _who_serves(endpoint: VertexEndpoint) -> str:
    current = endpoint.find()
    serving = _serving(current) if current else []
    names = " and ".join(deployed.display_name.replace("-", " ") for deployed in serving)
    return f"Still serving: {names}." if names else "No version serves."


BY_ROUTE = "-openai"
"""Suffix of deployed models that answer by the container's routes, not by `:predict`."""
PROBES = 3
SAMPLE_TOKENS = 8
MACHINE_SECONDS = 900.0
"""Upper limit of the time until machines exist and have pulled the image."""
LONGEST_REPORT = 300
LONGEST_ID = 10**10
"""Ids of deployed models have at most ten digits on Vertex AI."""


class VertexTraffic:
    """A new version beside those of an endpoint; see `Traffic` for what the methods promise.

    With `:predict`, a version without traffic cannot be asked, so the serving image itself probes:
    its container is healthy only after the model has generated text, and an unhealthy one is never
    deployed. With `endpoint.openai_routes` each version has an address, at which the new one is
    asked before it has traffic. A version with the other kind of address than its predecessor takes
    all traffic at once: no client can use both.

    Vertex AI reports nothing about single versions, so each observation sends a request.

    The methods block: nothing else runs in a rollout's loop, and a canceled run ends at once, while
    Google completes the call; the next run waits for that.
    """

    def __init__(self, endpoint: VertexEndpoint, model: str, version: ModelVersion) -> None:
        """Nothing is changed yet.

        Args:
            model: the upload's resource name, with its version id.
        """
        self.version = str(version.version)
        self._endpoint = endpoint
        cloud = endpoint.vertex.settings
        self._settings, self._by_route = cloud.endpoint, cloud.endpoint.openai_routes
        self._deployed = {
            "model": model,
            "display_name": f"version-{version.version}{BY_ROUTE if self._by_route else ''}",
            "dedicated_resources": dedicated_resources(cloud.endpoint),
            "service_account": cloud.account_that_serves,
            "enable_access_logging": cloud.endpoint.access_logging,
        }
        # The id is a hash of the whole deployment: Vertex AI changes none in place.
        self._id = str(int(hash_json(self._deployed), 16) % LONGEST_ID)
        self._deployed["id"] = self._id
        self._share = 0.0
        self._others: list[str] = []
        """Ids of the versions that share the traffic with the new one."""
        self._missing = Bets()
        """Evidence that the new version gives fewer answers than its share."""
        self._answers: Counter[bool] = Counter()
        """By the new version and by the old one."""
        self._failures = 0

    def is_alone(self) -> bool:
        """Whether exactly this version, deployed in this way, is alone and has all traffic."""
        endpoint = self._endpoint.find()
        return bool(
            endpoint
            and [deployed.id for deployed in endpoint.deployed_models] == [self._id]
            and endpoint.traffic_split.get(self._id) == 100
        )

    async def start(self) -> bool:
        # Longer than the container's own limit, so that Vertex AI reports its reason first.
        seconds = self._settings.start_minutes * 60 + MACHINE_SECONDS
        self._endpoint.create()
        # A change that a killed run began may still be under way.
        self._endpoint.settle(seconds)
        endpoint = self._endpoint.read()
        ids = [deployed.id for deployed in endpoint.deployed_models]
        # What a killed rollout left without traffic serves nobody, and its machines are paid for.
        for deployed_id in ids:
            if deployed_id != self._id and not endpoint.traffic_split.get(deployed_id):
                self._endpoint.undeploy(deployed_id)
        # A killed run may have deployed it already; then the rollout begins with its traffic.
        if self._id not in ids:
            self._endpoint.deploy(self._deployed, seconds)
        if self._by_route and all(self._seconds_of(self._id) is None for _ in range(PROBES)):
            raise CanaryFailed(f"it answered none of {PROBES} requests to its own address")
        others = self._serving_others(self._endpoint.read())
        return {other.display_name.endswith(BY_ROUTE) for other in others} == {self._by_route}

    async def set_share(self, share: float) -> None:
        endpoint = self._endpoint.read()
        self._others = [deployed.id for deployed in self._serving_others(endpoint)]
        percent = round(100 * share) if self._others else 100
        if self._others and 0 < share < 1:
            # Shares are whole per cent, and none of these versions is to be without requests.
            percent = min(max(percent, 1), 100 - len(self._others))
        self._share = percent / 100
        # Several others share the traffic if an earlier rollout was interrupted between its steps.
        base, remainder = divmod(100 - percent, max(1, len(self._others)))
        shares = {other: base + (n < remainder) for n, other in enumerate(self._others)}
        shares[self._id] = percent
        shares = {deployed_id: percent for deployed_id, percent in shares.items() if percent}
        if shares != dict(endpoint.traffic_split):
            self._endpoint.split(shares)

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        # One request always counts as waiting, so no step ends before both versions were seen.
        new, old = TrafficSample(waiting=1), TrafficSample(waiting=1)
        if self._by_route:
            self._ask_by_address(new, old)
        else:
            self._ask(new, old)
        return new, old

    def _ask_by_address(self, new: TrafficSample, old: TrafficSample) -> None:
        """Ask each version in proportion to its traffic; if it fails, the other one too, since a
        failure counts against a version only if the other one answers."""
        sides = [(self._id, new), (self._others[0], old)]
        if random.random() >= self._share:  # noqa: S311
            sides.reverse()
        (asked_id, sample), (other_id, _) = sides
        if (seconds := self._seconds_of(asked_id)) is not None:
            sample.answered += 1
            sample.seconds.append(seconds)
        elif self._seconds_of(other_id) is not None:
            sample.failed += 1

    def _ask(self, new: TrafficSample, old: TrafficSample) -> None:
        """Send a request that either version may answer.

        An answer says which one it was, a failure does not. So once requests fail, the answers are
        counted: if both versions fail alike, the new one gives its share of them.

        Raises:
            CanaryFailed: it gives fewer.
        """
        started = time.monotonic()
        answer = self._post(self._url)
        if answer is None:
            self._failures += 1
        else:
            is_new = answer["deployedModelId"] == self._id
            sample = new if is_new else old
            sample.answered += 1
            sample.seconds.append(time.monotonic() - started)
            # With all the traffic on one side, an answer says nothing about shares.
            if 0 < self._share < 1:
                self._answers[is_new] += 1
                self._missing.add(float(not is_new), 1 - self._share)
        if self._failures and self._missing.logarithm >= LIMIT:
            raise CanaryFailed(
                f"{self._failures} requests failed, and of {self._answers.total()} others it "
                f"answered {self._answers[True]}"
            )

    def _seconds_of(self, deployed_id: str) -> float | None:
        """How long a version took to answer at its own address; None where it did not."""
        started = time.monotonic()
        url = f"{self._endpoint.url(deployed_id)}{PREDICT_ROUTE}"
        return None if self._post(url) is None else time.monotonic() - started

    def _post(self, url: str) -> dict[str, Any] | None:
        """The answer to a small request; None, and a line in the log, where there is none."""
        from google.auth.exceptions import GoogleAuthError
        from requests import RequestException

        body = {"instances": [{"prompt": PROBE, "max_tokens": SAMPLE_TOKENS}]}
        try:
            reply = self._session.post(url, json=body, timeout=self._settings.request_seconds)
            if not reply.ok:
                raise RequestException(f"{reply.status_code} {reply.text[:LONGEST_REPORT]}")
            answer: dict[str, Any] = reply.json()
        except (RequestException, GoogleAuthError) as error:
            self._endpoint.vertex.report(f"a request failed: {first_line(error)}")
            return None
        return answer

    async def promote(self) -> None:
        # Read again and not taken from `_others`: versions without traffic are removed as well.
        others = [d.id for d in self._endpoint.read().deployed_models if d.id != self._id]
        if others:
            time.sleep(self._settings.drain_seconds)
        for deployed_id in others:
            self._endpoint.undeploy(deployed_id)

    async def roll_back(self) -> None:
        endpoint = self._endpoint.find()
        if endpoint is None or self._id not in [d.id for d in endpoint.deployed_models]:
            return
        if self._serving_others(endpoint):
            await self.set_share(0.0)
            time.sleep(self._settings.drain_seconds)
        elif endpoint.traffic_split.get(self._id):
            # An earlier run gave it all the traffic: without it nothing would answer.
            return
        self._endpoint.undeploy(self._id)

    def _serving_others(self, endpoint: Any) -> list[Any]:
        return [deployed for deployed in _serving(endpoint) if deployed.id != self._id]

    @cached_property
    def _session(self) -> Any:
        return open_session()

    @cached_property
    def _url(self) -> str:
        url = self._endpoint.url()
        if url is None:
            raise UserError(
                "The endpoint is private (`endpoint.private_projects`), and a rollout sends "
                "requests to it: set `endpoint.private_address` in the cloud project's file to the "
                "URL of your forwarding rule."
            )
        return url
