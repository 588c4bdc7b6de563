"""The program of the `serve` images: the endpoint's app on the port and routes of Vertex AI.

    python -m serving.vertex.container -- vllm serve {model} --host 127.0.0.1 --port {port}

After `--` stands the command of an engine with OpenAI's completions (`settings.OpenAIEngine`), in
which `{context}` is filled in, too; without it an engine of this project's own is chosen. The port
is open from the start, since Vertex AI ends a container whose port is not, and answers 503 while
the model is fetched, checked and loaded. It must continue a probe before the container counts as
healthy; so Vertex AI never gives traffic to a version that cannot generate.

`llm-assets check --smoke` starts the image with the same command, and `CHECK_SPEC` in its
environment: then vLLM's own parser is asked whether it takes the command, and the engine that it
starts must continue the probe with a model of no use.
"""

import asyncio
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import UserError
from artifacts.model import longest_context, write_older_names
from artifacts.program.entry import CHECK_VARIABLE, SmokeSpec, run_program
from artifacts.program.lifetime import run_to_end
from artifacts.progress import Report
from artifacts.storage import files
from serving.api.app import build_app
from serving.api.dispatcher import Dispatcher, Route
from serving.connections import HttpServer
from serving.engine.process import EngineProcess
from serving.engine.protocol import EngineLost, Refused
from serving.logs import log
from serving.settings import EndpointSettings, Host, JournalSettings, OpenAIEngine, listen
from serving.state import Desired
from serving.traffic import probe

ENGINE = "vllm"
PARSE = f"""
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
command = ServeSubcommand()
parser = FlexibleArgumentParser(prog={ENGINE!r})
command.subparser_init(parser.add_subparsers())
command.validate(parser.parse_args())
"""
"""What vLLM's command line does before it serves."""
EXAMPLES = {"{model}": "/model", "{port}": "8000", "{context}": "1024"}
"""What stands for values that are known once there is a model."""
DAY = 24 * 60 * 60.0


class ContainerEnvironment(BaseModel):
    """What Vertex AI says to a container, and what the registry put beside it."""

    model_config = ConfigDict(frozen=True)

    storage_uri: str = Field(alias="AIP_STORAGE_URI", min_length=1)
    port: int = Field(default=8080, alias="AIP_HTTP_PORT")
    health_route: str = Field(default="/health", alias="AIP_HEALTH_ROUTE")
    predict_route: str = Field(default="/predict", alias="AIP_PREDICT_ROUTE")
    # Inside its container, where Vertex AI alone reaches it and asks for this address.
    host: Host = Field(default="0.0.0.0", alias="HOST")  # noqa: S104
    version: str = Field(default="unregistered", alias="MODEL_VERSION")
    fingerprint: str = Field(default="unregistered", alias="MODEL_FINGERPRINT")
    name: str = Field(default="default", alias="MODEL_NAME")
    memory_bytes: int | None = Field(default=None, alias="ENGINE_MEMORY_BYTES")


