"""Who may come in, and for how long: connections, hosts, web pages, clients that left."""

import asyncio
import json
import resource
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.api.address import LOOPBACK
from serving.api.errors import ServingError, client_gone, forbidden_origin, unavailable
from serving.settings import EndpointSettings
from serving.telemetry import Tally

Result = TypeVar("Result")

SPARE_FILES = 128
"""Open files that are left for engines, logs and state."""
MAX_HEADER_BYTES = 32 * 1024


def limited_protocol(settings: EndpointSettings) -> type[H11Protocol]:
    """HTTP/1.1 with a limit of connections, and of silence before a request is complete.

    uvicorn itself limits the size of headers and, once a request was answered, the time until the
    next begins; it waits for ever for a first one, and for the rest of a header.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = hard if hard != resource.RLIM_INFINITY else settings.max_connections + SPARE_FILES
    most = max(1, min(settings.max_connections, files - SPARE_FILES))
    refused, malformed, silent = map(
        Tally, ("connection_refused", "malformed_request", "silent_connection_closed")
    )

    class LimitedProtocol(H11Protocol):
        _idle_since: float | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                refused.add(most=most)
                transport.write(_refusal())
                transport.close()
                return
            self._idle_since = self.loop.time()
            self._watch()

        def _watch(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = self.loop.time()
            elif self.loop.time() - self._idle_since >= settings.header_timeout:
                silent.add(seconds=settings.header_timeout)
                self.transport.close()
                return
            self.loop.call_later(settings.header_timeout / 4, self._watch)

        def send_400_response(self, msg: str) -> None:
            malformed.add(reason=msg)
            error = ServingError(400, msg, "invalid_http")
            self.transport.write(_raw_response("400 Bad Request", error))
            self.transport.close()

    return LimitedProtocol


def _refusal() -> bytes:
    return _raw_response("503 Service Unavailable", unavailable("Too many connections are open."))


def _raw_response(status: str, error: ServingError) -> bytes:
    body = json.dumps(error.body).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def check_origin(request: Request, settings: EndpointSettings) -> None:
    """Refuse web pages that were not allowed; raises ServingError 403 or 421.

    The endpoint's own page is allowed.

    A page that has its own name resolve to this machine (DNS rebinding) is known by the Host that
    its browser sends.
    """
    origin = request.headers.get("origin")
    own = f"http://{request.headers.get('host', '')}"
    if origin is not None and origin != own and origin not in settings.allowed_origins:
        raise forbidden_origin()
    if settings.host not in LOOPBACK:
        return
    host = request.headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.strip("[]").lower() not in (*LOOPBACK, *settings.allowed_hosts):
        raise ServingError(
            421, "The Host is neither loopback nor in `endpoint.allowed_hosts`.", "unknown_host"
        )


class OriginMiddleware(CORSMiddleware):
    """Answers web pages that ask beforehand; refuses them as all else is refused."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code < 400 else forbidden_origin().response()


def check_content_type(request: Request) -> None:
    """Refuse bodies that a web page can send without asking; raises ServingError 415."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ServingError(
            415, "Send the body with the header `Content-Type: application/json`.", "content_type"
        )


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
