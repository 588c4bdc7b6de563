"""One Vertex AI endpoint: what is deployed on it, and who has which share of the traffic."""

import contextlib
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from llm_assets.cloud.vertex import Vertex, VertexRefused
from llm_assets.pipes.failures import Backoff

CHANGE_SECONDS = 900.0
"""How long anything but a deployment may take."""


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
        found = self.find()
        if found is None:
            raise VertexRefused(f"The endpoint {self.name} is gone: somebody deleted it.")
        return found

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
        told = self._vertex.settings.endpoint.private_address
        return told or str(self.read().dedicated_endpoint_dns)

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
        try:
            self._vertex.change(
                "the endpoint's creation",
                self._vertex.endpoints.create_endpoint,
                CHANGE_SECONDS,
                request=request,
            )
        except AlreadyExists:
            self.settle(CHANGE_SECONDS)

    def settle(self, seconds: float) -> None:
        """Wait until no change of the endpoint is under way, such as one of a killed run."""
        from google.longrunning.operations_pb2 import ListOperationsRequest

        doing, backoff = "a look at running changes", Backoff(0.2, 10.0, factor=1.5)
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
        """Set who gets how many per cent of the requests, by the ids of the deployed models.

        Args:
            shares: sum to 100, or are none where nobody is to be answered.
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
        found = self.read()
        if found.traffic_split:
            self.split({})
        for deployed in found.deployed_models:
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

        Where one is under way - after a lost reply it is this very one - its end is awaited first.
        """
        from google.api_core.exceptions import FailedPrecondition

        try:
            self._vertex.change(doing, function, seconds, **arguments)
        except VertexRefused as error:
            if not isinstance(error.__cause__, FailedPrecondition):
                raise
            self.settle(seconds)
            self._vertex.change(doing, function, seconds, **arguments)