async def serve(environment: ContainerEnvironment, command: Sequence[str]) -> int:
    """Serve until a signal.

    Raises:
        UserError: the model cannot be fetched, is not whole, does not fit, or generates nothing.
    """
    settings = _settings(environment)
    dispatcher = Dispatcher(settings)
    with (
        listen(environment.host, environment.port, "`AIP_HTTP_PORT`") as listener,
        tempfile.TemporaryDirectory(prefix="model-") as folder,
    ):
        routes = {"health": environment.health_route, "predict": environment.predict_route}
        app = build_app(dispatcher, Path(folder), **routes)
        server = HttpServer(app, settings, log_level="warning")
        # Before the model is fetched, since Vertex AI restarts a container whose port stays closed.
        listening = asyncio.create_task(server.serve([listener]))
        log("listening", port=environment.port)
        loading = asyncio.create_task(_load(environment, command, dispatcher, Path(folder)))
        await asyncio.wait([listening, loading], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # A model that is being fetched would be waited for; an engine ends with this process.
            os._exit(0)
        # Without a model there is nothing to serve; awaiting `loading` below raises what went
        # wrong.
        server.should_exit |= loading.exception() is not None
        await listening
        await (await loading).stop()
    return 0


def _settings(environment: ContainerEnvironment) -> EndpointSettings:
    """What Vertex AI takes and waits for; beyond that the model refuses what does not fit it."""
    return EndpointSettings(
        host=environment.host,
        port=environment.port,
        max_new_tokens=1_000_000,
        max_prompt_tokens=1_000_000,
        max_body_bytes=10 * 1024 * 1024,
        max_waiting=512,
        request_timeout=DAY,
        start_timeout=DAY,
        journal=JournalSettings(keep="off"),
    )


async def _load(
    environment: ContainerEnvironment, command: Sequence[str], dispatcher: Dispatcher, folder: Path
) -> EngineProcess:
    """Fetch the model, and give an engine that continues the probe all traffic."""
    model = await asyncio.to_thread(fetch, environment.storage_uri, folder / "model")
    settings = dispatcher.settings
    if command:
        engine_settings = engine_of(command, model, environment.memory_bytes)
        settings = settings.model_copy(update={"engine": engine_settings})
    desired = Desired(
        model_folder=model,
        version=environment.version,
        fingerprint=environment.fingerprint,
        name=environment.name,
        settings=settings,
        conversions=folder / "conversions",
    )
    engine = EngineProcess(desired, None)
    await engine.start()
    try:
        await probe(engine, settings)
    except (EngineLost, Refused) as error:
        raise UserError(f"The model does not continue the probe: {error}") from error
    # Last of all: from here on the container counts as healthy, and gets requests.
    dispatcher.router.routes.append(Route(engine, 1.0))
    log("ready", version=environment.version, engine=engine.engine)
    return engine


def engine_of(command: Sequence[str], model: Path, memory_bytes: int | None) -> OpenAIEngine:
    """An engine by its command; raises UserError where the model does not fit, or no port is."""
    words = list(command)
    if any("{context}" in word for word in words):
        context = str(longest_context(str(model), memory_bytes))
        words = [word.replace("{context}", context) for word in words]
    try:
        return OpenAIEngine(command=tuple(words))
    except ValidationError as error:
        raise UserError(f"The engine's command: {error.errors()[0]['msg']}.") from error


def fetch(uri: str, folder: Path) -> Path:
    """The model as a local folder: copied from a bucket, or where it lies already."""
    filesystem, path = files.resolve(uri)
    if files.is_local(uri):
        return Path(path)
    started = time.monotonic()
    folder.mkdir()
    try:
        filesystem.get(f"{path.rstrip('/')}/", f"{folder}/", recursive=True)
    except FileNotFoundError as error:
        raise UserError(f"There is no model at {uri} (AIP_STORAGE_URI).") from error
    # vLLM may carry transformers 4.
    write_older_names(folder)
    log("model_fetched", uri=uri, seconds=round(time.monotonic() - started, 1))
    return folder


def check(command: Sequence[str], spec: str) -> int:
    """Parse an engine's command, then have it answer; what was found goes to Dagster."""

    def run(spec: SmokeSpec, report: Report) -> dict[str, Any]:
        report(f"parses: {' '.join(command)}")
        result = {"python": platform.python_version()} | parse_command(command)
        if spec.model and not result.get("refusal"):
            environment = ContainerEnvironment(AIP_STORAGE_URI=spec.model)
            asyncio.run(_answer_once(environment, command))
            result["answer"] = True
        return result

    return run_program(SmokeSpec, run, ["--spec", spec])


async def _answer_once(environment: ContainerEnvironment, command: Sequence[str]) -> None:
    """Return once a model was loaded and has continued the probe; raises UserError if it cannot."""
    dispatcher = Dispatcher(_settings(environment))
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        await (await _load(environment, command, dispatcher, Path(folder))).stop()


def parse_command(command: Sequence[str]) -> dict[str, Any]:
    """What starts, vLLM's version, and why its parser refuses; empty where it takes all."""
    if command[:1] != [ENGINE]:
        return {"engine": next(iter(command), "this project's own")}
    arguments = (EXAMPLES.get(part, part) for part in command[1:])
    # In a process of its own, which the parser ends where it refuses.
    process = run_to_end([sys.executable, "-c", PARSE, *arguments])
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    refusal = lines[-1] if process.returncode else ""
    return {"engine": ENGINE, ENGINE: importlib.metadata.version(ENGINE), "refusal": refusal}


def main(arguments: Sequence[str], environment: dict[str, Any]) -> int:
    """Entry point; what a user can mend is one message."""
    try:
        if arguments and arguments[0] != "--":
            raise UserError("Give the engine's command after `--`, with {model} and {port} in it.")
        if CHECK_VARIABLE in environment:
            return check(list(arguments[1:]), environment[CHECK_VARIABLE])
        try:
            container = ContainerEnvironment.model_validate(environment)
        except ValidationError as error:
            names = ", ".join(str(fault["loc"][0]) for fault in error.errors())
            raise UserError(f"Vertex AI sets {names}; here it is missing or wrong.") from error
        return asyncio.run(serve(container, arguments[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
