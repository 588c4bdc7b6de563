"""The public HTTP server: who and what may come in, for how long, and what is told of it.

A request for an answer passes `OriginMiddleware` and `Guard` to its route in `Api`, which reads its
body, admits it, and has the dispatcher answer.
"""

import asyncio
import hmac
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
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
from serving.state import Desired

Result = TypeVar("Result")


class Api:
    """The routes, and what they need."""

    def __init__(self, dispatcher: Dispatcher, journal: Journal, token: str | None) -> None:
        """Of `build_app`."""
        self.dispatcher, self._journal, self._token = dispatcher, journal, token
        self._started = int(time())

    def authorize(self, request: Request) -> None:
        """Check the bearer token; raises ServingError 401."""
        header = request.headers.get("authorization", "").encode()
        expected = f"Bearer {self._token}".encode()
        # In constant time, so that nobody learns from it how much of a token was right.
        if self._token is not None and not hmac.compare_digest(header, expected):
            raise ServingError(401, "A valid bearer token is required.", "unauthorized")

    def _check_model(self, model: str | None) -> None:
        """Raise ServingError 404 unless the name is absent, `default`, the pipeline's, or a version
        that has traffic.

        While the first version loads, no names are known: such a request is told to wait.
        """
        names = self.dispatcher.router.model_names
        if names and model not in (None, "default", *names):
            text = f"There is no model {model!r} here."
            raise ServingError(404, text, "model_not_found", "model")

    async def _read(self, request: Request) -> Any:
        """What the request's body says; raises ServingError 400, 408, 413 or 415."""
        settings = self.dispatcher.settings
        form = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if form != "application/json":
            # A web page may send other types without a preflight request.
            text = "Send the body with the header `Content-Type: application/json`."
            raise ServingError(415, text, "content_type")
        most, seconds, content = settings.max_body_bytes, settings.body_timeout, bytearray()
        too_large = ServingError(413, f"The body is larger than {most:,} bytes.", "body_too_large")
        # Where the length is told, a body that is too large is refused before any of it is read.
        # h11 has already rejected a length that is no number.
        if int(request.headers.get("content-length") or 0) > most:
            raise too_large
        try:
            async with asyncio.timeout(seconds):
                async for piece in request.stream():
                    content += piece
                    # What arrives counts as well, since a client need not tell the length, or not
                    # the right one.
                    if len(content) > most:
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

    def _admit(self, request: Request) -> None:
        """Let a request in that is complete and right; raises ServingError 429.

        A body that is still on its way takes nobody's place.
        """
        metrics = self.dispatcher.metrics
        # Nothing is awaited between the look and the count, so two requests cannot take the last
        # place.
        if metrics.in_flight >= self.dispatcher.settings.max_waiting:
            text = "Too many requests are in flight. Try again soon."
            raise ServingError(429, text, "overloaded", retry=True)
        metrics.in_flight += 1
        # `Guard` gives the place back after the last piece: a stream goes on long after its route
        # returned.
        request.state.ended.callback(metrics.leave)

    async def _answered(
        self, request: Request, requests: Sequence[GenerateRequest]
    ) -> tuple[Desired, list[Chunk]]:
        """A version's whole answers, which are kept in the journal; raises ServingError."""
        self._admit(request)
        by, answers = await while_connected(request, self.dispatcher.answer_all(requests))
        self._journal.write(request.state.id, by, requests, [answer.text for answer in answers])
        return by, answers

    async def _begun(self, request: Request, generation: GenerateRequest) -> Stream:
        """Begin a stream; what was sent of it goes into the journal at its end. Raises
        ServingError."""
        self._admit(request)
        stream = await while_connected(request, self.dispatcher.stream(generation))
        # These are called in reverse: the journal has what was sent, then the work ends, and only
        # then another request is admitted in its place.
        request.state.stream = stream
        request.state.ended.callback(stream.work.cancel)
        request.state.ended.callback(
            lambda: self._journal.write(request.state.id, stream.by, [generation], [stream.text])
        )
        return stream

    async def tell_where(self, _: Request) -> Response:
        """What people see who open the address in a browser."""
        return PlainTextResponse(
            "This is an endpoint for programs; its OpenAI base URL is this address with /v1.\n"
            "State: /health\n"
            "To query it in a browser, and see which training text is behind an answer, run:\n"
            "llm-assets board\n"
        )

    async def tell_health(self, _: Request) -> Response:
        """Whether a version answers, and each version's share."""
        router = self.dispatcher.router
        is_healthy = any(route.share > 0 and route.ready for route in router.routes)
        fields = {"version", "fingerprint", "share", "ready"}
        body = {
            "status": "ok" if is_healthy else "starting",
            "model": next(iter(router.model_names), None),
            "versions": [route.status.model_dump(include=fields) for route in router.routes],
        }
        # Vertex AI sends no traffic to a container while this is 503.
        return JSONResponse(body, status_code=200 if is_healthy else 503)

    async def tell_metrics(self, request: Request) -> Response:
        """What Prometheus asks."""
        self.authorize(request)
        routes = [route.status for route in self.dispatcher.router.routes]
        return PlainTextResponse(self.dispatcher.metrics.render(routes))

    async def list_models(self, request: Request) -> Response:
        """OpenAI's list of models, or the one of a name."""
        self.authorize(request)
        common = {"object": "model", "created": self._started, "owned_by": "llm-assets"}
        if name := request.path_params.get("name"):
            self._check_model(name)
            return JSONResponse({"id": name, **common})
        models = [{"id": name, **common} for name in self.dispatcher.router.model_names]
        return JSONResponse({"object": "list", "data": models})

    async def predict(self, request: Request) -> Response:
        """Vertex AI's own shape, and OpenAI's as `rawPredict` and `streamRawPredict` send them."""
        content = await self._read(request)
        # Vertex AI passes on a raw request as the client sent it: OpenAI's field names, of which
        # Vertex AI's own shape has none, tell it apart.
        for name, kind in (("messages", ChatRequest), ("prompt", CompletionRequest)):
            if isinstance(content, dict) and name in content:
                return await self._answer(request, parse(kind, content))
        requests = parse(PredictRequest, content).generate_requests(self.dispatcher.settings)
        by, answers = await self._answered(request, requests)
        # The text that was written, or the class that was told.
        predictions = [
            {"label": answer.text, "scores": answer.class_scores}
            if answer.class_scores
            else answer.text
            for answer in answers
        ]
        return JSONResponse({"predictions": predictions}, headers=by.headers)

    async def generate(self, kind: type[OpenAIRequest], request: Request) -> Response:
        """OpenAI's routes, which differ by what `kind` says."""
        return await self._answer(request, parse(kind, await self._read(request)))

    async def _answer(self, request: Request, body: OpenAIRequest) -> Response:
        self._check_model(body.model)
        requests = body.generate_requests(self.dispatcher.settings)
        name = request.state.id
        if not body.stream:
            by, answers = await self._answered(request, requests)
            return JSONResponse(body.whole(name, by, answers), headers=by.headers)
        stream = await self._begun(request, requests[0])
        headers = stream.by.headers | {"Cache-Control": "no-store"}
        events = body.events(name, stream)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)


