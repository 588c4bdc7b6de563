"""What every request goes through: authorization, admission, limits on its body, the log."""

import hmac
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError

from serving.api.admission import check_content_type, while_connected
from serving.api.body import read_json
from serving.api.dispatcher import Answer, Dispatcher, Stream
from serving.api.errors import ServingError, invalid, overloaded
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


async def answered(
    request: Request, dispatcher: Dispatcher, wanted: Sequence[GenerateRequest]
) -> list[Answer]:
    """Whole answers by one version, which is kept in the journal; raises ServingError."""
    answers = await while_connected(request, dispatcher.answer_all(wanted))
    said, by = [answer.text for answer in answers], answers[0]
    request.state.journal.write(request.state.id, by.version, by.fingerprint, wanted, said)
    return answers


def event_stream(events: AsyncIterator[str], begun: Stream) -> StreamingResponse:
    """An answer as a stream of events."""
    headers = version_headers(begun) | {"Cache-Control": "no-store"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def version_headers(answer: Answer | Stream) -> dict[str, str]:
    """Headers that say which version answered."""
    return {"X-Model-Version": answer.version, "X-Model-Fingerprint": answer.fingerprint}


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
    settings = dispatcher.settings
    check_content_type(request)
    request.state.body = None
    content = await read_json(request, settings.max_body_bytes, settings.body_timeout)
    request.state.body = content
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise invalid(*describe(error)) from error
