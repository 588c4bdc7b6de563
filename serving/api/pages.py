"""What a browser is shown: a page that says what serves and lets one try it, and the OpenAPI."""

from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from serving.api.requests import ChatRequest, CompletionRequest, PredictRequest
from serving.api.responses import ResponsesRequest

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
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def add_pages(app: FastAPI) -> None:
    """The routes for browsers; they tell nothing that `/health` does not."""

    @app.get("/")
    async def page() -> Response:
        return Response(_file("page.html"), media_type="text/html", headers=SECURITY)

    @app.get("/page.js")
    async def script() -> Response:
        return Response(_file("page.js"), media_type="text/javascript", headers=SECURITY)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(describe_routes())


@cache
def describe_routes() -> dict[str, Any]:
    """The routes as an OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, (body, text) in BODIES.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
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
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(text: str) -> dict[str, Any]:
    answers = {"200": {"description": "The answer."}}
    return {"summary": text, "responses": answers | {"default": {"description": "An error."}}}


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text()
