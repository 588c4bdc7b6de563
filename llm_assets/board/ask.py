"""Asks the served version, streams its answer, and marks the training text found in it."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
from llm_assets.tracing.explain import form_shown, read_samples
from llm_assets.tracing.trace import Trace, Tracer, find_answers
from recipes.evaluation.exam import read_questions
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
        shares = (
            {route.version: route.share for route in status.routes if route.share} if status else {}
        )
        champion = state.find("champion")
        own_evaluation = find_behind(board.store, champion, "eval_metrics") if champion else None
        # A base model answers the questions that its newest candidate was evaluated with.
        evaluation = own_evaluation or board.record.find_current("eval_metrics")
        exam = find_exam(evaluation) if evaluation else None
        selected = number(request, "version", 0) or None
        return {
            "is_running": status is not None,
            "versions": list(_asked_versions(engines, state, shares, selected)),
            "selected": selected,
            "examples": board.remember(find_examples, [evaluation, exam]) if evaluation else [],
            "form": form_shown(evaluation)[0] if evaluation else "pretraining",
            # The answer to an exam question ends with its line.
            "of_exam": exam is not None,
            "prompt": request.query_params.get("prompt", ""),
        }

    async def stream(request: Request) -> Response:
        status = endpoint_status(board.settings)
        try:
            if status is None:
                raise UserError("The endpoint is not running. Start it with: llm-assets run")
            client = httpx.AsyncClient(**status.client_options(), timeout=SECONDS)
        except UserError as error:
            return unavailable(str(error)).response()
        # Of the browser's headers only this one goes on; the endpoint's token comes from
        # `client_options`.
        client.headers["Content-Type"] = request.headers.get("content-type", "")
        try:
            path = request.url.path.removeprefix("/ask/endpoint")
            upstream = client.build_request("POST", path, content=request.stream())
            answer = await client.send(upstream, stream=True)
        except httpx.HTTPError as error:
            await client.aclose()
            fault = (
                f"The endpoint at {status.url} does not answer ({type(error).__name__}). "
                "`llm-assets status` shows its state."
            )
            return unavailable(fault).response()
        headers = {
            name: answer.headers[name]
            for name in ("X-Model-Version", "X-Request-Id", "Content-Type")
            if name in answer.headers
        }
        return StreamingResponse(_passed_on(client, answer), answer.status_code, headers)

    def trace(request: Request, fields: Fields) -> Response:
        try:
            state = board.registry.state()
            answers = find_answers(
                state,
                endpoint_folder(board.settings),
                board.settings.endpoint.journal,
                fields.get("request", "").strip(),
                fields.get("text") or None,
                as_number(fields.get("version", "")),
            )
            # The tracer keeps the last version's training text open, so requests take turns.
            with one_at_a_time:
                asked = fields.get("question", "")
                given = [(one.version, one.answer, one.question or asked) for one in answers]
                traces = [tracer.trace(state, *one) for one in given]
        except UserError as error:
            return fragment("traced.html", fault=str(error))
        raw = board.record.find_current("raw_corpus")
        sources = (raw.stats.get("sources") if raw else None) or {}
        colors = colors_of(sources, traces)
        pieces = [(traced, list(pieces_of(traced, colors))) for traced in traces]
        return fragment("traced.html", traces=pieces, colors=colors)

    return [
        page_at("/ask", board, "ask.html", show),
        Route("/ask/endpoint/v1/{path:path}", stream, methods=["POST"]),
        Route("/ask/endpoint/predict", stream, methods=["POST"]),
        Mount("/ask/versions/{version:int}", app=engines),
        posted("/ask/trace", trace),
    ]


def _asked_versions(
    engines: OnDemandEngines,
    state: RegistryState,
    shares: Mapping[str, float],
    selected: int | None,
) -> Iterator[AskedVersion]:
    """Base, champion, newest candidate, selected version and those that serve, in their order."""
    bases = [entry.version for entry in state.versions if entry.is_base]
    candidates = [entry.version for entry in state.versions if not entry.is_base]
    # A version that is several of these at once has the label that is entered last.
    labels = {} if selected is None else {selected: "selected"}
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
    """Prompts worth asking: questions of the exam, else beginnings of held-out text."""
    questions = (
        [question for question in read_questions(exam.path) if not question["placebo"]]
        if exam
        else []
    )
    # One per subject and relation, so that they differ. In reverse, so that the first is kept.
    by_fact = {
        (question["subject"], question["relation"]): str(question["question"])
        for question in questions[::-1]
    }
    samples = chain.from_iterable(read_samples(evaluation).values())
    sample_prompts = [sample["prompt"] for sample in samples]
    prompts = list(by_fact.values())[::-1]
    step = max(1, len(prompts) // MOST_EXAMPLES)
    return list(dict.fromkeys([*sample_prompts, *prompts[::step]]))[:MOST_EXAMPLES]


def colors_of(known: Iterable[str], traces: Iterable[Trace]) -> dict[str, int]:
    """Color of each source that spans come from: the same in every answer."""
    stretches = (stretch for trace in traces for stretch in trace.verbatim if stretch.sources)
    used = {stretch.sources[0].source for stretch in stretches}
    # Sources of earlier pipeline files come last.
    ordered = [*sorted(known), *sorted(used.difference(known))]
    return {name: place % COLORS for place, name in enumerate(ordered) if name in used}


def pieces_of(trace: Trace, colors: Mapping[str, int]) -> Iterator[AnswerPiece]:
    """The answer in pieces, each in one stretch at most, colored by its source."""
    end = 0
    for place, stretch in sorted(enumerate(trace.verbatim), key=lambda item: item[1].start):
        start = max(stretch.start, end)
        covered = trace.answer[start : stretch.end]
        # White space before the first word of a stretch is not marked.
        start += len(covered) - len(covered.lstrip())
        if start >= stretch.end:
            continue
        if start > end:
            yield AnswerPiece(trace.answer[end:start])
        color = colors[stretch.sources[0].source] if stretch.sources else 0
        yield AnswerPiece(trace.answer[start : stretch.end], place, color)
        end = stretch.end
    if end < len(trace.answer):
        yield AnswerPiece(trace.answer[end:])


async def _passed_on(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError:
        # The status has been sent, so the fault can only follow as another event of the stream.
        error = {"message": "The endpoint stopped in the middle of its answer."}
        yield f"data: {json.dumps({'error': error})}\n\n".encode()
    finally:
        await answer.aclose()
        await client.aclose()
