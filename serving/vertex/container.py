"""The program of the `serve` image: a model on the port and routes that Vertex AI asks for.

    python -m serving.vertex.container -- vllm serve {model} --host 127.0.0.1 --port {port}

After `--` stands the command of an engine with OpenAI's routes; `{model}`, `{port}`, `{name}` and
`{context}` in it are filled in. The port is open from the start, since Vertex AI ends a container
whose port is not, and answers 503 while the model is fetched, checked and loaded. It must continue
a probe before the container counts as healthy; so Vertex AI never gives traffic to a version that
cannot generate.

`llm-assets check --smoke` starts the image with the same command, and `CHECK_SPEC` in its
environment: then vLLM's own parser is asked whether it takes the command, and nothing is served.
"""

import asyncio
import importlib.metadata
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from artifacts.errors import UserError
from artifacts.model import check_model_folder, write_older_names
from artifacts.program.entry import CHECK_VARIABLE, SmokeSpec, run_program
from artifacts.program.lifetime import Child, how_it_ended, run_to_end
from artifacts.progress import Report
from artifacts.storage import files
from serving.api.app import read_json
from serving.api.requests import PredictRequest, parse
from serving.connections import HttpServer
from serving.engine.protocol import GenerateRequest
from serving.errors import ServingError, answer_error, invalid, message_of, unavailable
from serving.logs import log
from serving.settings import EndpointSettings
from serving.state import OfVersion
from serving.vertex.context import longest_context

HEALTH_SECONDS = 0.5
STOP_SECONDS = 10.0
ENGINE = "vllm"
PARSE = f"""
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils import FlexibleArgumentParser
command = ServeSubcommand()
parser = FlexibleArgumentParser(prog={ENGINE!r})
command.subparser_init(parser.add_subparsers())
command.validate(parser.parse_args())
"""
"""What vLLM's command line does before it serves."""
EXAMPLES = {"{model}": "/model", "{port}": "8000", "{name}": "model", "{context}": "1024"}
"""What stands for values that are known once there is a model."""
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMITS = EndpointSettings(max_new_tokens=1_000_000, max_prompt_tokens=1_000_000)
"""None of its own: the engine refuses what its model does not take."""
LARGEST_BODY = 10 * 1024 * 1024
"""Bytes; what Vertex AI takes at most."""
PROBE = GenerateRequest(prompt="The", max_tokens=8, max_prompt_tokens=8)


class ContainerEnvironment(BaseModel):
    """What Vertex AI says to a container, and what the registry put beside it."""

    model_config = ConfigDict(frozen=True)

    storage_uri: str = Field(alias="AIP_STORAGE_URI", min_length=1)
    port: int = Field(default=8080, alias="AIP_HTTP_PORT")
    health_route: str = Field(default="/health", alias="AIP_HEALTH_ROUTE")
    predict_route: str = Field(default="/predict", alias="AIP_PREDICT_ROUTE")
    # Inside its container, where Vertex AI alone reaches it and asks for this address.
    host: str = Field(default="0.0.0.0", alias="HOST")  # noqa: S104
    version: str = Field(default="unregistered", alias="MODEL_VERSION")
    fingerprint: str = Field(default="unregistered", alias="MODEL_FINGERPRINT")
    name: str = Field(default="default", alias="MODEL_NAME")
    memory_bytes: int | None = Field(default=None, alias="ENGINE_MEMORY_BYTES")


@dataclass
class Backend:
    """The engine behind the routes."""

    engine: httpx.AsyncClient
    serves: OfVersion
    ready: bool = False
    """Whether the model has continued its probe."""


