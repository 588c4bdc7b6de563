"""`POST /v1/responses`: OpenAI's newer route, for plain text.

Nothing is stored, so a conversation is sent whole each time.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from time import time
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from serving.api.admission import while_connected
from serving.api.dispatcher import Dispatcher, Stream
from serving.api.errors import ServingError
from serving.api.guard import answered, event_stream, noted, read, version_headers
from serving.api.models import check_model, model_fields
from serving.api.requests import ChatMessage, OpenAIBody, Sampling, Temperature, TopP
from serving.engine.protocol import Chunk, GenerateRequest, Message
from serving.settings import EndpointSettings


class TextFormat(BaseModel):
    """The form of an answer: text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: dict[Literal["type"], Literal["text"]] = {"type": "text"}


class ResponsesRequest(OpenAIBody):
    """The body of a request; what would have no effect is refused."""

    model: str | None = None
    input: str | Annotated[list[ChatMessage], Field(min_length=1)]
    instructions: Annotated[str, Field(min_length=1)] | None = None
    max_output_tokens: int = Field(default=64, ge=1)
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    stream: bool = False
    text: TextFormat = TextFormat()
    tools: list[Any] = Field(default=[], max_length=0)
    tool_choice: Literal["none", "auto"] = "auto"
    metadata: dict[str, str] = Field(default={})
    """Given back."""
    store: bool = False
    """Taken and ignored: nothing is stored."""
    user: str | None = None
    """Taken and ignored."""
    truncation: Literal["disabled"] = "disabled"

    def generate_request(self, settings: EndpointSettings) -> GenerateRequest:
        """The engine's request; raises ServingError 400 where a limit is passed."""
        turns = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            turns.append(Message(role="user", content=self.input))
        else:
            turns += [message.as_text() for message in self.input]
        sampling = Sampling(
            max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p
        )
        return sampling.generate_request(settings, messages=turns)


async def respond(request: Request, dispatcher: Dispatcher) -> Response:
    """Answer one request, whole or as a stream of events."""
    body = await read(request, ResponsesRequest, dispatcher)
    check_model(dispatcher, body.model)
    wanted = body.generate_request(dispatcher.settings)
    if body.stream:
        begun = await while_connected(request, dispatcher.stream(wanted))
        pieces = noted(request, wanted, begun)
        return event_stream(_events(body, begun, pieces, request.state.id), begun)
    (answer,) = await answered(request, dispatcher, [wanted])
    model = model_fields(body.model, answer)["model"]
    content = _response(body, request.state.id, model, answer.text, answer.end)
    return JSONResponse(content, headers=version_headers(answer))


def _response(
    body: ResponsesRequest, name: str, model: str, text: str, end: Chunk | None
) -> dict[str, Any]:
    """The response object; without an end it is in progress."""
    cut = end is not None and end.finish_reason == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time()),
        "model": model,
        "status": "in_progress" if end is None else "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "output": [] if end is None else [_message(name, text, cut)],
        "parallel_tool_calls": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None if end is None else _usage(end),
    }


def _message(name: str, text: str, cut: bool) -> dict[str, Any]:
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if cut else "completed",
        "content": [_part(text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(end: Chunk) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


async def _events(
    body: ResponsesRequest, begun: Stream, pieces: AsyncGenerator[Chunk, None], name: str
) -> AsyncIterator[str]:
    model = model_fields(body.model, begun)["model"]
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        content = {"type": kind, "sequence_number": number} | fields
        number += 1
        return f"event: {kind}\ndata: {json.dumps(content)}\n\n"

    place = {"item_id": f"msg_{name}", "output_index": 0, "content_index": 0}
    yield event("response.created", response=_response(body, name, model, "", None))
    item = _message(name, "", False) | {"status": "in_progress", "content": []}
    yield event("response.output_item.added", output_index=0, item=item)
    yield event("response.content_part.added", part=_part(""), **place)
    text, end = "", Chunk()
    async with aclosing(pieces) as chunks:
        async for end in chunks:
            if end.error is not None:
                error = ServingError(503, end.error, "unavailable").body["error"]
                yield event("error", **error)
                return
            if end.text:
                text += end.text
                yield event("response.output_text.delta", delta=end.text, logprobs=[], **place)
    yield event("response.output_text.done", text=text, logprobs=[], **place)
    yield event("response.content_part.done", part=_part(text), **place)
    whole = _response(body, name, model, text, end)
    yield event("response.output_item.done", output_index=0, item=whole["output"][0])
    yield event(f"response.{whole['status']}", response=whole)