class Guard:
    """Around a route that asks a model."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app, self._api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name, authorize, admit or turn away, time and log a request, to its last piece."""
        dispatcher, request = self._api.dispatcher, Request(scope)
        metrics, settings = dispatcher.metrics, dispatcher.settings
        # A client's own id comes first, but need not be unique, and may be long: it goes into the
        # log, the journal and a header.
        client_id = request.headers.get("x-request-id", "")[:64]
        name = f"{client_id}-{uuid.uuid4().hex[:12]}" if client_id else uuid.uuid4().hex
        request.state.id, request.state.ended = name, ExitStack()
        longest = settings.body_timeout + settings.request_timeout
        # What is counted where the route raises something unexpected: Starlette answers that
        # outside of this middleware, where `send_named` does not see it.
        started, status, version = monotonic(), 500, ""

        async def send_named(message: Message) -> None:
            nonlocal status, version
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                status, version = message["status"], headers.get("X-Model-Version", "")
            await send(message)

        try:
            # Before anything of the body is read.
            self._api.authorize(request)
            # Body and answer have their own limits, which are shorter. This one ends a request
            # whose client reads its answer so slowly that it would keep its place for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(longest):
                    await self._app(scope, receive, send_named)
        except ServingError as error:
            # Raised by `authorize` alone: what a route raises, Starlette has answered by here.
            await error.response()(scope, receive, send_named)
        finally:
            request.state.ended.close()
            if (stream := getattr(request.state, "stream", None)) and stream.error:
                # 200 was sent before the error came.
                status = stream.error.status
            path, seconds = request.url.path, monotonic() - started
            metrics.request(path, status, version, seconds)
            fields = {"id": name, "path": path, "status": status, "version": version}
            log("request", **fields, seconds=round(seconds, 3))


