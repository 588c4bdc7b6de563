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
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.identity import hash_json
from artifacts.store.store import Store
from llm_assets.cloud.jobs import PREDICT_ROUTE, dedicated_resources, engine_memory
from llm_assets.cloud.settings import GoogleCloudSettings, load_cloud_settings
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
from serving.vertex.context import longest_context

CHANGE_SECONDS = 900.0
"""Timeout of every change except a deployment."""


class VertexEndpoint:
    """An endpoint with a deterministic name, made when it is first needed."""

    def __init__(self, vertex: Vertex, pipeline: str) -> None:
        self._vertex = vertex
        self._id = pipeline.replace("_", "-")
        self.name = f"{vertex.parent}/endpoints/{self._id}"

    def find(self) -> Any | None:
        """The endpoint as it is now, or None where there is none."""
        from google.api_core.exceptions import NotFound

        try:
            return self._vertex.call(
                "a look at the endpoint", self._vertex.endpoints.get_endpoint, name=self.name
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
        if not self._vertex.settings.endpoint.openai_routes:
            return f"{address}:predict"
        return (
            f"{address}/deployedModels/{deployed_id}/invoke" if deployed_id else f"{address}/invoke"
        )

    @cached_property
    def _host(self) -> str:
        """Empty for a private endpoint whose address nobody told."""
        address = self._vertex.settings.endpoint.private_address
        return address or str(self.read().dedicated_endpoint_dns)

    def create(self) -> None:
        """Make the endpoint where there is none: a dedicated one, public or private."""
        from google.api_core.exceptions import AlreadyExists
        from google.cloud import aiplatform_v1

        if self.find() is not None:
            return
        settings = self._vertex.settings.endpoint
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
            parent=self._vertex.parent, endpoint=endpoint, endpoint_id=self._id
        )
        # Another run created it, or this one whose reply was lost; every user waits in `settle`.
        with contextlib.suppress(AlreadyExists):
            self._vertex.change(
                "the endpoint's creation",
                self._vertex.endpoints.create_endpoint,
                CHANGE_SECONDS,
                request=request,
            )

    def settle(self, seconds: float) -> None:
        """Wait until no change of the endpoint is under way, such as one of a killed run."""
        from google.longrunning.operations_pb2 import ListOperationsRequest

        doing, backoff = "a look at running changes", Backoff(0.2, 10.0)
        deadline = time.monotonic() + seconds
        page = ""
        while True:
            request = ListOperationsRequest(name=self.name, page_token=page)
            answer = self._vertex.call(
                doing, self._vertex.endpoints.list_operations, request=request
            )
            running = [operation.name for operation in answer.operations if not operation.done]
            page = "" if running else answer.next_page_token
            if not running and not page:
                return
            if page:
                continue
            if time.monotonic() > deadline:
                raise VertexRefused(
                    f"The endpoint {self.name} was still being changed after {seconds:.0f} s by "
                    f"{running[0]}. Look at {self._vertex.console_url}"
                )
            time.sleep(backoff.take())

    def deploy(self, deployed: dict[str, Any], seconds: float) -> None:
        """Start a version's machines, without any traffic, and wait until it is healthy."""
        from google.api_core.exceptions import AlreadyExists, NotFound

        doing = f"the deployment of {deployed['display_name']}"
        try:
            self._change(
                doing,
                self._vertex.endpoints.deploy_model,
                seconds,
                endpoint=self.name,
                deployed_model=deployed,
            )
        except AlreadyExists:
            self.settle(seconds)
        except NotFound as error:
            raise self._vertex.refusal(doing, error) from error

    def split(self, shares: dict[str, int]) -> None:
        """Set the percentage of the requests that each deployed model gets, by its id.

        Args:
            shares: sum to 100, or are empty if no request is to be answered.
        """
        from google.cloud import aiplatform_v1
        from google.protobuf.field_mask_pb2 import FieldMask

        endpoint = aiplatform_v1.Endpoint(name=self.name, traffic_split=shares)
        self._vertex.call(
            "another traffic split",
            self._vertex.endpoints.update_endpoint,
            endpoint=endpoint,
            update_mask=FieldMask(paths=["traffic_split"]),
        )

    def undeploy(self, deployed_id: str) -> None:
        """Remove a version without traffic and its machines; one that is gone stays gone."""
        from google.api_core.exceptions import NotFound

        with contextlib.suppress(NotFound):
            self._change(
                "a version's removal",
                self._vertex.endpoints.undeploy_model,
                CHANGE_SECONDS,
                endpoint=self.name,
                deployed_model_id=deployed_id,
            )

    def delete(self) -> None:
        """Take the traffic away, then every version, then the endpoint itself."""
        from google.api_core.exceptions import NotFound

        self.settle(CHANGE_SECONDS)
        endpoint = self.read()
        if endpoint.traffic_split:
            self.split({})
        for deployed in endpoint.deployed_models:
            self.undeploy(deployed.id)
        with contextlib.suppress(NotFound):
            self._change(
                "the endpoint's removal",
                self._vertex.endpoints.delete_endpoint,
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
            self._vertex.change(doing, function, seconds, **arguments)
        except VertexRefused as error:
            if not isinstance(error.__cause__, FailedPrecondition):
                raise
            self.settle(seconds)
            self._vertex.change(doing, function, seconds, **arguments)


PRIVATE = "its private address"
AUTHORIZATION = '"Authorization: Bearer $(gcloud auth print-access-token)"'
BY_ROUTE = "-openai"
"""Suffix of deployed models that answer by the container's routes, not by `:predict`."""
PROBES = 3
SAMPLE_TOKENS = 8
MACHINE_SECONDS = 900.0
"""Upper limit of the time until machines exist and have pulled the image."""
LONGEST_REPORT = 300
LONGEST_ID = 10**10
"""Ids of deployed models have at most ten digits on Vertex AI."""


class VertexServingPlatform(ServingPlatform):
    """A dedicated endpoint of Vertex AI, named after the pipeline."""

    cloud_config_path: str
    """The cloud project's file."""

    def serve(
        self,
        settings: PipelineSettings,
        version: ModelVersion,
        report: Report,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> LiveAddress:
        vertex = Vertex(load_cloud_settings(Path(self.cloud_config_path)), report)
        store = Store(settings.store)
        model = VertexModelRegistry(store, settings.name, vertex).resource_name(version.version)
        endpoint = VertexEndpoint(vertex, settings.name)
        traffic = VertexTraffic(endpoint, vertex.settings, model, version, report)
        with store.lease(
            f"endpoint-{settings.name}", lambda holder: report(f"waiting for {holder}")
        ):
            if not still_wanted():
                raise NoLongerWanted
            files.remove(f"{store.root}/{layout.stopped(settings.name)}")
            changed = not traffic.is_alone()
            if changed:
                # A model that does not fit on the accelerators is refused before they are paid for.
                if (memory := engine_memory(vertex.settings.endpoint)) is not None:
                    tokens = longest_context(version.model_url, memory)
                    report(f"the accelerators hold texts of up to {tokens:,} tokens")
                seconds = vertex.settings.endpoint.request_seconds
                try:
                    _run(
                        roll_out(traffic, settings.endpoint.rollout, seconds, report, still_wanted)
                    )
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
        by_route = vertex.settings.endpoint.openai_routes
        return LiveAddress(
            url=url,
            predict_url=f"{url}{PREDICT_ROUTE}" if by_route else url,
            authorization=AUTHORIZATION,
            changed=changed,
            reason="serving now" if changed else "already serving",
        )

    def serves(self, settings: PipelineSettings) -> bool:
        vertex = Vertex(load_cloud_settings(Path(self.cloud_config_path)))
        endpoint = VertexEndpoint(vertex, settings.name).find()
        return endpoint is not None and any(endpoint.traffic_split.values())

    def stop(self, settings: PipelineSettings) -> bool:
        vertex = Vertex(load_cloud_settings(Path(self.cloud_config_path)))
        endpoint = VertexEndpoint(vertex, settings.name)
        store = Store(settings.store)
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


def _who_serves(endpoint: VertexEndpoint) -> str:
    current = endpoint.find()
    serving = (
        [d for d in current.deployed_models if current.traffic_split.get(d.id)] if current else []
    )
    names = " and ".join(d.display_name.replace("-", " ") for d in serving)
    return f"Still serving: {names}." if names else "No version serves."


class VertexTraffic:
    """A new version beside those of an endpoint; see `Traffic` for what the methods promise.

    With `:predict`, a version without traffic cannot be asked, so the serving image itself probes:
    its container is healthy only after the model has generated text, and an unhealthy one is never
    deployed. Vertex AI reports nothing about single versions, so each observation sends a request.
    Either version may answer; an answer says which one it was, a failure does not. So once requests
    fail, the answers are counted: if both versions fail alike, the new one gives its share of them.
    With `endpoint.openai_routes` each version has an address: the new one is asked before it has
    traffic, and a failure counts against a version only if the other one answers. A version with
    the other kind of address than its predecessor takes all traffic at once: no client can use
    both.

    The methods block: nothing else runs in a rollout's loop, and a canceled run ends at once, while
    Google completes the call; the next run waits for that.
    """

    def __init__(
        self,
        endpoint: VertexEndpoint,
        settings: GoogleCloudSettings,
        model: str,
        version: ModelVersion,
        report: Report,
    ) -> None:
        """Nothing is changed yet.

        Args:
            model: the upload's resource name, with its version id.
        """
        self._endpoint = endpoint
        self._settings = settings
        self._report = report
        self.version = str(version.version)
        self._way = BY_ROUTE if settings.endpoint.openai_routes else ""
        self._deployed = {
            "model": model,
            "display_name": f"version-{version.version}{self._way}",
            "dedicated_resources": dedicated_resources(settings.endpoint),
            "service_account": settings.account_that_serves,
            "enable_access_logging": settings.endpoint.access_logging,
        }
        # The id is a hash of the whole deployment: Vertex AI changes none in place.
        self._id = str(int(hash_json(self._deployed), 16) % LONGEST_ID)
        self._deployed["id"] = self._id
        self._new, self._old = TrafficSample(), TrafficSample()
        self._share = 0.0
        self._others: list[str] = []
        # Only distributes requests, so it need not be cryptographic.
        self._random = random.Random()  # noqa: S311
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
        seconds = self._settings.endpoint.start_minutes * 60 + MACHINE_SECONDS
        self._endpoint.create()
        # A change that a killed run began may still be under way.
        self._endpoint.settle(seconds)
        endpoint = self._endpoint.read()
        others = [deployed.id for deployed in endpoint.deployed_models if deployed.id != self._id]
        for deployed_id in others:
            if not endpoint.traffic_split.get(deployed_id):
                self._endpoint.undeploy(deployed_id)
        if len(others) == len(endpoint.deployed_models):
            self._endpoint.deploy(self._deployed, seconds)
        if self._way and all(self._seconds_of(self._id) is None for _ in range(PROBES)):
            raise CanaryFailed(f"it answered none of {PROBES} requests to its own address")
        endpoint = self._endpoint.read()
        self._others = self._serving_others(endpoint)
        names = {deployed.id: deployed.display_name for deployed in endpoint.deployed_models}
        return bool(self._others) and all(
            names[other].endswith(BY_ROUTE) == bool(self._way) for other in self._others
        )

    async def set_share(self, share: float) -> None:
        endpoint = self._endpoint.read()
        old = self._others = self._serving_others(endpoint)
        percent = 100 if not old else round(100 * share)
        if 0 < share < 1:
            percent = min(max(percent, 1), 100 - len(old)) if old else 100
        self._share = percent / 100
        shares = {self._id: percent} if percent else {}
        for number, deployed_id in enumerate(old if percent < 100 else []):
            base, remainder = divmod(100 - percent, len(old))
            shares[deployed_id] = base + (number < remainder)
        if shares != dict(endpoint.traffic_split):
            self._endpoint.split(shares)

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        # One request always counts as waiting, so no step ends before both versions were seen.
        self._new, self._old = TrafficSample(waiting=1), TrafficSample(waiting=1)
        if self._way:
            self._ask_by_address()
        else:
            self._ask()
        if self._failures and self._missing.logarithm >= LIMIT:
            raise CanaryFailed(
                f"{self._failures} requests failed, and of {self._answers.total()} others it "
                f"answered {self._answers[True]}"
            )
        return self._new, self._old

    def _ask(self) -> None:
        started = time.monotonic()
        answer = self._post(self._url)
        if answer is None:
            self._failures += 1
            return
        is_new = answer["deployedModelId"] == self._id
        if 0 < self._share < 1:
            self._answers[is_new] += 1
            self._missing.add(float(not is_new), 1 - self._share)
        sample = self._new if is_new else self._old
        sample.answered += 1
        sample.seconds.append(time.monotonic() - started)

    def _ask_by_address(self) -> None:
        """Ask each version in proportion to its traffic; if it fails, the other one too."""
        sides = [(self._id, self._new), (self._others[0], self._old)]
        if self._random.random() >= self._share:
            sides.reverse()
        (asked_id, sample), (other_id, _) = sides
        if (seconds := self._seconds_of(asked_id)) is not None:
            sample.answered += 1
            sample.seconds.append(seconds)
        elif self._seconds_of(other_id) is not None:
            sample.failed += 1

    def _seconds_of(self, deployed_id: str) -> float | None:
        """How long a version took to answer at its own address; None where it did not."""
        started = time.monotonic()
        url = f"{self._endpoint.url(deployed_id)}{PREDICT_ROUTE}"
        return None if self._post(url) is None else time.monotonic() - started

    def _post(self, url: str) -> dict[str, Any] | None:
        """The answer to a small request; None, and a line in the log, where there is none."""
        from google.auth.exceptions import GoogleAuthError
        from requests import RequestException

        instance = {"prompt": PROBE, "max_tokens": SAMPLE_TOKENS}
        try:
            reply = self._session.post(
                url,
                json={"instances": [instance]},
                timeout=self._settings.endpoint.request_seconds,
            )
            if not reply.ok:
                raise RequestException(f"{reply.status_code} {reply.text[:LONGEST_REPORT]}")
            answer: dict[str, Any] = reply.json()
        except (RequestException, GoogleAuthError) as error:
            self._report(f"a request failed: {first_line(error)}")
            return None
        return answer

    async def promote(self) -> None:
        others = [d.id for d in self._endpoint.read().deployed_models if d.id != self._id]
        if others:
            time.sleep(self._settings.endpoint.drain_seconds)
        for deployed_id in others:
            self._endpoint.undeploy(deployed_id)

    async def roll_back(self) -> None:
        endpoint = self._endpoint.find()
        if endpoint is None or self._id not in [d.id for d in endpoint.deployed_models]:
            return
        if self._serving_others(endpoint):
            await self.set_share(0.0)
            time.sleep(self._settings.endpoint.drain_seconds)
        elif endpoint.traffic_split.get(self._id):
            # An earlier run gave it all the traffic: without it nothing would answer.
            return
        self._endpoint.undeploy(self._id)

    def _serving_others(self, endpoint: Any) -> list[str]:
        split = endpoint.traffic_split
        return sorted(key for key, share in split.items() if share and key != self._id)

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
