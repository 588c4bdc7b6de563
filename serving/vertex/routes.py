"""What a Vertex AI container answers: predict and OpenAI's routes, before an OpenAI-like engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.api.body import read_json
from serving.api.errors import ServingError, answer_error, invalid, unavailable
from serving.api.requests import PredictRequest, parse
from serving.engine.protocol import GenerateRequest
from serving.settings import EndpointSettings
from serving.state import OfVersion

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMITS = EndpointSettings(max_new_tokens=1_000_000, max_prompt_tokens=1_000_000)
"""None of its own: the engine refuses what its model does not take."""
LARGEST_BODY = 10 * 1024 * 1024
"""Bytes; what Vertex AI takes at most."""


@dataclass
class Backend:
    """The engine behind the routes."""

    engine: httpx.AsyncClient
    serves: OfVersion
    ready: bool = False
    """Whether the model has continued its probe."""


def build_app(backend: Backend, health_route: str, predict_route: str) -> Starlette:
    """The routes; nothing else of the engine can be reached.

    Vertex AI passes on requests to the predict route alone. So that one takes its own shape
    (`instances`), and OpenAI's bodies as `rawPredict` and `streamRawPredict` send them.
    """

    async def health(_: Request) -> Response:
        healthy = backend.ready and await is_healthy(backend.engine)
        return Response(status_code=200 if healthy else 503)

    async def predict(request: Request) -> Response:
        body = await _read(request, backend)
        if "messages" in body:
            return await _pass_on(backend, CHAT, body)
        if "prompt" in body:
            return await _pass_on(backend, COMPLETIONS, body)
        return await _predict(backend, body)

    async def openai(request: Request) -> Response:
        return await _pass_on(backend, request.url.path, await _read(request, backend))

    asked = {predict_route: predict, COMPLETIONS: openai, CHAT: openai}
    posts = [Route(path, handler, methods=["POST"]) for path, handler in asked.items()]
    return Starlette(
        routes=[Route(health_route, health), *posts],
        exception_handlers={ServingError: answer_error},
    )


async def is_healthy(engine: httpx.AsyncClient) -> bool:
    """Whether an engine answers its health check."""
    try:
        return (await engine.get("/health", timeout=5.0)).status_code == 200
    except httpx.HTTPError:
        return False


async def complete(engine: httpx.AsyncClient, wanted: GenerateRequest) -> str:
    """One continuation; raises ServingError."""
    fields = {"prompt", "max_tokens", "temperature", "top_p", "stop"}
    try:
        answer = await engine.post(COMPLETIONS, json=wanted.model_dump(include=fields))
    except httpx.HTTPError as error:
        raise unavailable(f"The model's engine did not answer ({type(error).__name__}).") from error
    if answer.status_code != 200:
        raise _refusal(answer.status_code, answer.content)
    return str(answer.json()["choices"][0]["text"])


async def _predict(backend: Backend, body: dict[str, Any]) -> Response:
    wanted = parse(PredictRequest, body).generate_requests(LIMITS)
    texts = await asyncio.gather(*(complete(backend.engine, one) for one in wanted))
    return JSONResponse({"predictions": texts}, headers=backend.serves.headers)


async def _pass_on(backend: Backend, route: str, body: dict[str, Any]) -> Response:
    """Send a request to the engine and its answer back, piece by piece."""
    request = backend.engine.build_request("POST", route, json=body)
    try:
        answer = await backend.engine.send(request, stream=True)
    except httpx.HTTPError as error:
        raise unavailable(f"The model's engine did not answer ({type(error).__name__}).") from error

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_bytes():
                yield piece
        finally:
            await answer.aclose()

    kind = answer.headers.get("content-type", "application/json")
    return StreamingResponse(pieces(), answer.status_code, backend.serves.headers, kind)


async def _read(request: Request, backend: Backend) -> dict[str, Any]:
    if not backend.ready:
        raise unavailable("The model is still being loaded.")
    body = await read_json(request, LARGEST_BODY, LIMITS.body_timeout, _number)
    if not isinstance(body, dict):
        raise invalid("The body is not a JSON object.", None)
    return body


def _number(text: str) -> float:
    """Vertex AI writes every number with a point, since a protobuf value knows no whole numbers."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _refusal(status: int, content: bytes) -> ServingError:
    """An engine's error in this server's shape; its faults are not the client's."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = ""
    if 400 <= status < 500:
        return ServingError(status, message or f"The engine answered {status}.", "refused")
    return unavailable(f"The model's engine answered {status}. {message}".strip())
