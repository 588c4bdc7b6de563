"""Asks what serves, streams its answer, and shows which text that was trained on stands in it."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from artifacts.errors import UserError
from artifacts.store.store import Artifact
from llm_assets.board.engines import OnDemandEngines
from llm_assets.board.pages import (
    Board,
    Fields,
    as_number,
    find_behind,
    fragment,
    number,
    page_at,
    posted,
)
from llm_assets.endpoint.folder import endpoint_folder, endpoint_status
from llm_assets.exam.questions import find_exam
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.trace import Trace, Tracer, find_answers
from recipes.evaluation.exam import read_questions
from recipes.evaluation.settings import SAMPLES_NAME
from serving.errors import unavailable

SECONDS = 150.0
COLORS = 6
MOST_EXAMPLES = 12


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer, and the stretch of training text that it stands in, if in any."""

    text: str
    stretch: int | None = None
    color: int = 0


@dataclass(frozen=True)
class AskedVersion:
    """A version that the page asks: the endpoint, or an engine that is started for it."""

    version: int
    label: str
    serves: bool
    is_base: bool
    obstacle: str = ""
    """Why it cannot be asked, in words; empty where it can."""


def routes(board: Board) -> list[BaseRoute]:
    """The page `/ask`, the answers that it streams, and what they are traced to."""
    tracer, one_at_a_time = Tracer(board.store, lambda line: None), Lock()
    engines = OnDemandEngines(board)

    def show(request: Request) -> dict[str, Any]:
        state = board.registry.state()
        status = endpoint_status(board.settings)
        shares = {one.version: one.share for one in status.routes if one.share} if status else {}
        champion = state.find("champion")
        own = find_behind(board.store, champion, "eval_metrics") if champion else None
        # What a base model can be asked is what its newest candidate was.
        evaluation = own or board.record.find_current("eval_metrics")
        exam = find_exam(evaluation) if evaluation else None
        chosen = number(request, "version", 0) or None
        return {
            "runs": status is not None,
            "asked": list(_asked_versions(engines, state, shares, chosen)),
            "chosen": chosen,
            "examples": board.remember(find_examples, [evaluation, exam]) if evaluation else [],
            # An exam's answer ends with its line.
            "of_exam": exam is not None,
            "prompt": request.query_params.get("prompt", ""),
        }

    async def stream(request: Request) -> Response:
        status = endpoint_status(board.settings)
        if status is None:
            return unavailable(
                "The endpoint is not running. Start it with: llm-assets run"
            ).response()
        try:
            client = httpx.AsyncClient(**status.client_options(), timeout=SECONDS)
        except UserError as error:
            return unavailable(str(error)).response()
        client.headers["Content-Type"] = request.headers.get("content-type", "")
        try:
            path = f"/v1/{request.path_params['path']}"
            asked = client.build_request("POST", path, content=request.stream())
            answer = await client.send(asked, stream=True)
        except httpx.HTTPError as error:
            await client.aclose()
            fault = (
                f"The endpoint at {status.url} does not answer ({type(error).__name__}). "
                "`llm-assets status` shows its state."
            )
            return unavailable(fault).response()
        told = {
            name: answer.headers[name]
            for name in ("X-Model-Version", "X-Request-Id", "Content-Type")
            if name in answer.headers
        }
        return StreamingResponse(_passed_on(client, answer), answer.status_code, told)

    def trace(request: Request, fields: Fields) -> Response:
        try:
            state = board.registry.state()
            asked = find_answers(
                state,
                endpoint_folder(board.settings),
                board.settings.endpoint.journal,
                fields.get("request", "").strip(),
                fields.get("text") or None,
                as_number(fields.get("version", "")),
            )
            with one_at_a_time:
                found = [tracer.trace(state, one.version, one.answer) for one in asked]
        except UserError as error:
            return fragment("traced.html", fault=str(error))
        raw = board.record.find_current("raw_corpus")
        sources = (raw.stats.get("sources") if raw else None) or {}
        colors = colors_of(sources, found)
        pieces = [(one, list(pieces_of(one, colors))) for one in found]
        return fragment("traced.html", found=pieces, colors=colors)

    return [
        page_at("/ask", board, "ask.html", show),
        Route("/ask/endpoint/v1/{path:path}", stream, methods=["POST"]),
        Mount("/ask/versions/{version:int}", app=engines),
        posted("/ask/trace", trace),
    ]


