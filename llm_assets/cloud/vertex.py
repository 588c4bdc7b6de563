"""Calls to Vertex AI: tried again while Google is busy, waited for, refusals told with advice.

Where no generated client is installed, Google's REST APIs are asked.
"""

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.pipes.failures import Backoff, RetryPolicy, call_with_retries, refusal
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs

REST_SECONDS = 30.0


def open_session() -> Any:
    """A `requests` session with the credentials of this machine."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    return AuthorizedSession(credentials)


def rest_url(settings: GoogleCloudSettings, host: str) -> str:
    """Where an API's host answers, or what stands for it."""
    return settings.rest_endpoint or f"https://{host}"


def ask_json(session: Any, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON answer to a GET, or to a POST of a JSON body; raises what Google's clients raise."""
    from google.api_core.exceptions import from_http_response

    method = "GET" if body is None else "POST"
    reply = session.request(method, url, json=body, timeout=REST_SECONDS)
    if not reply.ok:
        error = from_http_response(reply)
        # A question of many names would leave no room for the answer.
        error.message = error.message.replace(reply.url, url.partition("?")[0])
        raise error
    return reply.json()


CALL_SECONDS = 60.0
LONGEST_POLL_SECONDS = 10.0
REPORT_SECONDS = 60.0
RETRIES = RetryPolicy(give_up_after_seconds=180.0)
Result = TypeVar("Result")


class VertexRefused(UserError):
    """Vertex AI did not do what was asked; the message says what to do next."""


class Vertex:
    """The model and endpoint services of one project and region."""

    def __init__(
        self,
        settings: GoogleCloudSettings,
        report: Report = lambda _: None,
        retries: RetryPolicy = RETRIES,
    ) -> None:
        self.settings = settings
        self.parent = settings.parent
        self.report = report
        self._retries = retries

    @cached_property
    def models(self) -> Any:
        """A `ModelServiceClient`."""
        return self._client("ModelServiceClient")

    @cached_property
    def endpoints(self) -> Any:
        """An `EndpointServiceClient`."""
        return self._client("EndpointServiceClient")

    def call(self, doing: str, function: Callable[..., Result], **arguments: Any) -> Result:
        """Call a client's method, again while Google is busy.

        Args:
            doing: what for, as it reads in a message: `the upload of version 3`.

        Raises:
            NotFound, AlreadyExists: Google's own, since they are answers, not faults.
            VertexRefused: anything else, with advice.
        """
        from google.api_core.exceptions import AlreadyExists, GoogleAPIError, NotFound
        from google.auth.exceptions import GoogleAuthError

        def once() -> Result:
            return function(timeout=CALL_SECONDS, **arguments)

        try:
            return call_with_retries(once, self._retries, self.report)
        except (NotFound, AlreadyExists):
            raise
        except (GoogleAPIError, GoogleAuthError) as error:
            raise self.refusal(doing, error) from error

    def list_all(self, doing: str, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Every item of all pages of a list; raises as `call` does."""
        return self.call(doing, lambda **given: list(function(**given)), **arguments)

    def change(
        self, doing: str, function: Callable[..., Any], seconds: float, **arguments: Any
    ) -> Any:
        """Call what begins a long-running operation, and await its result for so many seconds.

        Raises:
            VertexRefused: it failed, or took longer; then Google goes on with it.
        """
        from google.api_core.exceptions import GoogleAPICallError

        operation = self.call(doing, function, **arguments)
        backoff = Backoff(0.2, LONGEST_POLL_SECONDS)
        started = reported = time.monotonic()
        # `call` passes a timeout to every method, and an operation's `done` takes none.
        while not self.call(doing, lambda timeout: operation.done()):
            now = time.monotonic()
            if now - started > seconds:
                raise VertexRefused(
                    f"{doing} was not finished after {seconds:.0f} s. Google continues it: try "
                    f"again later, or look at {self.console_url}"
                )
            if now - reported > REPORT_SECONDS:
                reported = now
                self.report(f"{doing}: {now - started:.0f} s (at most {seconds:.0f} s)")
            time.sleep(backoff.take())
        try:
            return operation.result()
        except GoogleAPICallError as error:
            raise self.refusal(doing, error) from error

    @property
    def console_url(self) -> str:
        """Where a person sees models and endpoints."""
        return (
            "https://console.cloud.google.com/vertex-ai/online-prediction/endpoints"
            f"?project={self.settings.project}"
        )

    def refusal(self, doing: str, error: Exception) -> VertexRefused:
        """Google's words and what to do about them."""
        place = VertexCustomJobs(None, self.parent).place
        return VertexRefused("\n".join(refusal(error, doing, place)).strip())

    def _client(self, name: str) -> Any:
        from google.auth.exceptions import GoogleAuthError

        host = VertexCustomJobs.address.format(region=self.settings.region)
        kind = VertexCustomJobs.type_named(name)
        try:
            return kind(client_options={"api_endpoint": self.settings.api_endpoint or host})
        except GoogleAuthError as error:
            raise self.refusal("a connection", error) from error
