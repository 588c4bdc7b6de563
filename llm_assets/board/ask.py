"""Asks what serves, streams its answer, and shows which text that was trained on stands in it."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from artifacts.errors import UserError
from artifacts.store.store import Artifact
from llm_assets.board.pages import Board, Fields, fragment, page, posted
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.tracing.trace import (
    AnswerToTrace,
    QuotedSpan,
    Trace,
    Tracer,
    answer_of_text,
    answers_to_request,
)
from recipes.evaluation.exam import read_questions
from recipes.evaluation.settings import SAMPLES_NAME
from serving.api.app import read_json
from serving.errors import ServingError
from serving.settings import bearer_token
from serving.state import StateFolder, Status

SECONDS = 150.0
COLORS = 6
MOST_EXAMPLES = 12
RECORDED = (
    ("base", "The base model"),
    ("incumbent", "The version before"),
    ("candidate", "The newest candidate"),
)
"""Roles in an evaluation; the candidate's is that of what serves, if it serves."""


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer, and the stretch of training text that it stands in, if in any."""

    text: str
    stretch: int | None = None
    color: int = 0


def routes(board: Board) -> list[Route]:
    """The page `/ask`, the answers that it streams, and what they are traced to."""
    tracer, one_at_a_time = Tracer(board.store, lambda line: None), Lock()

    def show(request: Request) -> Response:
        state = board.registry.state()
        status = _status(board)
        shares = [(one.version, one.share) for one in status.routes if one.share] if status else []
        champion = state.find("champion")
        lineage = champion.lineage if champion else {}
        own = board.store.find_named("eval_metrics", lineage.get("eval_metrics", ""))
        # What a base model can be asked is what its newest candidate was.
        evaluation = own or board.record.find_current("eval_metrics")
        return page(
            board,
            request,
            "ask.html",
            shares=shares,
            url=status.url if status else None,
            examples=find_examples(evaluation) if evaluation else [],
            samples=_samples(evaluation) if evaluation else {},
            recorded=RECORDED[: 2 if own else 3],
            prompt=request.query_params.get("prompt", ""),
        )

    async def stream(request: Request) -> Response:
        status = _status(board)
        if status is None:
            text = "The endpoint does not run. Start it with: llm-assets run"
            return JSONResponse({"error": {"message": text}}, 503)
        limit, seconds = status.settings.max_body_bytes, status.settings.body_timeout
        try:
            body = await read_json(request, limit, seconds)
        except ServingError as error:
            return error.response()
        is_chat = isinstance(body, dict) and "messages" in body
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        token = bearer_token(status.settings)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client = httpx.AsyncClient(base_url=status.url, headers=headers, timeout=SECONDS)
        try:
            asked = client.build_request("POST", path, json=body)
            answer = await client.send(asked, stream=True)
        except httpx.HTTPError as error:
            await client.aclose()
            text = f"The endpoint at {status.url} does not answer ({type(error).__name__})."
            return JSONResponse({"error": {"message": text}}, 503)
        told = {
            name: answer.headers[name]
            for name in ("X-Model-Version", "X-Request-Id", "Content-Type")
            if name in answer.headers
        }
        return StreamingResponse(_passed_on(client, answer), answer.status_code, told)

    def trace(request: Request, fields: Fields) -> Response:
        try:
            state = board.registry.state()
            with one_at_a_time:
                found = [
                    tracer.trace(state, one.version, one.answer) for one in _asked(board, fields)
                ]
        except UserError as error:
            return fragment("traced.html", fault=str(error))
        return fragment("traced.html", found=[(one, pieces_of(one)) for one in found])

    return [
        Route("/ask", show),
        Route("/ask/stream", stream, methods=["POST"]),
        Route("/ask/trace", posted(trace), methods=["POST"]),
    ]


def find_examples(evaluation: Artifact) -> list[str]:
    """Prompts that are worth asking: questions of the exam, else beginnings of held-out text."""
    exam = evaluation.store.find_named("exam", evaluation.manifest.inputs.get("exam", ""))
    asked = [one for one in read_questions(exam.path) if not one["placebo"]] if exam else []
    # One of each subject and relation, so that they differ.
    first = {(one["subject"], one["relation"]): str(one["question"]) for one in asked[::-1]}
    prompts = list(first.values())[::-1] or list(_samples(evaluation))
    step = max(1, len(prompts) // MOST_EXAMPLES)
    return list(dict.fromkeys([*_samples(evaluation), *prompts[::step]]))[:MOST_EXAMPLES]


def _samples(evaluation: Artifact) -> dict[str, dict[str, str]]:
    """Prompt to role to what that model wrote when it was evaluated."""
    found: dict[str, dict[str, str]] = {}
    written = json.loads((evaluation.path / SAMPLES_NAME).read_text())
    for role, samples in written.items():
        for one in samples:
            found.setdefault(one["prompt"], {})[role] = one["completion"]
    return found


def pieces_of(trace: Trace) -> list[AnswerPiece]:
    """The answer in pieces, each in one stretch at most, colored by its source."""
    sources = [one.sources[0].source for one in trace.verbatim if one.sources]
    colors = {name: place % COLORS for place, name in enumerate(dict.fromkeys(sources))}
    return list(_pieces(trace, colors))


def _pieces(trace: Trace, colors: dict[str, int]) -> Iterator[AnswerPiece]:
    end = 0

    def place(numbered: tuple[int, QuotedSpan]) -> int:
        return numbered[1].start

    for number, one in sorted(enumerate(trace.verbatim), key=place):
        start = max(one.start, end)
        if start >= one.end:
            continue
        if start > end:
            yield AnswerPiece(trace.answer[end:start])
        color = colors[one.sources[0].source] if one.sources else 0
        yield AnswerPiece(trace.answer[start : one.end], number, color)
        end = one.end
    if end < len(trace.answer):
        yield AnswerPiece(trace.answer[end:])


def _asked(board: Board, fields: Fields) -> list[AnswerToTrace]:
    """What is to be traced: an answer by its text, or by its request."""
    state, text = board.registry.state(), fields.get("text") or None
    request, version = fields.get("request", "").strip(), fields.get("version", "")
    if request:
        journal = board.settings.endpoint.journal
        folder = endpoint_folder(board.settings)
        return answers_to_request(state, folder, journal, request, text)
    number = int(version) if version.isascii() and version.isdecimal() else None
    return [answer_of_text(state, text or "", number)]


def _status(board: Board) -> Status | None:
    """The local endpoint's, where it runs."""
    if board.settings.platform != "local":
        return None
    status = StateFolder(endpoint_folder(board.settings)).status.read()
    return status if status and status.alive else None


async def _passed_on(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError:
        lost: dict[str, Any] = {"error": {"message": "The endpoint broke off its answer."}}
        yield f"data: {json.dumps(lost)}\n\n".encode()
    finally:
        await answer.aclose()
        await client.aclose()
