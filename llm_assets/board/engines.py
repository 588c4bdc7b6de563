"""Engines for versions that do not serve: started on the first request, ended when idle."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import psutil
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from artifacts.errors import UserError
from artifacts.model import check_model_folder
from artifacts.reasons import memory_limit
from llm_assets.board.pages import Board
from llm_assets.endpoint.folder import endpoint_folder, model_to_serve, why_unable
from llm_assets.forgetting.forgotten_list import read_list
from llm_assets.registry.card import verify_model
from llm_assets.registry.state import ModelVersion
from serving.api.app import build_app
from serving.api.dispatcher import Dispatcher, Route
from serving.engine.process import EngineProcess
from serving.errors import unavailable
from serving.logs import remove_oldest
from serving.settings import JournalSettings, OpenAIEngine
from serving.state import Desired

MOST_ENGINES = 2
"""At once: with the served version, these are base, champion and candidate."""
IDLE_SECONDS, LOOK_SECONDS = 120.0, 1.0
LEAST_CACHE_TOKENS, OF_ENGINE_TOKENS = 512, 32
"""The least that `endpoint.cache_tokens` may be, and what of it an engine keeps for itself."""
MEMORY_FACTOR, OTHER_BYTES = 2, 1_500_000_000
"""What an engine takes: a multiple of its weights as stored, and program and cache."""


@dataclass
class RunningEngine:
    """A version's engine, and the HTTP application that asks it."""

    route: Route
    app: ASGIApp
    asked_at: float
    watch: asyncio.Task[None] | None = None
    """Ends it when nobody asks it."""


class OnDemandEngines:
    """An HTTP application that answers for any version as the endpoint does for those it serves.

    At most MOST_ENGINES run at a time, each ends IDLE_SECONDS after its last answer, and all end
    with this process.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._running: dict[int, RunningEngine] = {}
        self._lock = asyncio.Lock()

    def check(self, version: ModelVersion) -> None:
        """Raise UserError where a version cannot be asked here, whoever asks it."""
        board, engine = self._board, self._board.settings.endpoint.engine
        if board.settings.platform != "local":
            raise UserError("Its weights are in Cloud Storage; engines need them on this machine.")
        read_list(board.store, board.settings.name).refuse_withdrawn(version.version)
        if isinstance(engine, OpenAIEngine) and not engine.command:
            raise UserError(
                f"`endpoint.engine` is the server at {engine.address}, which has only one model; "
                "if it were a command, the board would start a server for each version."
            )
        folder = Path(version.model_url)
        if not folder.exists():
            raise UserError("Its weights are no longer in the store.")
        check_model_folder(folder)
        if why := why_unable(board.settings, board.record, version):
            raise UserError(why)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the engine of the version in its path, which is started first."""
        if scope["type"] != "http" or scope["method"] != "POST":
            # Another website's page can make a browser GET any address, as a picture, and no header
            # gives that away; the origin of a POST does.
            refusal = PlainTextResponse("Only POST is answered here.\n", 405, {"Allow": "POST"})
            await refusal(scope, receive, send)
            return
        try:
            engine = await self._find(scope["path_params"]["version"])
        except (UserError, OSError) as error:
            await unavailable(str(error)).response()(scope, receive, send)
            return
        await engine.app(scope, receive, send)

    async def _find(self, number: int) -> RunningEngine:
        version = await run_in_threadpool(self._board.registry.get, number)
        self.check(version)
        # Before the lock: requests to a running engine do not wait for one that loads.
        if number not in self._running:
            async with self._lock:
                if number not in self._running:
                    await self._make_room_and_start(version)
        # Nothing was waited for since it was found there, so no other task can have ended it.
        self._running[number].asked_at = monotonic()
        return self._running[number]

    async def _make_room_and_start(self, version: ModelVersion) -> None:
        # Verified first: a version that cannot start must not end an engine that runs.
        await run_in_threadpool(
            verify_model, self._board.record, version.model_url, weights=version.weights
        )
        if len(self._running) >= MOST_ENGINES:
            # An engine in the middle of an answer is never ended.
            idle = [(e.asked_at, v) for v, e in self._running.items() if not e.route.in_flight]
            if not idle:
                raise UserError("Other versions are answering right now. Try again shortly.")
            await self._end(min(idle)[1])
        number = version.version
        engine = self._running[number] = await self._start(version)
        engine.watch = asyncio.create_task(self._end_when_idle(number, engine))

    async def _start(self, version: ModelVersion) -> RunningEngine:
        """Start an engine, smaller than one that serves; raises UserError."""
        board = self._board
        desired = model_to_serve(board.settings, version)
        served = desired.settings
        of_one = served.max_prompt_tokens + served.max_new_tokens + OF_ENGINE_TOKENS
        changes = {
            "cache_tokens": min(served.cache_tokens, max(LEAST_CACHE_TOKENS, of_one)),
            "journal": JournalSettings(keep="off"),
            # The served version keeps its speed, as far as there are other processors.
            "threads": 1,
        }
        settings = served.model_copy(update=changes)
        desired = desired.model_copy(update={"settings": settings})
        _check_memory(desired)
        folder = endpoint_folder(board.settings)
        log_path = folder / f"board-engine-{desired.version}.log"
        # Logs of versions that are still running stay.
        logs_in_use = {engine.route.engine.log_path for engine in self._running.values()}
        remove_oldest(set(folder.glob("board-engine-*.log")) - {log_path, *logs_in_use})
        process = EngineProcess(desired, log_path)
        await process.start()
        dispatcher, route = Dispatcher(settings), Route(process, 1.0)
        dispatcher.router.routes.append(route)
        return RunningEngine(route, build_app(dispatcher, folder), monotonic())

    async def _end_when_idle(self, version: int, engine: RunningEngine) -> None:
        # To make room it may be ended elsewhere, and the version may have another engine by then.
        while self._running.get(version) is engine:
            await asyncio.sleep(LOOK_SECONDS)
            if engine.route.in_flight:
                engine.asked_at = monotonic()
            elif monotonic() > engine.asked_at + IDLE_SECONDS:
                await self._end(version)

    async def _end(self, version: int) -> None:
        # It is taken out before the wait, so that no request gets an engine that is about to end.
        await self._running.pop(version).route.engine.stop()


def _check_memory(desired: Desired) -> None:
    weights = sum(path.stat().st_size for path in desired.model_folder.glob("*.safetensors"))
    needed = MEMORY_FACTOR * weights + OTHER_BYTES
    # In a container, the machine's free memory says nothing of the limit that holds there.
    free = min(psutil.virtual_memory().available, memory_limit())
    if needed > free:
        raise UserError(
            f"Version {desired.version} cannot be asked now: its engine would take about "
            f"{needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free."
        )
