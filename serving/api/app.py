"""The public HTTP server: checks, limits and counts, and leaves the writing to an engine."""

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from serving.api.admission import check_content_type, check_origin, while_connected
from serving.api.dispatcher import Gateway
from serving.api.errors import ServingError, client_gone, invalid, overloaded
from serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    PredictRequest,
    describe,
)
from serving.engine.protocol import Chunk, GenerateRequest
from serving.telemetry import log

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Front:
    """What the routes need."""

    gateway: Gateway
    token: str | None
    """Bearer token that every request but `/health` must carry; None asks for none."""
    started: int = field(default_factory=lambda: int(time()))
    """Seconds since the epoch."""


def build_app(front: Front) -> FastAPI:
    """The routes: health, metrics, models, predict, completions, chat completions."""
    gateway = front.gateway

    def check(request: Request) -> None:
        check_origin(request, gateway.settings)

    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check)],
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=gateway.settings.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
    )

    @app.get("/health")
    async def health() -> Response:
        routes = [
            {
                "version": route.engine.desired.version,
                "fingerprint": route.engine.desired.fingerprint,
                "share": route.share,
                "ready": route.healthy,
            }
            for route in gateway.router.routes
        ]
        ready = gateway.router.healthy
        body = {"status": "ok" if ready else "starting", "versions": routes}
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        _authorise(front, request)
        engines = [
            (r.engine.desired.version, r.engine.ready.is_set(), r.share, r.engine.restarts)
            for r in gateway.router.routes
        ]
        return PlainTextResponse(gateway.metrics.render(engines))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _authorise(front, request)
        names = [_model_body(front, name) for name in _model_names(gateway)]
        return JSONResponse({"object": "list", "data": names})

    @app.get("/v1/models/{name}")
    async def model(request: Request, name: str) -> Response:
        _authorise(front, request)
        _check_model(gateway, name)
        return JSONResponse(_model_body(front, name))

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return await _guarded(front, request, _predict)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _guarded(front, request, _completions)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _guarded(front, request, _chat)

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

    async def _predict(request: Request) -> Response:
        body = await _read(request, PredictRequest, gateway)
        wanted = body.generate_requests(gateway.settings)
        answers = await while_connected(request, gateway.answer_all(wanted))
        predictions = {"predictions": [answer.text for answer in answers]}
        return JSONResponse(
            predictions, headers=_headers(answers[0].version, answers[0].fingerprint)
        )

    async def _completions(request: Request) -> Response:
        body = await _read(request, CompletionRequest, gateway)
        _check_model(gateway, body.model)
        wanted = body.generate_requests(gateway.settings)
        return await _respond(gateway, wanted, body, _completion_choice, request)

    async def _chat(request: Request) -> Response:
        body = await _read(request, ChatRequest, gateway)
        _check_model(gateway, body.model)
        wanted = body.generate_chat(gateway.settings)
        return await _respond(gateway, [wanted], body, _chat_choice, request)

    return app


async def _guarded(front: Front, request: Request, handler: Handler) -> Response:
    """Authorize, admit or turn away, time and log one request."""
    metrics, settings = front.gateway.metrics, front.gateway.settings
    started, status, version = monotonic(), 500, ""
    request.state.id = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex
    try:
        _authorise(front, request)
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


async def _then(pieces: Any, metrics: Any) -> AsyncIterator[Any]:
    try:
        async with aclosing(pieces) as inner:
            async for piece in inner:
                yield piece
    finally:
        metrics.in_flight -= 1


def _authorise(front: Front, request: Request) -> None:
    if front.token is None:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {front.token}".encode()):
        raise ServingError(401, "A valid bearer token is needed.", "unauthorized")


async def _read(request: Request, kind: type[Body], gateway: Gateway) -> Body:
    """The request's body as a model; raises ServingError 400, 408 or 413."""
    limit, seconds = gateway.settings.max_body_bytes, gateway.settings.body_timeout
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


def _model_names(gateway: Gateway) -> list[str]:
    """The pipeline's name, which stays, and the versions that have traffic."""
    serving = [route.engine.desired for route in gateway.router.routes if route.share > 0]
    names = [desired.name for desired in serving] + [desired.version for desired in serving]
    return list(dict.fromkeys(names))


def _model_body(front: Front, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": front.started, "owned_by": "llm-assets"}


def _check_model(gateway: Gateway, model: str | None) -> None:
    """The model name may be left out, `default`, the pipeline's, or a version that has traffic."""
    if model not in (None, "default", *_model_names(gateway)):
        raise ServingError(404, f"There is no model {model!r} here.", "model_not_found", "model")


async def _respond(
    gateway: Gateway,
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
        answers = await while_connected(request, gateway.answer_all(wanted))
        first = answers[0]
        envelope |= _model_fields(body, first.version, first.fingerprint)
        choices = [
            choice(answer.text, answer.end, True) | {"index": index}
            for index, answer in enumerate(answers)
        ]
        usage = _usage([answer.end for answer in answers])
        return JSONResponse(
            envelope | {"choices": choices, "usage": usage},
            headers=_headers(first.version, first.fingerprint),
        )
    begun = await while_connected(request, gateway.stream(wanted[0]))
    envelope |= _model_fields(body, begun.version, begun.fingerprint)
    if chat:
        envelope["object"] = "chat.completion.chunk"

    async def events() -> AsyncIterator[str]:
        async with aclosing(begun.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.error is not None:
                    error = ServingError(503, chunk.error, "unavailable")
                    yield f"data: {json.dumps(error.body)}\n\n"
                    return
                choices = [choice(chunk.text, chunk, False) | {"index": 0}]
                yield f"data: {json.dumps(envelope | {'choices': choices})}\n\n"
        if body.stream_options and body.stream_options.include_usage:
            last = envelope | {"choices": [], "usage": _usage([chunk])}
            yield f"data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"

    headers = _headers(begun.version, begun.fingerprint) | {"Cache-Control": "no-store"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _model_fields(body: OpenAIRequest, version: str, fingerprint: str) -> dict[str, Any]:
    """The model as it was asked for, and which version of it answered."""
    model = body.model if body.model not in (None, "default") else version
    return {"model": model, "system_fingerprint": f"{version}-{fingerprint}"}


def _completion_choice(text: str, chunk: Chunk, whole: bool) -> dict[str, Any]:
    return {"text": text, "logprobs": None, "finish_reason": chunk.finish_reason}


def _chat_choice(text: str, chunk: Chunk, whole: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"message" if whole else "delta": message, "finish_reason": chunk.finish_reason}


def _usage(ends: list[Chunk]) -> dict[str, int]:
    prompt = sum(end.prompt_tokens for end in ends)
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _headers(version: str, fingerprint: str) -> dict[str, str]:
    return {"X-Model-Version": version, "X-Model-Fingerprint": fingerprint}
