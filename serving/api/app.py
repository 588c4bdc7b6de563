"""The public HTTP server: checks, limits and counts, and leaves the writing to an engine."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from time import time
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from serving.api.admission import OriginMiddleware, check_origin, while_connected
from serving.api.dispatcher import Answer, Dispatcher
from serving.api.errors import ServingError
from serving.api.guard import (
    ApiContext,
    answered,
    authorize,
    event_stream,
    guarded,
    noted,
    read,
    version_headers,
)
from serving.api.models import (
    check_model,
    model_body,
    model_fields,
    model_names,
    usage_of,
)
from serving.api.pages import add_pages
from serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    PredictRequest,
    StreamOptions,
    logprobs_body,
)
from serving.api.responses import respond
from serving.engine.protocol import Chunk, GenerateRequest


def build_app(context: ApiContext) -> FastAPI:
    """The routes: health, metrics, models, predict, completions, chat, responses, a page."""
    settings = context.dispatcher.settings

    def check(request: Request) -> None:
        check_origin(request, settings)

    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check)],
    )
    app.add_middleware(
        OriginMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
    )
    _add_state(app, context)
    _add_generation(app, context)
    add_pages(app)
    _add_faults(app)
    return app


def _add_state(app: FastAPI, context: ApiContext) -> None:
    """What serves, and how much was asked of it."""
    dispatcher = context.dispatcher

    @app.get("/health")
    async def health() -> Response:
        routes = [
            {
                "version": route.engine.desired.version,
                "fingerprint": route.engine.desired.fingerprint,
                "share": route.share,
                "ready": route.healthy,
            }
            for route in dispatcher.router.routes
        ]
        ready = dispatcher.router.healthy
        body = {
            "status": "ok" if ready else "starting",
            "model": next(iter(model_names(dispatcher)), None),
            "versions": routes,
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        authorize(context, request)
        engines = [
            (r.engine.desired.version, r.engine.ready.is_set(), r.share, r.engine.restarts)
            for r in dispatcher.router.routes
        ]
        return PlainTextResponse(dispatcher.metrics.render(engines))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        authorize(context, request)
        names = [model_body(context, name) for name in model_names(dispatcher)]
        return JSONResponse({"object": "list", "data": names})

    @app.get("/v1/models/{name}")
    async def model(request: Request, name: str) -> Response:
        authorize(context, request)
        check_model(dispatcher, name)
        return JSONResponse(model_body(context, name))


def _add_generation(app: FastAPI, context: ApiContext) -> None:
    """What a model is asked for."""
    dispatcher = context.dispatcher

    async def answer_predict(request: Request) -> Response:
        body = await read(request, PredictRequest, dispatcher)
        wanted = body.generate_requests(dispatcher.settings)
        answers = await answered(request, dispatcher, wanted)
        predictions = {"predictions": [_prediction(answer) for answer in answers]}
        return JSONResponse(predictions, headers=version_headers(answers[0]))

    async def answer_completions(request: Request) -> Response:
        body = await read(request, CompletionRequest, dispatcher)
        check_model(dispatcher, body.model)
        prompts = body.generate_requests(dispatcher.settings)
        wanted = [choice for prompt in prompts for choice in body.choices_of(prompt)]
        return await _respond(dispatcher, wanted, body, _completion_choice, request)

    async def answer_chat(request: Request) -> Response:
        body = await read(request, ChatRequest, dispatcher)
        check_model(dispatcher, body.model)
        wanted = body.choices_of(body.generate_chat(dispatcher.settings))
        return await _respond(dispatcher, wanted, body, _chat_choice, request)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return await guarded(context, request, answer_predict)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await guarded(context, request, answer_completions)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await guarded(context, request, answer_chat)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await guarded(context, request, lambda one: respond(one, dispatcher))


def _add_faults(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(ServingError)
    async def serving_error(_: Request, error: ServingError) -> Response:
        return error.response()

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        return ServingError(500, "An unforeseen fault, which the log shows.", "fault").response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}."
        return ServingError(error.status_code, text, "no_such_route").response()


async def _respond(
    dispatcher: Dispatcher,
    wanted: list[GenerateRequest],
    body: OpenAIRequest,
    choice: Callable[[str, Chunk, bool], dict[str, Any]],
    request: Request,
) -> Response:
    chat = wanted[0].messages is not None
    envelope: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.state.id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time()),
    }
    if not body.stream:
        answers = await answered(request, dispatcher, wanted)
        envelope |= model_fields(body.model, answers[0])
        choices = [
            choice(answer.text, answer.end, True) | {"index": index}
            for index, answer in enumerate(answers)
        ]
        usage = usage_of([answer.end for answer in answers], body.n)
        envelope |= {"choices": choices, "usage": usage}
        return JSONResponse(envelope, headers=version_headers(answers[0]))
    begun = await while_connected(request, dispatcher.stream(wanted[0]))
    envelope |= model_fields(body.model, begun)
    if chat:
        envelope["object"] = "chat.completion.chunk"
    pieces = noted(request, wanted[0], begun)
    options = body.stream_options or StreamOptions()
    return event_stream(_events(envelope, pieces, choice, options), begun)


async def _events(
    envelope: dict[str, Any],
    pieces: AsyncGenerator[Chunk, None],
    choice: Callable[[str, Chunk, bool], dict[str, Any]],
    options: StreamOptions,
) -> AsyncIterator[str]:
    """An answer as a stream of events, a piece each."""
    async with aclosing(pieces) as chunks:
        async for chunk in chunks:
            if chunk.error is not None:
                error = ServingError(503, chunk.error, "unavailable")
                yield f"data: {json.dumps(error.body)}\n\n"
                return
            piece = envelope | {"choices": [choice(chunk.text, chunk, False) | {"index": 0}]}
            if options.continuous_usage_stats:
                piece["usage"] = usage_of([chunk])
            yield f"data: {json.dumps(piece)}\n\n"
    if options.include_usage:
        last = envelope | {"choices": [], "usage": usage_of([chunk])}
        yield f"data: {json.dumps(last)}\n\n"
    yield "data: [DONE]\n\n"


def _prediction(answer: Answer) -> str | dict[str, Any]:
    """The text that was written, or the class that was told."""
    scores = answer.end.class_scores
    return {"label": answer.text, "scores": scores} if scores else answer.text


def _completion_choice(text: str, chunk: Chunk, whole: bool) -> dict[str, Any]:
    logprobs = logprobs_body(chunk.scores) if chunk.scores else None
    return {"text": chunk.echo + text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}


def _chat_choice(text: str, chunk: Chunk, whole: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"message" if whole else "delta": message, "finish_reason": chunk.finish_reason}
