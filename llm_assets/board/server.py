"""The board as a server on loopback."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.storage.files import make_private
from artifacts.store.pipelines import Pipeline
from llm_assets.board import ask, decide, now, text, versions
from llm_assets.board.pages import Board, Doorkeeper, apology, sign_in
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.registry.base import Registry
from serving.connections import HttpServer
from serving.settings import EndpointSettings, bearer_token, listen
from serving.state import own_key

HOST = "127.0.0.1"


def open_board(
    settings: PipelineSettings,
    record: Pipeline,
    registry: Registry,
    status: Callable[[], dict[str, Any]],
    command: list[str],
) -> Board:
    """The board of a pipeline; raises UserError where the endpoint's token is not set."""
    token = bearer_token(settings.endpoint)
    key, name = token or "", f"the endpoint's token, `{settings.endpoint.token_variable}`"
    if token is None:
        path = make_private(endpoint_folder(settings)) / "board.key"
        key = own_key(path, lambda: secrets.token_urlsafe(24).encode()).decode().strip()
        name = f"the key in the file {path}"
    return Board(settings, record, registry, status, command, key, name, token is None)


def serve_board(board: Board, port: int, report: Report) -> None:
    """Serve it until interrupted; raises UserError where the port is taken."""
    with listen(HOST, port, "port with --port") as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        report(f"The board is at {address} (stop it with Ctrl-C).")
        report(f"To decide there, sign in with {board.key_name}.")
        server = HttpServer(build_app(board, report), EndpointSettings(), log_level="warning")
        server.run(sockets=[listener])


def build_app(board: Board, report: Report = print) -> Starlette:
    """All pages, and the graph's metrics; `report` gets what of these cannot be read."""
    answer = apology(board)
    return Starlette(
        routes=[
            *now.routes(board),
            *versions.routes(board),
            *ask.routes(board),
            *text.routes(board),
            *decide.routes(board),
            *sign_in(board),
            _file("board.css", "text/css"),
            _file("board.js", "text/javascript"),
            _metrics(board, report),
        ],
        middleware=[Middleware(Doorkeeper, board)],
        # What is cleaned or damaged while a page is read is told, not thrown.
        exception_handlers=dict.fromkeys(
            [HTTPException, UserError, OSError, pa.ArrowInvalid, Exception], answer
        ),
    )


def _file(name: str, media_type: str) -> Route:
    content = (Path(__file__).with_name("templates") / name).read_bytes()
    return Route(f"/{name}", lambda _: Response(content, media_type=media_type))


def _metrics(board: Board, report: Report) -> Route:
    """Metrics for Prometheus, which gives the key as its bearer token where one is needed."""

    def answer(_: Request) -> Response:
        # Dagster's import takes longer than all else of the board, whose pages do without it.
        from dagster import DagsterInstance

        from llm_assets.metrics import GraphCollector

        registry = CollectorRegistry()
        registry.register(
            GraphCollector(
                board.settings, board.record, board.registry, DagsterInstance.get, report
            )
        )
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", answer)
