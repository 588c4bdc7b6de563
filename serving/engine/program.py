"""The engine: one loaded model behind two routes, for its API server alone.

Started by the API server as `python -m serving.engine.program --model FOLDER …`. It listens on a
free loopback port, which it prints as its first line of output once the model is loaded. It never
outlives its API server.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from artifacts.errors import UserError
from artifacts.program.lifetime import end_with_parent
from serving.engine.choice import choose_engine, load_model
from serving.engine.protocol import SECRET_VARIABLE, GenerateRequest, Refused, carries
from serving.engine.served_model import AnyModel
from serving.settings import EndpointSettings

CONVERTED_VARIABLE = "MODEL_CONVERTED"
SHORT_BYTES = 4_096
"""Of a request that is encoded at once, sooner than a thread would have begun to."""


def build_app(model: AnyModel) -> Starlette:
    """The engine's two routes, for the API server that started it: whoever knows its secret."""
    secret = os.environ[SECRET_VARIABLE]

    async def health(request: Request) -> Response:
        return Response(status_code=200 if carries(request.headers, secret) else 401)

    async def generate(request: Request) -> Response:
        if not carries(request.headers, secret):
            return Response(status_code=401)
        wanted = GenerateRequest.model_validate_json(body := await request.body())
        try:
            if len(body) <= SHORT_BYTES:
                tokens = model.encode(wanted)
            else:
                tokens = await asyncio.to_thread(model.encode, wanted)
        except Refused as refused:
            told = {"message": str(refused), "field": refused.field}
            return JSONResponse(told, status_code=400)

        async def lines() -> AsyncIterator[str]:
            async with aclosing(model.generate(wanted, tokens)) as chunks:
                async for chunk in chunks:
                    yield chunk.model_dump_json(exclude_defaults=True) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    routes = [Route("/health", health), Route("/generate", generate, methods=["POST"])]
    return Starlette(routes=routes)


def main() -> int:
    """Load, listen, serve until the API server goes away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--settings", type=EndpointSettings.model_validate_json, required=True)
    parser.add_argument("--conversions", type=Path, required=True)
    arguments = parser.parse_args()
    end_with_parent(signal.SIGKILL)
    try:
        choice = choose_engine(arguments.model, arguments.settings, arguments.conversions)
        if choice.converted and "torch" in sys.modules and CONVERTED_VARIABLE not in os.environ:
            # It was converted just now; the memory that took is given back by beginning again.
            os.environ[CONVERTED_VARIABLE] = "1"
            os.execv(sys.executable, sys.orig_argv)  # noqa: S606
        model = load_model(arguments.model, arguments.settings, choice)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said = {"port": listener.getsockname()[1], "engine": choice.reason}
        print(json.dumps(said), flush=True)
        config = uvicorn.Config(
            build_app(model), log_level="warning", access_log=False, lifespan="off"
        )
        uvicorn.Server(config).run(sockets=[listener])
    # The threads of what computes would be waited for.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
