"""The connections of this project's HTTP servers: how many, for how long, and what is HTTP."""

import asyncio
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.errors import ServingError, unavailable
from serving.logs import Tally
from serving.settings import EndpointSettings

SPARE_FILES = 128
"""Open files that are left for engines, logs and state."""
MAX_HEADER_BYTES = 32 * 1024


class HttpServer(uvicorn.Server):
    """What every HTTP server of this project is; it ends when the process is told to."""

    def __init__(self, app: ASGIApp, settings: EndpointSettings, **options: Any) -> None:
        common: dict[str, Any] = {
            "access_log": False,
            "lifespan": "off",
            "http": limited_protocol(settings),
            "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
            "ws": "none",
            "server_header": False,
            "timeout_keep_alive": 30,
        }
        super().__init__(uvicorn.Config(app, **common | options))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals, and no more: uvicorn's own version sends them again at its end, which
        would end the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield


def limited_protocol(settings: EndpointSettings) -> type[H11Protocol]:
    """HTTP/1.1 with a limit of connections, and of silence before a request is complete.

    uvicorn itself limits the size of headers and, once a request was answered, the time until the
    next begins; it waits for ever for a first one, for the rest of a header, and for a client to
    read its answer.
    """
    most, timeout = _most_connections(settings), settings.header_timeout
    refused, malformed = Tally("connection_refused"), Tally("malformed_request")
    silent, unread = Tally("silent_connection_closed"), Tally("unread_connection_ended")

    class LimitedProtocol(H11Protocol):
        _idle_since = _taken_at = 0.0
        """When the last answer was complete, and when its client last took some of what it is
        sent."""
        _unsent = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # The call above has added this connection, hence not `>=`.
            if len(self.connections) > most:
                refused.add(most=most)
                error = unavailable("Too many connections are open. Try again soon.")
                transport.write(_raw_response(error))
                transport.close()
                return
            self._idle_since = self._taken_at = self.loop.time()
            self._watch()

        def _watch(self) -> None:
            # uvicorn takes a connection that was closed out of the set, which ends its watch.
            if self not in self.connections:
                return
            now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
            is_asked = self.cycle is not None and not self.cycle.response_complete
            # The client has taken some: less waits than at the last look, or nothing.
            if unsent < max(self._unsent, 1):
                self._taken_at = now
            self._unsent = unsent
            if now - self._taken_at >= timeout:
                unread.add(seconds=timeout, bytes=unsent)
                # `close` would first send what waits, and this client does not take it.
                self.transport.abort()
            elif not is_asked and not unsent and now - self._idle_since >= timeout:
                silent.add(seconds=timeout)
                self.transport.close()
            # So a connection is closed a quarter of the time late at most.
            self.loop.call_later(timeout / 4, self._watch)

        def on_response_complete(self) -> None:
            self._idle_since = self.loop.time()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            malformed.add(reason=msg)
            error = ServingError(400, msg, "invalid_http")
            self.transport.write(_raw_response(error))
            self.transport.close()

    return LimitedProtocol


def _most_connections(settings: EndpointSettings) -> int:
    """The connections that are asked for, as far as the limit on open files allows, which is raised
    as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = hard if hard != resource.RLIM_INFINITY else settings.max_connections + SPARE_FILES
    return max(1, min(settings.max_connections, files - SPARE_FILES))


def _raw_response(error: ServingError) -> bytes:
    """What Starlette would answer, on a connection that no request has come from."""
    answer, status = error.response(), HTTPStatus(error.status)
    headers = [b": ".join(header) for header in [*answer.raw_headers, (b"connection", b"close")]]
    status_line = f"HTTP/1.1 {status} {status.phrase}".encode()
    return b"\r\n".join([status_line, *headers, b"", bytes(answer.body)])