def build_app(
    dispatcher: Dispatcher,
    folder: Path,
    token: str | None = None,
    health: str = "/health",
    predict: str = "/predict",
) -> Starlette:
    """The routes: health, metrics, models, predict, completions, chat, a page.

    Args:
        folder: where the journal is kept.
        token: bearer token that every request but for health must carry; None asks for none.
        health, predict: where Vertex AI, which may choose them, asks.
    """
    api = Api(dispatcher, Journal(folder, lambda: dispatcher.settings.journal), token)

    def generated(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, handler, methods=["POST"], middleware=[Middleware(Guard, api)])

    app = Starlette(
        routes=[
            Route("/", api.tell_where),
            Route(health, api.tell_health),
            Route("/metrics", api.tell_metrics),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name}", api.list_models),
            generated(predict, api.predict),
            generated("/v1/completions", partial(api.generate, CompletionRequest)),
            generated("/v1/chat/completions", partial(api.generate, ChatRequest)),
        ],
        middleware=[Middleware(OriginMiddleware, dispatcher)],
        exception_handlers=dict.fromkeys([ServingError, HTTPException, Exception], answer_error),
    )
    # Starlette would answer a path with a slash too many by a redirect to the Host that was sent.
    app.router.redirect_slashes = False
    return app


class OriginMiddleware(CORSMiddleware):
    """Refuses web pages that were not allowed; the endpoint's own page is."""

    def __init__(self, app: ASGIApp, dispatcher: Dispatcher) -> None:
        super().__init__(
            app,
            allow_origins=dispatcher.settings.allowed_origins,
            allow_methods=["GET", "POST"],
            # OpenAI's client sends a dozen of its own, which change with its releases.
            allow_headers=["*"],
            # A browser lets a page of another origin read few headers besides those that are named.
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
            # Starlette calls the handler of a ServingError for what routes raise, and not for what
            # middleware does.
            await error.response()(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def check_origin(request: Request, settings: EndpointSettings) -> None:
    """Refuse web pages that were not allowed, and bodies whose length is told in two ways; raises
    ServingError 400, 403 or 421.

    A page that has its own name resolve to this machine (DNS rebinding) is known by the Host that
    its browser sends.
    """
    is_old = request.scope.get("http_version", "1.1") < "1.1"
    if "transfer-encoding" in request.headers and (is_old or "content-length" in request.headers):
        # A proxy in front that goes by the other length would take a part of one client's body for
        # the next request, and give its answer to another client (RFC 9112, 6.1).
        text = "The length of the body is told in two ways."
        error = ServingError(400, text, "invalid_http")
        error.headers["Connection"] = "close"
        raise error
    origin, host = (request.headers.get(name, "") for name in ("origin", "host"))
    if origin not in ("", f"http://{host}", *settings.allowed_origins):
        text = f"The origin {origin!r} is not in `endpoint.allowed_origins`."
        raise ServingError(403, text, "forbidden_origin")
    is_known = _host_name(host) in (*LOOPBACK, *map(_host_name, settings.allowed_hosts))
    if settings.host in LOOPBACK and not is_known:
        text = "The Host is neither loopback nor in `endpoint.allowed_hosts`."
        raise ServingError(421, text, "unknown_host")


def _host_name(host: str) -> str:
    """A Host, or one of `endpoint.allowed_hosts`, without the port that some write beside it."""
    return re.sub(r"^([^:]*|\[.*\]):\d*$", r"\1", host).strip("[]").lower()


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; it is ended when its client goes away, which raises ServingError 499."""
    # The body was read to its end before, so `_disconnected` takes no piece of it away.
    task, disconnect = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_gone()
    finally:
        for pending in (task, disconnect):
            pending.cancel()
        # Canceled work may still have something to undo.
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _number(text: str) -> float:
    """Vertex AI writes every number with a point, since a protobuf value knows no whole numbers."""
    value = float(text)
    return int(value) if value.is_integer() else value
