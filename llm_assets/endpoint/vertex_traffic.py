"""The versions on a Vertex AI endpoint, as a rollout moves them."""

import time
from functools import cached_property
from typing import Any

from artifacts.errors import UserError, first_line
from artifacts.progress import Report
from artifacts.store.identity import hash_json
from llm_assets.cloud.rest import open_session
from llm_assets.cloud.serving_image import dedicated_resources
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.endpoint.vertex_endpoint import VertexEndpoint
from llm_assets.registry.records import ModelVersion
from serving.evidence import Seen

SAMPLE_TOKENS = 8
MACHINE_SECONDS = 900.0
"""Until there are machines and the image is on them, at most."""
LONGEST_REPORT = 300
LONGEST_ID = 10**10
"""Vertex AI takes ids of deployed models with ten digits at most."""


class VertexTraffic:
    """A new version beside those of an endpoint; see `Traffic` for what the methods promise.

    A version without traffic cannot be asked on Vertex AI, so the probe is the serving image's: its
    container is not healthy before the model has written, and one that is not is never deployed.
    Vertex AI does not say either how a version does; so each observation sends a request of its
    own. It is answered by one version or the other, which the answer says; a failure counts for the
    new one.

    The methods block: nothing else runs in a rollout's loop, and a run that is cancelled ends at
    once, while Google goes on with what it was asked; the next run waits for that.
    """

    def __init__(
        self,
        endpoint: VertexEndpoint,
        settings: GoogleCloudSettings,
        model: str,
        version: ModelVersion,
        prompt: str,
        report: Report,
    ) -> None:
        """Nothing is changed yet.

        Args:
            model: the upload's resource name, with its version id.
            prompt: what each observation has continued.
        """
        self._endpoint = endpoint
        self._settings = settings
        self._prompt = prompt
        self._report = report
        self._number = version.version
        machines = dedicated_resources(settings.endpoint)
        digest = hash_json({"model": model, "machines": machines})
        self._id = str(int(digest, 16) % LONGEST_ID)
        self._deployed = {
            "id": self._id,
            "model": model,
            "display_name": f"version-{version.version}",
            "dedicated_resources": machines,
            "service_account": settings.service_account,
            "enable_access_logging": True,
        }
        self._new, self._old = Seen(), Seen()

    @property
    def version(self) -> str:
        return str(self._number)

    def is_alone(self) -> bool:
        """Whether exactly this version, on these machines, is deployed and has all traffic."""
        found = self._endpoint.find()
        return bool(
            found
            and [deployed.id for deployed in found.deployed_models] == [self._id]
            and found.traffic_split.get(self._id) == 100
        )

    async def start(self) -> bool:
        # Longer than the container has, so that Vertex AI's own reason comes first.
        seconds = self._settings.endpoint.start_minutes * 60 + MACHINE_SECONDS
        self._endpoint.create()
        self._endpoint.settle(seconds)
        found = self._endpoint.read()
        others = [deployed.id for deployed in found.deployed_models if deployed.id != self._id]
        for deployed_id in others:
            if not found.traffic_split.get(deployed_id):
                self._endpoint.undeploy(deployed_id)
        if len(others) == len(found.deployed_models):
            self._endpoint.deploy(self._deployed, seconds)
        return bool(self._serving_others(self._endpoint.read()))

    async def set_share(self, share: float) -> None:
        found = self._endpoint.read()
        old = self._serving_others(found)
        percent = 100 if not old else round(100 * share)
        if 0 < share < 1:
            percent = min(max(percent, 1), 100 - len(old)) if old else 100
        shares = {self._id: percent} if percent else {}
        for number, deployed_id in enumerate(old if percent < 100 else []):
            whole, rest = divmod(100 - percent, len(old))
            shares[deployed_id] = whole + (number < rest)
        if shares != dict(found.traffic_split):
            self._endpoint.split(shares)

    async def observe(self) -> tuple[Seen, Seen]:
        # The next request is always under way, so a step does not end before both were seen.
        self._new, self._old = Seen(waiting=1), Seen(waiting=1)
        self._ask()
        return self._new, self._old

    def _ask(self) -> None:
        from google.auth.exceptions import GoogleAuthError
        from requests import RequestException

        instance = {"prompt": self._prompt, "max_tokens": SAMPLE_TOKENS}
        started = time.monotonic()
        try:
            reply = self._session.post(
                self._url,
                json={"instances": [instance]},
                timeout=self._settings.endpoint.request_seconds,
            )
            if not reply.ok:
                raise RequestException(f"{reply.status_code} {reply.text[:LONGEST_REPORT]}")
            answered_by = reply.json()["deployedModelId"]
        except (RequestException, GoogleAuthError) as error:
            self._new.failed += 1
            self._report(f"a request failed: {first_line(error)}")
            return
        seen = self._new if answered_by == self._id else self._old
        seen.answered += 1
        seen.seconds.append(time.monotonic() - started)

    async def promote(self) -> None:
        others = [d.id for d in self._endpoint.read().deployed_models if d.id != self._id]
        if others:
            time.sleep(self._settings.endpoint.drain_seconds)
        for deployed_id in others:
            self._endpoint.undeploy(deployed_id)

    async def roll_back(self) -> None:
        found = self._endpoint.find()
        if found is None or self._id not in [d.id for d in found.deployed_models]:
            return
        if self._serving_others(found):
            await self.set_share(0.0)
            time.sleep(self._settings.endpoint.drain_seconds)
        self._endpoint.undeploy(self._id)

    def _serving_others(self, found: Any) -> list[str]:
        split = found.traffic_split
        return sorted(key for key, share in split.items() if share and key != self._id)

    @cached_property
    def _session(self) -> Any:
        return open_session()

    @cached_property
    def _url(self) -> str:
        url = self._endpoint.predict_url()
        if url is None:
            raise UserError(
                "The endpoint is private (`endpoint.private_projects`), and a rollout sends "
                "requests to it: set `endpoint.private_address` in the cloud project's file to the "
                "URL of your forwarding rule."
            )
        return url
