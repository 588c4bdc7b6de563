"""Who may come in, and for how long: connections, hosts, web pages, clients that left."""

import asyncio
import json
import resource
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.api.address import LOOPBACK
from serving.api.errors import ServingError, client_gone, unavailable
from serving.logs import Tally
from serving.settings import EndpointSettings

Result = TypeVar("Result")

SPARE_FILES = 128
"""Open files that are left for engines, logs and state."""
MAX_HEADER_BYTES = 32 * 1024


def limited_protocol(settings: EndpointSettings) -> type[H11Protocol]:
    """HTTP/1.1 with a limit of connections, and of silence before a request is complete.

    uvicorn itself limits the size of headers and, once a request was answered, the time until the
    next begins; it waits for ever for a first one, and for the rest of a header.
    """
    most = _most_connections(settings)
    refused, malformed, silent = map(
        Tally, ("connection_refused", "malformed_request", "silent_connection_closed")
    )

    class LimitedProtocol(H11Protocol):
        _idle_since = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                refused.add(most=most)
                error = unavailable("Too many connections are open.")
                transport.write(_raw_response("503 Service Unavailable", error))
                transport.close()
                return
            self._idle_since = self.loop.time()
            self._watch()

        def _watch(self) -> None:
            if self.transport.is_closing():
                return
            is_asked = self.cycle is not None and not self.cycle.response_complete
            if not is_asked and self.loop.time() - self._idle_since >= settings.header_timeout:
                silent.add(seconds=settings.header_timeout)
                self.transport.close()
                return
            self.loop.call_later(settings.header_timeout / 4, self._watch)

        def on_response_complete(self) -> None:
            self._idle_since = self.loop.time()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            malformed.add(reason=msg)
            error = ServingError(400, msg, "invalid_http")
            self.transport.write(_raw_response("400 Bad Request", error))
            self.transport.close()

    return LimitedProtocol


def _most_connections(settings: EndpointSettings) -> int:
    """As many as are asked for and this process may have, which it asks for, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = hard if hard != resource.RLIM_INFINITY else settings.max_connections + SPARE_FILES
    return max(1, min(settings.max_connections, files - SPARE_FILES))


def _raw_response(status: str, error: ServingError) -> bytes:
    body = json.dumps(error.body).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


class OriginMiddleware(CORSMiddleware):
    """Refuses web pages that were not allowed; the endpoint's own page is."""

    def __init__(self, app: ASGIApp, settings: EndpointSettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
        )
        self._settings = settings

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        return ServingError(403, f"{bytes(answer.body).decode()}.", "forbidden_origin").response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_origin(Request(scope), self._settings)
        except ServingError as error:
            await error.response()(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def check_origin(request: Request, settings: EndpointSettings) -> None:
    """Refuse web pages that were not allowed; raises ServingError 403 or 421.

    A page that has its own name resolve to this machine (DNS rebinding) is known by the Host that
    its browser sends.
    """
    origin, host = (request.headers.get(name, "") for name in ("origin", "host"))
    if origin not in ("", f"http://{host}", *settings.allowed_origins):
        text = "This origin is not in `endpoint.allowed_origins`."
        raise ServingError(403, text, "forbidden_origin")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    known = name.strip("[]").lower() in (*LOOPBACK, *settings.allowed_hosts)
    if settings.host in LOOPBACK and not known:
        text = "The Host is neither loopback nor in `endpoint.allowed_hosts`."
        raise ServingError(421, text, "unknown_host")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; it is ended when its client goes away, which raises ServingError 499."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_gone()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
