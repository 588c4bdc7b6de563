"""A causal language model behind openvino-genai's continuous batching on a CPU."""

import asyncio
import itertools
import os
import secrets
import threading
import traceback
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openvino_genai import GenerationStatus

from artifacts.model.folder import context_tokens, end_tokens_of, read_config
from serving.engine.pipeline import (
    BLOCK_TOKENS,
    PromptScorer,
    generation_config,
    open_pipeline,
    token_tensor,
)
from serving.engine.protocol import GenerateRequest
from serving.engine.served_model import Job, Scored, ServedModel, Step
from serving.engine.tokenizer import ServedTokenizer
from serving.settings import EndpointSettings

SEED_BITS = 32
TURNS = 5
"""Of the event loop between two steps; a request takes four at most to its place in the batch."""
WAIT_SECONDS = 1.0
"""At most, for an event loop that has something longer to do."""
BROKEN_EXIT_CODE = 70


@dataclass(eq=False, kw_only=True)
class _Job(Job):
    """One request in the batch."""

    handle: Any
    left: bool = False
    """Whether its caller has gone. The engine's thread cancels then: a handle that is canceled
    between being asked whether it can be read and being read raises."""


class OpenVinoModel(ServedModel):
    """Requests join and leave the running batch at every token."""

    def __init__(self, folder: Path, converted: Path, settings: EndpointSettings) -> None:
        """Load a converted model.

        Args:
            folder: the Hugging Face folder that it was converted from.
            converted: what `serving.engine.choice` made of it.
        """
        config = read_config(folder)
        self.tokenizer = ServedTokenizer.read(converted)
        self.end_tokens = end_tokens_of(config)
        kept = settings.cache_tokens - BLOCK_TOKENS
        self.context_tokens = min(context_tokens(config) or kept, kept)
        self._pipeline = open_pipeline(
            converted, settings.weights, settings.cache_tokens, settings.threads
        )
        self._scorer = PromptScorer(converted, settings.weights, settings.threads)
        self._numbers = itertools.count()
        self._jobs: set[_Job] = set()
        self._asked = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        threading.Thread(target=self._run, daemon=True).start()

    async def write(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Step, None]:
        ends = [] if request.ignore_eos else self.end_tokens
        config = generation_config(request.max_tokens, ends)
        config.logprobs = int(request.logprobs)
        config.echo = request.echo and request.logprobs and not request.written
        read: list[Scored] = []
        if config.echo and (request.top or len(tokens) > self.context_tokens):
            config.echo, read = False, await asyncio.to_thread(self._scorer.score, tokens)
            if not request.max_tokens:
                yield Step([], True, read)
                return
        if request.temperature > 0:
            config.do_sample = True
            config.temperature, config.top_p = request.temperature, request.top_p
            seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
            config.rng_seed = seed % 2**SEED_BITS
        prompt = [*tokens, *self.encode_written(request)]
        handle = self._pipeline.add_request(next(self._numbers), token_tensor(prompt), config)
        job = _Job(request=request, prompt=tokens if config.echo else [], handle=handle)
        self._jobs.add(job)
        self._loop = asyncio.get_running_loop()
        self._asked.set()
        try:
            async for step in job.steps():
                yield replace(step, scored=[*read, *step.scored])
                read = []
        finally:
            job.left = not job.finished

    def _run(self) -> None:
        try:
            while True:
                self._asked.wait()
                self._asked.clear()
                while self._pipeline.has_non_finished_requests():
                    self._pipeline.step()
                    self._hand_out()
                    self._give_way()
                self._hand_out()
        except Exception:
            # Nothing is left to answer with. The API server starts another engine.
            traceback.print_exc()
            os._exit(BROKEN_EXIT_CODE)

    def _give_way(self) -> None:
        """Let the event loop take requests and send what was written.

        A step holds Python's lock from beginning to end, and without this the loop would get it for
        one turn between two of them, so that a request and its first token took a step a turn.
        """
        with suppress(RuntimeError):  # It was closed.
            for _ in range(TURNS):
                turned = threading.Event()
                self._loop.call_soon_threadsafe(turned.set)
                turned.wait(WAIT_SECONDS)

    def _hand_out(self) -> None:
        for job in list(self._jobs):
            if job.left:
                job.handle.cancel()
                self._jobs.discard(job)
                continue
            status = job.handle.get_status()
            tokens, logprobs = [], []
            while job.handle.can_read():
                for output in job.handle.read().values():
                    tokens += output.generated_ids
                    logprobs += output.generated_log_probs
            if status == GenerationStatus.IGNORED:
                job.put("the cache of the engine holds no more")
                self._jobs.discard(job)
            elif tokens or status != GenerationStatus.RUNNING:
                job.put(self._step(job, tokens, logprobs, status != GenerationStatus.RUNNING))
                if status != GenerationStatus.RUNNING:
                    self._jobs.discard(job)

    def _step(self, job: _Job, tokens: list[int], logprobs: list[float], finished: bool) -> Step:
        """What was read, without the echoed prompt and what nobody asked for."""
        scored = []
        if tokens and (count := len(job.prompt)):
            values = [None, *logprobs[1:count]]
            scored = [Scored(t, v) for t, v in zip(job.prompt, values, strict=True)]
            tokens, logprobs, job.prompt = tokens[count:], logprobs[count:], []
        if not job.request.max_tokens:
            return Step([], finished, scored)
        if job.request.logprobs:
            is_likeliest = job.request.temperature == 0
            for token, value in zip(tokens, logprobs, strict=True):
                scored.append(Scored(token, value, (token, value) if is_likeliest else None))
        return Step(tokens, finished, scored)
