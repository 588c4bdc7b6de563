"""`POST /v1/responses`: OpenAI's newer route, for plain text.

Nothing is stored, so a conversation is sent whole each time.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from time import time
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serving.api.dispatcher import Stream
from serving.api.errors import ServingError
from serving.api.guard import ApiContext, event_stream
from serving.api.requests import ChatMessage, ResponseFormat, Sampling, Strict, Temperature, TopP
from serving.engine.protocol import Chunk, GenerateRequest, Message
from serving.settings import EndpointSettings

REPEATED = {
    *("instructions", "max_output_tokens", "metadata", "temperature", "text", "tool_choice"),
    *("tools", "top_p", "truncation"),
}
"""Fields of a request that its answer has, too."""


class TextOptions(Strict):
    """The form of an answer: text."""

    format: ResponseFormat = ResponseFormat()


class ResponsesRequest(Strict):
    """The body of a request; what would have no effect is refused."""

    model: str | None = None
    input: str | Annotated[list[ChatMessage], Field(min_length=1)]
    instructions: Annotated[str, Field(min_length=1)] | None = None
    max_output_tokens: int = Field(default=64, ge=1)
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    stream: bool = False
    text: TextOptions = TextOptions()
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


async def respond(context: ApiContext, request: Request) -> Response:
    """Answer one request, whole or as a stream of events."""
    body = await context.read(request, ResponsesRequest)
    context.check_model(body.model)
    wanted = body.generate_request(context.dispatcher.settings)
    if body.stream:
        stream = await context.begun(request, wanted)
        return event_stream(_events(body, stream, request.state.id), stream)
    (answer,) = await context.answered(request, [wanted])
    model = answer.by.model(body.model)
    content = _response(body, request.state.id, model, answer.whole.text, answer.whole)
    return JSONResponse(content, headers=answer.by.headers)


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
        "output": [] if end is None else [_message(name, text, cut)],
        "parallel_tool_calls": False,
        "usage": None if end is None else _usage(end),
        **body.model_dump(include=REPEATED),
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


async def _events(body: ResponsesRequest, stream: Stream, name: str) -> AsyncIterator[str]:
    model = stream.by.model(body.model)
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
    async with aclosing(stream.chunks) as chunks:
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