def _asked_versions(
    engines: OnDemandEngines, state: RegistryState, shares: Mapping[str, float], chosen: int | None
) -> Iterator[AskedVersion]:
    """Base, champion, newest candidate, a chosen version, and those that serve, in their order."""
    bases = [one.version for one in state.versions if one.is_base]
    candidates = [one.version for one in state.versions if not one.is_base]
    labels = {} if chosen is None else {chosen: "selected"}
    labels |= dict.fromkeys(candidates[-1:], "the newest candidate")
    labels |= dict.fromkeys(bases[-1:], "the base model")
    if champion := state.find("champion"):
        labels[champion.version] = "the champion"
    labels |= {int(name): f"serves {share:.0%}" for name, share in shares.items()}
    for version in state.versions:
        if label := labels.get(version.version):
            serves, obstacle = str(version.version) in shares, ""
            try:
                if not serves:
                    engines.check(version)
            except UserError as error:
                obstacle = str(error)
            yield AskedVersion(version.version, label, serves, version.is_base, obstacle)


def find_examples(evaluation: Artifact, exam: Artifact | None) -> list[str]:
    """Prompts that are worth asking: questions of the exam, else beginnings of held-out text."""
    asked = [one for one in read_questions(exam.path) if not one["placebo"]] if exam else []
    # One of each subject and relation, so that they differ.
    first = {(one["subject"], one["relation"]): str(one["question"]) for one in asked[::-1]}
    written = json.loads((evaluation.path / SAMPLES_NAME).read_text())
    sampled = [sample["prompt"] for samples in written.values() for sample in samples]
    prompts = list(first.values())[::-1]
    step = max(1, len(prompts) // MOST_EXAMPLES)
    return list(dict.fromkeys([*sampled, *prompts[::step]]))[:MOST_EXAMPLES]


def colors_of(known: Iterable[str], traces: Iterable[Trace]) -> dict[str, int]:
    """Source to color, of those that spans are from: the same in every answer."""
    stretches = (stretch for trace in traces for stretch in trace.verbatim if stretch.sources)
    used = {stretch.sources[0].source for stretch in stretches}
    # Sources that the pipeline had before come after those that it has.
    ordered = [*sorted(known), *sorted(used.difference(known))]
    return {name: place % COLORS for place, name in enumerate(ordered) if name in used}


def pieces_of(trace: Trace, colors: Mapping[str, int]) -> Iterator[AnswerPiece]:
    """The answer in pieces, each in one stretch at most, colored by its source."""
    end = 0
    for place, one in sorted(enumerate(trace.verbatim), key=lambda numbered: numbered[1].start):
        start = max(one.start, end)
        stretch = trace.answer[start : one.end]
        # White space before its first word is not marked.
        start += len(stretch) - len(stretch.lstrip())
        if start >= one.end:
            continue
        if start > end:
            yield AnswerPiece(trace.answer[end:start])
        color = colors[one.sources[0].source] if one.sources else 0
        yield AnswerPiece(trace.answer[start : one.end], place, color)
        end = one.end
    if end < len(trace.answer):
        yield AnswerPiece(trace.answer[end:])


async def _passed_on(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError:
        lost = {"message": "The endpoint stopped in the middle of its answer."}
        yield f"data: {json.dumps({'error': lost})}\n\n".encode()
    finally:
        await answer.aclose()
        await client.aclose()
