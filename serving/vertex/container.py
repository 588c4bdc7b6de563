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
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import UserError
from artifacts.model.folder import check_model_folder
from artifacts.model.format import write_older_names
from artifacts.program.entry import run_program
from artifacts.program.lifetime import signal_parents_death
from artifacts.program.smoke import CHECK_VARIABLE, SmokeSpec
from artifacts.progress import Report
from artifacts.storage import files
from serving.api.errors import ServingError
from serving.engine.process import engine_client
from serving.engine.protocol import GenerateRequest
from serving.logs import log
from serving.state import OfVersion
from serving.vertex.context import longest_context
from serving.vertex.routes import Backend, build_app, complete, is_healthy

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


def serve(environment: ContainerEnvironment, command: Sequence[str]) -> int:
    """Serve until a signal, or until the engine ends; returns the exit code.

    Raises:
        UserError: the model cannot be fetched, is not whole, does not fit, or generates nothing.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    serves = OfVersion(version=environment.version, fingerprint=environment.fingerprint)
    backend = Backend(engine_client(port), serves)
    with _listening(environment, backend), tempfile.TemporaryDirectory(prefix="model-") as scratch:
        model = fetch(environment.storage_uri, Path(scratch))
        check_model_folder(model)
        filled = fill(command, environment, model, port)
        log("engine_starts", command=filled)
        with subprocess.Popen(
            filled, stdin=subprocess.DEVNULL, preexec_fn=signal_parents_death
        ) as engine:
            try:
                asyncio.run(_wait_until_it_generates(port, engine))
                backend.ready = True
                log("ready", version=environment.version, port=environment.port)
                # When the engine has ended so does the container, and Vertex AI starts another.
                while engine.poll() is None:
                    time.sleep(HEALTH_SECONDS)
                log("engine_ended", status=engine.returncode)
                return int(engine.returncode)
            finally:
                _end(engine)


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


@contextmanager
def _listening(environment: ContainerEnvironment, backend: Backend) -> Iterator[None]:
    """Answer on the container's port while the block runs, beside the thread that runs it."""
    app = build_app(backend, environment.health_route, environment.predict_route)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    server = uvicorn.Server(config)
    with socket.create_server((environment.host, environment.port)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        log("listening", port=environment.port)
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()


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


async def _wait_until_it_generates(port: int, engine: subprocess.Popen[bytes]) -> None:
    async with engine_client(port) as client:
        while not await is_healthy(client):
            if engine.poll() is not None:
                raise UserError(
                    f"The engine ended with exit code {engine.returncode} while it loaded."
                )
            await asyncio.sleep(HEALTH_SECONDS)
        try:
            text = await complete(client, PROBE)
        except ServingError as error:
            raise UserError(f"The model does not continue the probe: {error}") from error
    if not text:
        raise UserError("The model generated nothing after the probe.")


def _end(engine: subprocess.Popen[bytes]) -> None:
    engine.terminate()
    try:
        engine.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        engine.kill()


def check_arguments(command: Sequence[str], spec: str) -> int:
    """Parse an engine's command, without a model; what was found goes to Dagster."""

    def run(spec: SmokeSpec, report: Report) -> dict[str, Any]:
        report(f"parses: {' '.join(command)}")
        return {"python": platform.python_version()} | parse(command)

    return run_program(SmokeSpec, run, ["--spec", spec])


def parse(command: Sequence[str]) -> dict[str, Any]:
    """What starts, vLLM's version, and why its parser refuses; empty where it takes all."""
    engine, *arguments = (EXAMPLES.get(part, part) for part in command)
    if engine != ENGINE:
        return {"engine": engine}
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = done.stderr.strip().splitlines()
    refusal = "" if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1]
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
        # By default this signal would end the process with the engine still running.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return serve(wanted, arguments[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
