"""The public HTTP server: checks, limits and counts, and leaves the writing to an engine."""

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic, time
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from serving.errors import ServingError, invalid, overloaded
from serving.gateway import Answer, Gateway
from serving.protocol import Chunk, GenerateRequest
from serving.requests import ChatRequest, CompletionRequest, PredictRequest, describe
from serving.telemetry import log

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Front:
    """What the routes need."""

    gateway: Gateway
    token: str | None
    """Bearer token that every request but `/health` must carry; None asks for none."""


def build_app(front: Front) -> FastAPI:
    """The routes: health, metrics, models, predict, completions, chat completions."""
    app = FastAPI(title="llm-assets endpoint", docs_url=None, redoc_url=None, openapi_url=None)
    gateway = front.gateway

    @app.get("/health")
    async def health() -> Response:
        routes = [
            {
                "version": route.engine.desired.version,
                "fingerprint": route.engine.desired.fingerprint,
                "share": route.share,
                "ready": route.engine.ready.is_set(),
            }
            for route in gateway.router.routes
        ]
        ready = gateway.router.ready
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
        names = [{"id": name, "object": "model"} for name in _model_names(gateway)]
        return JSONResponse({"object": "list", "data": names})

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

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}."
        return ServingError(error.status_code, text, "no_such_route").response()

    async def _predict(request: Request) -> Response:
        body = await _read(request, PredictRequest, gateway)
        wanted = body.generate_requests(gateway.settings)
        answers = await asyncio.gather(*(gateway.answer(one) for one in wanted))
        predictions = {"predictions": [answer.text for answer in answers]}
        return JSONResponse(
            predictions, headers=_headers(answers[0].version, answers[0].fingerprint)
        )

    async def _completions(request: Request) -> Response:
        body = await _read(request, CompletionRequest, gateway)
        _check_model(gateway, body.model)
        wanted = body.generate_request(gateway.settings, prompt=body.prompt)
        return await _respond(gateway, wanted, body.stream, _completion_body, request)

    async def _chat(request: Request) -> Response:
        body = await _read(request, ChatRequest, gateway)
        _check_model(gateway, body.model)
        wanted = body.generate_request(gateway.settings, messages=body.messages)
        return await _respond(gateway, wanted, body.stream, _chat_body, request)

    return app


async def _guarded(front: Front, request: Request, handler: Handler) -> Response:
    """Authorise, admit or turn away, time and log one request."""
    metrics, settings = front.gateway.metrics, front.gateway.settings
    started, status, version = monotonic(), 500, ""
    request.state.id = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex
    try:
        _authorise(front, request)
        if metrics.in_work >= settings.max_waiting:
            raise overloaded()
        metrics.in_work += 1
        try:
            response = await handler(request)
        except BaseException:
            metrics.in_work -= 1
            raise
        response.headers["X-Request-Id"] = request.state.id
        status, version = response.status_code, response.headers.get("X-Model-Version", "")
        if isinstance(response, StreamingResponse):
            # The place is given back when the last piece is sent or the client has left.
            response.body_iterator = _then(response.body_iterator, metrics)
        else:
            metrics.in_work -= 1
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
        metrics.in_work -= 1


def _authorise(front: Front, request: Request) -> None:
    if front.token is None:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {front.token}".encode()):
        raise ServingError(401, "A valid bearer token is needed.", "unauthorized")


async def _read(request: Request, kind: type[Body], gateway: Gateway) -> Body:
    """The request's body as a model; raises ServingError 400, 408 or 413."""
    limit, patience = gateway.settings.max_body_bytes, gateway.settings.body_timeout
    too_large = ServingError(413, f"The body is larger than {limit:,} bytes.", "body_too_large")
    request.state.body = None
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(patience):
            async for piece in request.stream():
                content += piece
                if len(content) > limit:
                    raise too_large
    except TimeoutError:
        raise ServingError(
            408, f"The body was not complete after {patience:g} s.", "slow_body"
        ) from None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not JSON: {error}.", None) from error
    request.state.body = value
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(*describe(error)) from error


def _model_names(gateway: Gateway) -> list[str]:
    return [route.engine.desired.version for route in gateway.router.routes if route.share > 0]


def _check_model(gateway: Gateway, model: str | None) -> None:
    """The model name may be left out, `default`, or a version that has traffic."""
    if model not in (None, "default", *_model_names(gateway)):
        raise ServingError(404, f"There is no model {model!r} here.", "model_not_found", "model")


async def _respond(
    gateway: Gateway,
    wanted: GenerateRequest,
    stream: bool,
    body: Callable[..., dict[str, Any]],
    request: Request,
) -> Response:
    name = f"{'chatcmpl' if wanted.messages else 'cmpl'}-{request.state.id}"
    if not stream:
        answer = await gateway.answer(wanted)
        content = body(name, answer.version, answer.text, answer.end, whole=True)
        content["usage"] = _usage(answer)
        return JSONResponse(content, headers=_headers(answer.version, answer.fingerprint))
    begun = await gateway.stream(wanted)

    async def events() -> AsyncIterator[str]:
        async with aclosing(begun.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.error is not None:
                    error = {"error": {"message": chunk.error, "type": "server_error"}}
                    yield f"data: {json.dumps(error)}\n\n"
                    return
                content = body(name, begun.version, chunk.text, chunk, whole=False)
                yield f"data: {json.dumps(content)}\n\n"
        yield "data: [DONE]\n\n"

    headers = _headers(begun.version, begun.fingerprint) | {"Cache-Control": "no-store"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _completion_body(
    name: str, version: str, text: str, chunk: Chunk, whole: bool
) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": chunk.finish_reason}
    return {
        "id": name,
        "object": "text_completion",
        "created": int(time()),
        "model": version,
        "choices": [choice],
    }


def _chat_body(name: str, version: str, text: str, chunk: Chunk, whole: bool) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message" if whole else "delta": {"role": "assistant", "content": text},
        "finish_reason": chunk.finish_reason,
    }
    return {
        "id": name,
        "object": "chat.completion" if whole else "chat.completion.chunk",
        "created": int(time()),
        "model": version,
        "choices": [choice],
    }


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.end.prompt_tokens, answer.end.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _headers(version: str, fingerprint: str) -> dict[str, str]:
    return {"X-Model-Version": version, "X-Model-Fingerprint": fingerprint}
