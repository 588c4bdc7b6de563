"""The public HTTP server: who and what may come in, for how long, and what is told of it.

A request for an answer passes `OriginMiddleware` and `Guard` to its route, whose body is read in
`ApiContext.read`, admitted, and answered by the dispatcher.
"""

import asyncio
import hmac
import json
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, time
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.dispatcher import Dispatcher, Stream
from serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    PredictRequest,
    parse,
)
from serving.engine.protocol import Chunk, GenerateRequest
from serving.errors import ServingError, answer_error, client_gone, invalid
from serving.journal import Journal
from serving.logs import log
from serving.settings import LOOPBACK, EndpointSettings
from serving.state import OfVersion

Result = TypeVar("Result")


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
        given = request.headers.get("authorization", "").encode()
        if self.token is not None and not hmac.compare_digest(
            given, f"Bearer {self.token}".encode()
        ):
            raise ServingError(401, "A valid bearer token is required.", "unauthorized")

    def check_model(self, model: str | None) -> None:
        """The name may be left out, `default`, the pipeline's, or a version that has traffic.

        While the first one loads, nothing is known of names: such a request is told to wait.
        """
        names = self.dispatcher.router.model_names
        if names and model not in (None, "default", *names):
            text = f"There is no model {model!r} here."
            raise ServingError(404, text, "model_not_found", "model")

    async def read(self, request: Request) -> Any:
        """What the request's body says; raises ServingError 400, 408, 413 or 415."""
        settings = self.dispatcher.settings
        form = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if form != "application/json":
            # What a web page can send without asking is of another type.
            text = "Send the body with the header `Content-Type: application/json`."
            raise ServingError(415, text, "content_type")
        return await read_json(request, settings.max_body_bytes, settings.body_timeout)

    def _admit(self, request: Request) -> None:
        """Let a request in that is complete and right; raises ServingError 429.

        A body that is still on its way takes nobody's place.
        """
        metrics = self.dispatcher.metrics
        if metrics.in_flight >= self.dispatcher.settings.max_waiting:
            text = "Too many requests are in flight. Try again soon."
            raise ServingError(429, text, "overloaded", retry=True)
        metrics.in_flight += 1
        request.state.ended.callback(metrics.leave)

    async def answered(
        self, request: Request, wanted: Sequence[GenerateRequest]
    ) -> tuple[OfVersion, list[Chunk]]:
        """A version's whole answers, which are kept in the journal; raises ServingError."""
        self._admit(request)
        by, answers = await while_connected(request, self.dispatcher.answer_all(wanted))
        self.journal.write(request.state.id, by, wanted, [answer.text for answer in answers])
        return by, answers

    async def begun(self, request: Request, wanted: GenerateRequest) -> Stream:
        """A stream; what of it was sent is kept in the journal at its end; raises ServingError."""
        self._admit(request)
        stream = await while_connected(request, self.dispatcher.stream(wanted))
        request.state.stream = stream
        request.state.ended.callback(stream.work.cancel)
        request.state.ended.callback(
            lambda: self.journal.write(request.state.id, stream.by, [wanted], [stream.text])
        )
        return stream


