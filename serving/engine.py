"""The engine: one model behind transformers' continuous batching, for its front alone.

Started by the front as `python -m serving.engine --model FOLDER`. It listens on a free loopback
port, which it prints as its first line of output once the model is loaded, and ends when its
standard input closes: an engine never outlives its front.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from tokenizers.decoders import DecodeStream

from artifacts.errors import UserError
from serving.protocol import Chunk, GenerateRequest, Refusal
from serving.sampling import sample_per_request
from serving.stopping import StopStrings

BLOCK_TOKENS = 32
BATCH_TOKENS = 256
WATCH_SECONDS = 0.5
BROKEN_EXIT_CODE = 70


class Engine:
    """A loaded model and its continuous batch."""

    def __init__(self, folder: Path, cache_tokens: int) -> None:
        """Load the model in bfloat16 and start the batch.

        Args:
            folder: a Hugging Face folder with safetensors.
            cache_tokens: tokens of all requests together whose keys and values are kept.

        Raises:
            UserError: the folder holds no model that can be read.
        """
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.tokenizer, model = _load(folder)
        self.context_tokens = min(model.config.max_position_embeddings, cache_tokens - BLOCK_TOKENS)
        ends = model.generation_config.eos_token_id
        self.end_tokens = ends if isinstance(ends, list) else [-1 if ends is None else ends]
        config = GenerationConfig(
            do_sample=True, eos_token_id=self.end_tokens, pad_token_id=self.end_tokens[0]
        )
        self.batch = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BLOCK_TOKENS,
                num_blocks=cache_tokens // BLOCK_TOKENS,
                max_batch_tokens=BATCH_TOKENS,
            ),
        )
        sample_per_request(self.batch)
        self.batch.start()

    @property
    def fault(self) -> str | None:
        """Why the batch has ended, or None while it runs."""
        error = self.batch.background_thread_status.fatal_error
        if error is not None:
            return str(error)
        return None if self.batch.is_running() else "the generation thread has ended"

    def encode(self, request: GenerateRequest) -> list[int] | Refusal:
        """The prompt's tokens, or why it cannot be served."""
        if request.messages is not None:
            if not self.tokenizer.chat_template:
                return Refusal(
                    field="messages", message="This model has no chat template; use completions."
                )
            turns = [message.model_dump() for message in request.messages]
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            tokens = self.tokenizer.encode(request.prompt or "")
        limit = min(request.max_prompt_tokens, self.context_tokens - request.max_tokens)
        if not tokens:
            return Refusal(field="prompt", message="The prompt is empty.")
        if len(tokens) > limit:
            return Refusal(
                field="prompt",
                message=f"The prompt has {len(tokens)} tokens; at most {max(limit, 0)} fit beside "
                f"{request.max_tokens} new ones.",
            )
        return [*tokens, *self.tokenizer.encode(request.written, add_special_tokens=False)]

    async def generate(self, request: GenerateRequest, tokens: list[int]) -> AsyncIterator[Chunk]:
        """Yield text as it is written; stops the work when the caller goes away."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name = uuid.uuid4().hex
        self.batch.register_result_handler(name, outputs.put_nowait)
        finished = False
        try:
            accepted = self.batch.add_request(
                tokens,
                request_id=name,
                max_new_tokens=request.max_tokens,
                streaming=request.stream or bool(request.stop),
                eos_token_id=self.end_tokens,
                temperature=float(request.temperature),
                top_p=float(request.top_p),
            )
            if accepted is None:
                yield Chunk(error="the engine takes no more requests")
                return
            decoder, stops = DecodeStream(skip_special_tokens=True), StopStrings(request.stop)
            shown, written = "", 0
            while not finished:
                output = await outputs.get()
                if output.error is not None:
                    yield Chunk(error=output.error)
                    return
                text = ""
                for token in output.generated_tokens[written:]:
                    text += decoder.step(self.tokenizer._tokenizer, token) or ""
                written = len(output.generated_tokens)
                shown += stops.add(text)
                finished = output.is_finished()
                if finished or stops.hit:
                    ended = stops.hit or (
                        written > 0 and output.generated_tokens[-1] in self.end_tokens
                    )
                    yield Chunk(
                        text=shown + stops.finish(),
                        finish_reason="stop" if ended else "length",
                        prompt_tokens=len(tokens),
                        completion_tokens=written,
                    )
                    return
                if request.stream and shown:
                    yield Chunk(text=shown, completion_tokens=written)
                    shown = ""
        finally:
            if not finished:
                self.batch.cancel_request(name)
            with self.batch.output_router._lock:
                self.batch.output_router.result_handlers.pop(name, None)


def build_app(engine: Engine) -> FastAPI:
    """The engine's two routes."""
    app = FastAPI(openapi_url=None)

    @app.get("/health")
    async def health() -> JSONResponse:
        fault = engine.fault
        return JSONResponse({"fault": fault}, status_code=503 if fault else 200)

    @app.post("/generate")
    async def generate(request: GenerateRequest) -> Any:
        tokens = await asyncio.to_thread(engine.encode, request)
        if isinstance(tokens, Refusal):
            return JSONResponse(tokens.model_dump(), status_code=400)

        async def lines() -> AsyncIterator[str]:
            async for chunk in engine.generate(request, tokens):
                yield chunk.model_dump_json(exclude_defaults=True) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return app


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:
        # Damaged files surface as errors of safetensors, json, torch or transformers alike.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"The model in {folder} cannot be read: {first}") from error
    return tokenizer, model.eval()


def _end_with_front() -> None:
    """Wait until standard input closes, then end at once."""
    with suppress(OSError, ValueError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(0)


async def _serve(engine: Engine, listener: socket.socket) -> None:
    server = uvicorn.Server(
        uvicorn.Config(build_app(engine), log_level="warning", access_log=False, lifespan="off")
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    while not serving.done():
        if fault := engine.fault:
            print(f"The engine is broken: {fault}", file=sys.stderr, flush=True)
            os._exit(BROKEN_EXIT_CODE)
        await asyncio.wait([serving], timeout=WATCH_SECONDS)
    os._exit(0)


def main() -> int:
    """Load, listen, serve until the front goes away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cache-tokens", type=int, required=True)
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_front, daemon=True).start()
    try:
        engine = Engine(arguments.model, arguments.cache_tokens)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # Before the port is announced, so that whoever hears of it can connect.
        listener.listen()
        asyncio.run(_serve(engine, listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