async def serve(environment: ContainerEnvironment, command: Sequence[str]) -> int:
    """Serve until a signal, or until the engine ends; returns the exit code.

    Raises:
        UserError: the model cannot be fetched, is not whole, does not fit, or generates nothing.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    serves = OfVersion(version=environment.version, fingerprint=environment.fingerprint)
    backend = Backend(engine_client(port), serves)
    app = build_app(backend, environment.health_route, environment.predict_route)
    server = HttpServer(app, LIMITS, log_level="warning")
    with (
        socket.create_server((environment.host, environment.port)) as listener,
        tempfile.TemporaryDirectory(prefix="model-") as scratch,
    ):
        listening = asyncio.create_task(server.serve([listener]))
        log("listening", port=environment.port)
        running = asyncio.create_task(
            _run_engine(environment, command, port, backend, Path(scratch))
        )
        await asyncio.wait([listening, running], return_when=asyncio.FIRST_COMPLETED)
        is_told_to_end = not running.done()
        server.should_exit = True
        running.cancel()
        await asyncio.wait([listening, running])
    if is_told_to_end:
        # A model that is being fetched would be waited for.
        os._exit(0)
    return running.result()


async def _run_engine(
    environment: ContainerEnvironment,
    command: Sequence[str],
    port: int,
    backend: Backend,
    scratch: Path,
) -> int:
    """Fetch the model and have an engine serve it to its end; returns the exit code.

    When the engine has ended so does the container, and Vertex AI starts another.
    """
    model = await asyncio.to_thread(fetch, environment.storage_uri, scratch)
    check_model_folder(model)
    filled = fill(command, environment, model, port)
    log("engine_starts", command=filled)
    engine = Child(filled, heeds_parent=False)
    try:
        await _wait_until_it_generates(backend.engine, engine)
        backend.ready = True
        log("ready", version=environment.version, port=environment.port)
        while (status := engine.poll()) is None:
            await asyncio.sleep(HEALTH_SECONDS)
        log("engine_ended", status=status)
        return status
    finally:
        engine.end(STOP_SECONDS)


def fill(
    command: Sequence[str], environment: ContainerEnvironment, model: Path, port: int
) -> list[str]:
    """The engine's command with what it is to serve; raises UserError where that does not fit."""
    values = {"model": str(model), "port": str(port), "name": environment.name}
    if any("{context}" in part for part in command):
        values["context"] = str(longest_context(str(model), environment.memory_bytes))
    filled = list(command)
    for name, value in values.items():
        filled = [part.replace(f"{{{name}}}", value) for part in filled]
    return filled


def fetch(uri: str, folder: Path) -> Path:
    """The model as a local folder: copied from a bucket, or where it lies already."""
    filesystem, path = files.resolve(uri)
    if files.is_local(uri):
        return Path(path)
    started = time.monotonic()
    try:
        filesystem.get(f"{path.rstrip('/')}/", f"{folder}/", recursive=True)
    except FileNotFoundError as error:
        raise UserError(f"There is no model at {uri} (AIP_STORAGE_URI).") from error
    # vLLM carries transformers 4.
    write_older_names(folder)
    log("model_fetched", uri=uri, seconds=round(time.monotonic() - started, 1))
    return folder


async def _wait_until_it_generates(client: httpx.AsyncClient, engine: Child) -> None:
    while not await is_healthy(client):
        if (code := engine.poll()) is not None:
            raise UserError(f"The engine {how_it_ended(code)} while it loaded.")
        await asyncio.sleep(HEALTH_SECONDS)
    try:
        text = await complete(client, PROBE)
    except ServingError as error:
        raise UserError(f"The model does not continue the probe: {error}") from error
    if not text:
        raise UserError("The model generated nothing after the probe.")


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


def engine_client(port: int) -> httpx.AsyncClient:
    """A client of an engine, which waits for its answers as long as they take."""
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        timeout=httpx.Timeout(None, connect=5.0),
        # Any number, kept for less than uvicorn keeps them: none is closed as it is used again.
        limits=httpx.Limits(keepalive_expiry=2.0),
        trust_env=False,
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
    message = message_of(content)
    if 400 <= status < 500:
        return ServingError(status, message or f"The engine answered {status}.", "refused")
    return unavailable(f"The model's engine answered {status}. {message}".strip())


def check_arguments(command: Sequence[str], spec: str) -> int:
    """Parse an engine's command, without a model; what was found goes to Dagster."""

    def run(spec: SmokeSpec, report: Report) -> dict[str, Any]:
        report(f"parses: {' '.join(command)}")
        return {"python": platform.python_version()} | parse_command(command)

    return run_program(SmokeSpec, run, ["--spec", spec])


def parse_command(command: Sequence[str]) -> dict[str, Any]:
    """What starts, vLLM's version, and why its parser refuses; empty where it takes all."""
    engine, *arguments = (EXAMPLES.get(part, part) for part in command)
    if engine != ENGINE:
        return {"engine": engine}
    ended = run_to_end([sys.executable, "-c", PARSE, *arguments])
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    refusal = lines[-1] if ended.returncode else ""
    return {"engine": engine, ENGINE: importlib.metadata.version(ENGINE), "refusal": refusal}


def main(arguments: Sequence[str], environment: dict[str, Any]) -> int:
    """Entry point; what a user can mend is one message."""
    try:
        if arguments[:1] != ["--"] or len(arguments) < 2:
            raise UserError("Give the engine's command after `--`, with {model} and {port} in it.")
        if CHECK_VARIABLE in environment:
            return check_arguments(arguments[1:], environment[CHECK_VARIABLE])
        try:
            wanted = ContainerEnvironment.model_validate(environment)
        except ValidationError as error:
            names = ", ".join(str(fault["loc"][0]) for fault in error.errors())
            raise UserError(f"Vertex AI sets {names}; here it is missing or wrong.") from error
        return asyncio.run(serve(wanted, arguments[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
