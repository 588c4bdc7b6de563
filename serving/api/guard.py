"""What every request goes through: authorization, admission, limits on its body, the log."""

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from serving.api.admission import check_content_type
from serving.api.dispatcher import Answer, Dispatcher, Stream
from serving.api.errors import ServingError, client_gone, invalid, overloaded
from serving.api.requests import describe
from serving.engine.protocol import Chunk, GenerateRequest
from serving.journal import Journal
from serving.telemetry import log

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class ApiContext:
    """What the routes need."""

    dispatcher: Dispatcher
    token: str | None
    """Bearer token that every request but `/health` must carry; None asks for none."""
    journal: Journal
    started: int = field(default_factory=lambda: int(time()))
    """Seconds since the epoch."""


async def guarded(context: ApiContext, request: Request, handler: Handler) -> Response:
    """Authorize, admit or turn away, time and log one request."""
    metrics, settings = context.dispatcher.metrics, context.dispatcher.settings
    started, status, version = monotonic(), 500, ""
    request.state.journal = context.journal
    request.state.id = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex
    try:
        authorize(context, request)
        if metrics.in_flight >= settings.max_waiting:
            raise overloaded()
        metrics.in_flight += 1
        try:
            response = await handler(request)
        except BaseException:
            metrics.in_flight -= 1
            raise
        response.headers["X-Request-Id"] = request.state.id
        status, version = response.status_code, response.headers.get("X-Model-Version", "")
        if isinstance(response, StreamingResponse):
            # The place is given back when the last piece is sent or the client has left.
            response.body_iterator = _then(response.body_iterator, metrics)
        else:
            metrics.in_flight -= 1
        return response
    except ServingError as error:
        status = error.status
        error.headers["X-Request-Id"] = request.state.id
        raise
    finally:
        seconds = monotonic() - started
        metrics.request(request.url.path, status, version, seconds)
        fields = {"body": request.state.body} if settings.log_prompts and status != 413 else {}
        log(
            "request",
            id=request.state.id,
            path=request.url.path,
            status=status,
            version=version,
            seconds=round(seconds, 3),
            **fields,
        )


def note(request: Request, wanted: Sequence[GenerateRequest], answers: Sequence[Answer]) -> None:
    """Keep in the journal who answered what, one version all of it."""
    said, by = [answer.text for answer in answers], answers[0]
    request.state.journal.write(request.state.id, by.version, by.fingerprint, wanted, said)


async def noted(
    request: Request, wanted: GenerateRequest, begun: Stream
) -> AsyncGenerator[Chunk, None]:
    """The pieces of a stream; what of it was sent is kept in the journal at its end."""
    text = ""
    try:
        async with aclosing(begun.chunks()) as chunks:
            async for chunk in chunks:
                text += chunk.text
                yield chunk
    finally:
        journal = request.state.journal
        journal.write(request.state.id, begun.version, begun.fingerprint, [wanted], [text])


async def _then(pieces: Any, metrics: Any) -> AsyncIterator[Any]:
    try:
        async with aclosing(pieces) as inner:
            async for piece in inner:
                yield piece
    finally:
        metrics.in_flight -= 1


def authorize(context: ApiContext, request: Request) -> None:
    """Check the bearer token; raises ServingError 401."""
    if context.token is None:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {context.token}".encode()):
        raise ServingError(401, "A valid bearer token is needed.", "unauthorized")


async def read(request: Request, kind: type[Body], dispatcher: Dispatcher) -> Body:
    """The request's body as a model; raises ServingError 400, 408 or 413."""
    limit, seconds = dispatcher.settings.max_body_bytes, dispatcher.settings.body_timeout
    check_content_type(request)
    too_large = ServingError(413, f"The body is larger than {limit:,} bytes.", "body_too_large")
    request.state.body = None
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                content += piece
                if len(content) > limit:
                    raise too_large
    except ClientDisconnect:
        raise client_gone() from None
    except TimeoutError:
        raise ServingError(
            408, f"The body was not complete after {seconds:g} s.", "slow_body"
        ) from None
    try:
        value = json.loads(content)
        # Half a surrogate pair passes as JSON and is no character.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid(
            "The body holds half of a surrogate pair (\\ud800 to \\udfff).", None
        ) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not JSON: {error}.", None) from error
    request.state.body = value
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(*describe(error)) from error
