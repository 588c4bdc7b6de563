"""What people who come to the endpoint are told: what it is, and the OpenAPI."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    PredictRequest,
    ResponsesRequest,
)

BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Continue a text."),
    "/v1/chat/completions": (ChatRequest, "Answer a chat."),
    "/v1/responses": (ResponsesRequest, "Answer a text or a chat, in the newer form."),
    "/predict": (PredictRequest, "Continue several texts, as Vertex AI asks for it."),
}
QUESTIONS = {
    "/health": "Which versions serve, and whether they can; needs no token.",
    "/metrics": "Counters for Prometheus.",
    "/v1/models": "The models by name.",
}
ROOT = """\
This is an endpoint for programs; its OpenAI base URL is this address with /v1 behind it.
Routes: /openapi.json   State: /health
To ask it in a browser, and see which text stands behind an answer: llm-assets board
"""


@cache
def describe_routes() -> dict[str, Any]:
    """The routes as an OpenAPI 3.1 document."""
    _, schemas = models_json_schema(
        [(body, "validation") for body, _ in BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for path, (body, text) in BODIES.items():
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        request = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": _operation(text) | {"requestBody": request}}
    for path, text in QUESTIONS.items():
        paths[path] = {"get": _operation(text)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llm-assets endpoint", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(text: str) -> dict[str, Any]:
    answers = {"200": {"description": "The answer."}}
    return {"summary": text, "responses": answers | {"default": {"description": "An error."}}}


async def _root(_: Request) -> Response:
    return PlainTextResponse(ROOT)


async def _openapi(_: Request) -> Response:
    return JSONResponse(describe_routes())


PAGES = [
    Route("/", _root),
    Route("/openapi.json", _openapi),
]
"""The routes for people; they tell nothing that `/health` does not."""
