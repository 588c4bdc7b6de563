"""The engine: one loaded model behind two routes, for its API server alone.

Started by the API server as `python -m serving.engine.program --model FOLDER …`. It listens on a
free loopback port, which it prints as its first line of output once the model is loaded, and ends
when its standard input closes: an engine never outlives its API server.
"""

import argparse
import asyncio
import hmac
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse

from artifacts.errors import UserError
from artifacts.program.lifetime import end_with_parent
from serving.engine.choice import choose_engine, load_model
from serving.engine.classifier import Classifier
from serving.engine.process import SECRET_VARIABLE
from serving.engine.protocol import GenerateRequest, Refusal
from serving.engine.served_model import ServedModel
from serving.settings import EndpointSettings

WATCH_SECONDS = 0.5
BROKEN_EXIT_CODE = 70
PROGRAM = "serving.engine.program"
CONVERTED_VARIABLE = "MODEL_CONVERTED"


def _authorize(request: Request) -> None:
    given = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(given, f"Bearer {os.environ[SECRET_VARIABLE]}".encode()):
        raise HTTPException(401)


def build_app(model: ServedModel | Classifier) -> FastAPI:
    """The engine's two routes."""
    app = FastAPI(openapi_url=None, dependencies=[Depends(_authorize)])

    @app.get("/health")
    async def health() -> JSONResponse:
        fault = model.fault
        return JSONResponse({"fault": fault}, status_code=503 if fault else 200)

    @app.post("/generate")
    async def generate(request: GenerateRequest) -> Any:
        tokens = await asyncio.to_thread(model.encode, request)
        if isinstance(tokens, Refusal):
            return JSONResponse(tokens.model_dump(), status_code=400)

        async def lines() -> AsyncIterator[str]:
            async with aclosing(model.generate(request, tokens)) as chunks:
                async for chunk in chunks:
                    yield chunk.model_dump_json(exclude_defaults=True) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return app


def _end_with_api_server() -> None:
    """Wait until standard input closes, then end at once."""
    with suppress(OSError, ValueError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(0)


async def _serve(model: ServedModel | Classifier, engine: str, listener: socket.socket) -> None:
    server = uvicorn.Server(
        uvicorn.Config(build_app(model), log_level="warning", access_log=False, lifespan="off")
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(json.dumps({"port": listener.getsockname()[1], "engine": engine}), flush=True)
    while not serving.done():
        if fault := model.fault:
            print(f"The engine is broken: {fault}", file=sys.stderr, flush=True)
            os._exit(BROKEN_EXIT_CODE)
        await asyncio.wait([serving], timeout=WATCH_SECONDS)
    os._exit(0)


def main() -> int:
    """Load, listen, serve until the API server goes away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--settings", type=EndpointSettings.model_validate_json, required=True)
    parser.add_argument("--conversions", type=Path, required=True)
    arguments = parser.parse_args()
    # An engine that stands still does not see its standard input close.
    end_with_parent(signal.SIGKILL)
    threading.Thread(target=_end_with_api_server, daemon=True).start()
    try:
        choice = choose_engine(arguments.model, arguments.settings, arguments.conversions)
        if choice.converted_now and CONVERTED_VARIABLE not in os.environ:
            # What the conversion took in memory is given back by beginning again.
            os.environ[CONVERTED_VARIABLE] = "1"
            again = [sys.executable, "-m", PROGRAM, *sys.argv[1:]]
            os.execv(sys.executable, again)  # noqa: S606
        model = load_model(arguments.model, arguments.settings, choice)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # Before the port is announced, so that whoever hears of it can connect.
        listener.listen()
        asyncio.run(_serve(model, choice.reason, listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
