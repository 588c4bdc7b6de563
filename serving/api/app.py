"""The public HTTP server: checks, limits and counts, and leaves the writing to an engine."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from time import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from serving.api.admission import OriginMiddleware
from serving.api.dispatcher import Stream
from serving.api.errors import ServingError, answer_error
from serving.api.guard import ApiContext, Guard, event_stream
from serving.api.pages import PAGES
from serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    PredictRequest,
    StreamOptions,
)
from serving.api.responses import respond
from serving.engine.protocol import Chunk
from serving.state import OfVersion

Handler = Callable[[ApiContext, Request], Awaitable[Response]]


def build_app(context: ApiContext) -> Starlette:
    """The routes: health, metrics, models, predict, completions, chat, responses, a page."""

    def told(path: str, handler: Handler) -> Route:
        return Route(path, partial(handler, context))

    def generated(path: str, handler: Handler) -> Route:
        guard = [Middleware(Guard, context)]
        return Route(path, partial(handler, context), methods=["POST"], middleware=guard)

    app = Starlette(
        routes=[
            told("/health", _health),
            told("/metrics", _metrics),
            told("/v1/models", _models),
            told("/v1/models/{name}", _model),
            generated("/predict", _predict),
            generated("/v1/completions", partial(_complete, CompletionRequest)),
            generated("/v1/chat/completions", partial(_complete, ChatRequest)),
            generated("/v1/responses", respond),
            *PAGES,
        ],
        middleware=[Middleware(OriginMiddleware, context.dispatcher.settings)],
        exception_handlers=dict.fromkeys([ServingError, HTTPException, Exception], answer_error),
    )
    app.router.redirect_slashes = False
    return app


async def _health(context: ApiContext, _: Request) -> Response:
    router = context.dispatcher.router
    told = {"version", "fingerprint", "share"}
    body = {
        "status": "ok" if router.healthy else "starting",
        "model": next(iter(router.model_names), None),
        "versions": [
            route.status.model_dump(include=told) | {"ready": route.healthy}
            for route in router.routes
        ],
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
    body = await context.read(request, PredictRequest)
    wanted = body.generate_requests(context.dispatcher.settings)
    answers = await context.answered(request, wanted)
    # The text that was written, or the class that was told.
    predictions = [
        {"label": one.text, "scores": one.class_scores} if one.class_scores else one.text
        for one in (answer.whole for answer in answers)
    ]
    return JSONResponse({"predictions": predictions}, headers=answers[0].by.headers)


async def _complete(kind: type[OpenAIRequest], context: ApiContext, request: Request) -> Response:
    """Completions and chats, which differ by what `kind` says."""
    body = await context.read(request, kind)
    context.check_model(body.model)
    wanted = body.generate_requests(context.dispatcher.settings)
    if body.stream:
        stream = await context.begun(request, wanted[0])
        return event_stream(_events(body, request.state.id, stream), stream)
    answers = await context.answered(request, wanted)
    content = _envelope(body, request.state.id, answers[0].by) | {
        "choices": [body.choice(answer.whole, index) for index, answer in enumerate(answers)],
        "usage": _usage([answer.whole for answer in answers], body.n),
    }
    return JSONResponse(content, headers=answers[0].by.headers)


def _envelope(body: OpenAIRequest, name: str, by: OfVersion) -> dict[str, Any]:
    """What the whole of an answer and each of its events have in common."""
    is_chat = isinstance(body, ChatRequest)
    kind = "chat.completion" if is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": f"{kind}.chunk" if is_chat and body.stream else kind,
        "created": int(time()),
        "model": by.model(body.model),
        "system_fingerprint": f"{by.version}-{by.fingerprint}",
    }


def _usage(ends: list[Chunk], choices: int = 1) -> dict[str, int]:
    """Tokens of prompts, each with so many answers in a row, and of the answers."""
    prompt = sum(end.prompt_tokens for end in ends[::choices])
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


async def _events(body: OpenAIRequest, name: str, stream: Stream) -> AsyncIterator[str]:
    """An answer as a stream of events, a piece each."""
    options, envelope = body.stream_options or StreamOptions(), _envelope(body, name, stream.by)
    async with aclosing(stream.chunks) as chunks:
        async for chunk in chunks:
            if chunk.error is not None:
                error = ServingError(503, chunk.error, "unavailable")
                yield f"data: {json.dumps(error.body)}\n\n"
                return
            piece = envelope | {"choices": [body.choice(chunk)]}
            if options.continuous_usage_stats:
                piece["usage"] = _usage([chunk])
            yield f"data: {json.dumps(piece)}\n\n"
    if options.include_usage:
        last = envelope | {"choices": [], "usage": _usage([chunk])}
        yield f"data: {json.dumps(last)}\n\n"
    yield "data: [DONE]\n\n"
