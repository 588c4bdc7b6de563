"""What every request to a model goes through: authorization, admission, the log."""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from time import monotonic, time

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.admission import while_connected
from serving.api.body import read_json
from serving.api.dispatcher import Answer, Dispatcher, Stream
from serving.api.errors import ServingError
from serving.api.requests import Body, parse
from serving.engine.protocol import Chunk, GenerateRequest, carries
from serving.journal import Journal
from serving.logs import log


@dataclass(frozen=True)
class ApiContext:
    """What the routes need."""

    dispatcher: Dispatcher
    token: str | None
    """Bearer token that every request but `/health` must carry; None asks for none."""
    journal: Journal
    started: int = field(default_factory=lambda: int(time()))
    """Seconds since the epoch."""

    def authorize(self, request: Request) -> None:
        """Check the bearer token; raises ServingError 401."""
        if self.token is not None and not carries(request.headers, self.token):
            raise ServingError(401, "A valid bearer token is needed.", "unauthorized")

    def check_model(self, model: str | None) -> None:
        """The name may be left out, `default`, the pipeline's, or a version that has traffic."""
        if model not in (None, "default", *self.dispatcher.router.model_names):
            text = f"There is no model {model!r} here."
            raise ServingError(404, text, "model_not_found", "model")

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body as a model; raises ServingError 400, 408, 413 or 415."""
        settings = self.dispatcher.settings
        form = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if form != "application/json":
            # What a web page can send without asking is of another type.
            text = "Send the body with the header `Content-Type: application/json`."
            raise ServingError(415, text, "content_type")
        content = await read_json(request, settings.max_body_bytes, settings.body_timeout)
        return parse(kind, content)

    async def answered(self, request: Request, wanted: Sequence[GenerateRequest]) -> list[Answer]:
        """Whole answers by one version, which are kept in the journal; raises ServingError."""
        answers = await while_connected(request, self.dispatcher.answer_all(wanted))
        said = [answer.whole.text for answer in answers]
        self.journal.write(request.state.id, answers[0].by, wanted, said)
        return answers

    async def begun(self, request: Request, wanted: GenerateRequest) -> Stream:
        """A stream; what of it was sent is kept in the journal at its end; raises ServingError."""
        stream = await while_connected(request, self.dispatcher.stream(wanted))

        async def noted(pieces: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
            text = ""
            try:
                async with aclosing(pieces) as chunks:
                    async for chunk in chunks:
                        text += chunk.text
                        yield chunk
            finally:
                self.journal.write(request.state.id, stream.by, [wanted], [text])

        return replace(stream, chunks=noted(stream.chunks))


class Guard:
    """Around a route that asks a model."""

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name, authorize, admit or turn away, time and log a request, to its last piece."""
        dispatcher, request = self._context.dispatcher, Request(scope)
        metrics, settings = dispatcher.metrics, dispatcher.settings
        name = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex
        request.state.id = name
        started, status, version = monotonic(), 500, ""

        async def send_named(message: Message) -> None:
            nonlocal status, version
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                status, version = message["status"], headers.get("X-Model-Version", "")
            await send(message)

        try:
            self._context.authorize(request)
            if metrics.in_flight >= settings.max_waiting:
                text = "Too many requests are in flight. Try again soon."
                raise ServingError(429, text, "overloaded", retry=True)
            metrics.in_flight += 1
            try:
                await self._app(scope, receive, send_named)
            finally:
                metrics.in_flight -= 1
        except ServingError as error:
            await error.response()(scope, receive, send_named)
        finally:
            path, seconds = request.url.path, monotonic() - started
            metrics.request(path, status, version, seconds)
            said = {"id": name, "path": path, "status": status, "version": version}
            log("request", **said, seconds=round(seconds, 3))


def event_stream(events: AsyncIterator[str], stream: Stream) -> StreamingResponse:
    """An answer as a stream of events."""
    headers = stream.by.headers | {"Cache-Control": "no-store"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