class Guard:
    """Around a route that asks a model."""

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name, authorize, admit or turn away, time and log a request, to its last piece."""
        dispatcher, request = self._context.dispatcher, Request(scope)
        metrics, settings = dispatcher.metrics, dispatcher.settings
        # The client's own name comes first where it gives one, which may not be the only such.
        given = request.headers.get("x-request-id", "")[:64]
        name = f"{given}-{uuid.uuid4().hex[:12]}" if given else uuid.uuid4().hex
        request.state.id, request.state.ended = name, ExitStack()
        longest = settings.body_timeout + settings.request_timeout
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
            # Body and answer are each given up sooner; this is for a client that does not read.
            with suppress(TimeoutError):
                async with asyncio.timeout(longest):
                    await self._app(scope, receive, send_named)
        except ServingError as error:
            await error.response()(scope, receive, send_named)
        finally:
            request.state.ended.close()
            if (stream := getattr(request.state, "stream", None)) and stream.error:
                # 200 was sent before the error came.
                status = stream.error.status
            path, seconds = request.url.path, monotonic() - started
            metrics.request(path, status, version, seconds)
            said = {"id": name, "path": path, "status": status, "version": version}
            log("request", **said, seconds=round(seconds, 3))


Handler = Callable[[ApiContext, Request], Awaitable[Response]]


def build_app(context: ApiContext, health: str = "/health", predict: str = "/predict") -> Starlette:
    """The routes: health, metrics, models, predict, completions, chat, a page.

    Args:
        health, predict: where Vertex AI, which may choose them, asks.
    """

    def told(path: str, handler: Handler) -> Route:
        return Route(path, partial(handler, context))

    def generated(path: str, handler: Handler) -> Route:
        guard = [Middleware(Guard, context)]
        return Route(path, partial(handler, context), methods=["POST"], middleware=guard)

    app = Starlette(
        routes=[
            told("/", _root),
            told(health, _health),
            told("/metrics", _metrics),
            told("/v1/models", _models),
            told("/v1/models/{name}", _model),
            generated(predict, _predict),
            generated("/v1/completions", partial(_generate, CompletionRequest)),
            generated("/v1/chat/completions", partial(_generate, ChatRequest)),
        ],
        middleware=[Middleware(OriginMiddleware, context.dispatcher)],
        exception_handlers=dict.fromkeys([ServingError, HTTPException, Exception], answer_error),
    )
    app.router.redirect_slashes = False
    return app


async def _root(_: ApiContext, __: Request) -> Response:
    return PlainTextResponse(
        "This is an endpoint for programs; its OpenAI base URL is this address with /v1.\n"
        "State: /health\n"
        "To query it in a browser, and see which training text is behind an answer, run:\n"
        "llm-assets board\n"
    )


async def _health(context: ApiContext, _: Request) -> Response:
    router = context.dispatcher.router
    told = {"version", "fingerprint", "share", "ready"}
    body = {
        "status": "ok" if router.healthy else "starting",
        "model": next(iter(router.model_names), None),
        "versions": [route.status.model_dump(include=told) for route in router.routes],
    }
    return JSONResponse(body, status_code=200 if router.healthy else 503)


async def _metrics(context: ApiContext, request: Request) -> Response:
    context.authorize(request)
    routes = [route.status for route in context.dispatcher.router.routes]
    return PlainTextResponse(context.dispatcher.metrics.render(routes))


async def _models(context: ApiContext, request: Request) -> Response:
    context.authorize(request)
    names = context.dispatcher.router.model_names
    return JSONResponse({"object": "list", "data": [_listed(context, name) for name in names]})


async def _model(context: ApiContext, request: Request) -> Response:
    context.authorize(request)
    name = request.path_params["name"]
    context.check_model(name)
    return JSONResponse(_listed(context, name))


def _listed(context: ApiContext, name: str) -> dict[str, Any]:
    """A model as OpenAI lists it."""
    return {"id": name, "object": "model", "created": context.started, "owned_by": "llm-assets"}


async def _predict(context: ApiContext, request: Request) -> Response:
    """Vertex AI's own shape, and OpenAI's as `rawPredict` and `streamRawPredict` send them."""
    content = await context.read(request)
    for name, kind in (("messages", ChatRequest), ("prompt", CompletionRequest)):
        if isinstance(content, dict) and name in content:
            return await _answer(context, request, parse(kind, content))
    wanted = parse(PredictRequest, content).generate_requests(context.dispatcher.settings)
    by, answers = await context.answered(request, wanted)
    # The text that was written, or the class that was told.
    predictions = [
        {"label": one.text, "scores": one.class_scores} if one.class_scores else one.text
        for one in answers
    ]
    return JSONResponse({"predictions": predictions}, headers=by.headers)


async def _generate(kind: type[OpenAIRequest], context: ApiContext, request: Request) -> Response:
    """OpenAI's routes, which differ by what `kind` says."""
    return await _answer(context, request, parse(kind, await context.read(request)))


async def _answer(context: ApiContext, request: Request, body: OpenAIRequest) -> Response:
    context.check_model(body.model)
    wanted = body.generate_requests(context.dispatcher.settings)
    name = request.state.id
    if not body.stream:
        by, answers = await context.answered(request, wanted)
        return JSONResponse(body.whole(name, by, answers), headers=by.headers)
    stream = await context.begun(request, wanted[0])
    headers = stream.by.headers | {"Cache-Control": "no-store"}
    return StreamingResponse(
        body.events(name, stream), media_type="text/event-stream", headers=headers
    )


class OriginMiddleware(CORSMiddleware):
    """Refuses web pages that were not allowed; the endpoint's own page is."""

    def __init__(self, app: ASGIApp, dispatcher: Dispatcher) -> None:
        super().__init__(
            app,
            allow_origins=dispatcher.settings.allowed_origins,
            allow_methods=["GET", "POST"],
            # OpenAI's client sends a dozen of its own, which change with its releases.
            allow_headers=["*"],
            expose_headers=[
                "X-Model-Version",
                "X-Model-Fingerprint",
                "X-Request-Id",
                "Retry-After",
            ],
        )
        self._dispatcher = dispatcher

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        return ServingError(403, f"{bytes(answer.body).decode()}.", "forbidden_origin").response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_origin(Request(scope), self._dispatcher.settings)
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
    known = name.strip("[]").lower() in (*LOOPBACK, *map(str.lower, settings.allowed_hosts))
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


def _number(text: str) -> float:
    """Vertex AI writes every number with a point, since a protobuf value knows no whole numbers."""
    value = float(text)
    return int(value) if value.is_integer() else value


async def read_json(request: Request, limit: int, seconds: float) -> Any:
    """What a request's body says; raises ServingError 400, 408 or 413.

    Args:
        limit: of the body, in bytes.
        seconds: that its client may take to send it.
    """
    too_large = ServingError(413, f"The body is larger than {limit:,} bytes.", "body_too_large")
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
        text = f"The body was not complete after {seconds:g} s."
        raise ServingError(408, text, "slow_body") from None
    try:
        value = json.loads(content, parse_float=_number)
        # Half a surrogate pair passes as JSON and is no character.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = "The body contains half of a surrogate pair (\\ud800 to \\udfff)."
        raise invalid(text, None) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not JSON: {error}.", None) from error
    return value
