"""A causal language model behind openvino-genai's continuous batching on a CPU, in C++."""

import asyncio
import ctypes
import itertools
import mmap
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino_genai import (
    ContinuousBatchingPipeline,
    GenerationConfig,
    GenerationStatus,
    SchedulerConfig,
)

from artifacts.model import attention_window, context_tokens, end_tokens_of, read_config
from artifacts.program.lifetime import LIBC
from serving.engine import served_model
from serving.engine.protocol import GenerateRequest
from serving.engine.served_model import AnswerText, Job, ServedTokenizer, Step, TokenLikelihood
from serving.settings import EndpointSettings, Weights

MODEL_NAME = "openvino_model.xml"
BLOCK_TOKENS = 32
"""Of the cache; what OpenVINO has on a CPU."""
BATCH_TOKENS = 256
"""Most tokens that one step computes, of all requests together."""
WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Instructions at which ONEDNN_MAX_CPU_ISA stops OpenVINO's kernels. OpenVINO itself asks the
processor alone, and would compute in bfloat16 that its kernels then refuse."""

SEED_BITS = 32
TURNS = 4
"""Of the event loop between two steps; a call takes three at most to its place in the batch: to be
read, to become a task, and to be encoded and submitted. With one turn, first tokens took about half
again as long."""
WAIT_SECONDS = 1.0
"""At most, for an event loop that has something longer to do."""


@dataclass(eq=False, kw_only=True)
class _RunningRequest(Job):
    """One request in the batch. Where its caller has gone the engine's thread cancels the handle:
    one that is canceled between being asked whether it can be read and being read raises."""

    handle: Any = None
    echoed: int = 0
    """Tokens of the prompt that are scored and told before the answer."""
    unscored: AnswerText | None = None
    """Where prompt and answer are read for their scores when the answer is written: its text until
    then, which tells whether a stop string has ended it."""
    written: list[int] = field(default_factory=list)


class OpenVinoModel(served_model.ServedModel):
    """Requests join and leave the running batch at every token."""

    def __init__(self, folder: Path, converted: Path, settings: EndpointSettings) -> None:
        """Load a converted model.

        Args:
            folder: the Hugging Face folder that it was converted from.
            converted: what `serving.engine.program` made of it.
        """
        config = read_config(folder)
        self.tokenizer = ServedTokenizer.read(converted)
        self.end_tokens = end_tokens_of(config)
        cache_limit = settings.cache_tokens - BLOCK_TOKENS
        # Of an attention window the paged cache knows nothing, so no request may pass it.
        limits = (context_tokens(config), attention_window(config), cache_limit)
        self.context_tokens = min(filter(None, limits))
        self._pipeline = open_pipeline(
            converted, settings.weights, settings.cache_tokens, settings.threads
        )
        self._scorer = PromptScorer(converted, settings.weights, settings.threads)
        self._file = (converted / MODEL_NAME).with_suffix(".bin").resolve()
        # One thread, since the scorer has one state, which each prompt clears first.
        self._reader = ThreadPoolExecutor(1, "scores")
        self._numbers = itertools.count()
        self._jobs: set[_RunningRequest] = set()
        self._asked = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        served_model.start_thread(self._run)

    def submit(self, request: GenerateRequest, tokens: list[int]) -> Job:
        prompt, scores = [*tokens, *self.encode_written(request)], request.logprobs
        echoes = request.echo and scores and not request.written
        # The scheduler scores the tokens that it takes, which are the likeliest at temperature 0,
        # and those of a prompt if each has a position. It names no alternatives: the one it can
        # give is the token itself, where that is the likeliest.
        is_told = request.top <= (not echoes and request.temperature == 0)
        reads_again = scores and (not is_told or len(tokens) > self.context_tokens)
        echoed = len(tokens) if echoes else 0
        job = _RunningRequest(request=request, prompt=prompt, echoed=echoed)
        if reads_again and not request.max_tokens:
            self._read_again(job)
            return job
        if reads_again:
            at_its_end = request.model_copy(update={"stream": False})
            job.unscored = AnswerText(self, at_its_end, tokens)
        ends = [] if request.ignore_eos else self.end_tokens
        config = generation_config(request.max_tokens, ends)
        config.logprobs, config.echo = int(scores), echoed > 0 and not reads_again
        if request.temperature > 0:
            config.do_sample = True
            config.temperature, config.top_p = request.temperature, request.top_p
            seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
            config.rng_seed = seed % 2**SEED_BITS
        job.handle = self._pipeline.add_request(next(self._numbers), token_tensor(prompt), config)
        self._jobs.add(job)
        self._loop = asyncio.get_running_loop()
        # Last of all: the thread that this wakes hands out only what is among the jobs.
        self._asked.set()
        return job

    def _read_again(self, job: _RunningRequest) -> None:
        """Score prompt and answer, in a thread of its own."""

        def read() -> None:
            if job.left:
                return
            try:
                scored = self._scorer.score([*job.prompt, *job.written], job.request.top)
            except Exception as error:
                job.put(f"{type(error).__name__}: {error}")
            else:
                job.put(Step(job.written, True, scored[0 if job.echoed else len(job.prompt) :]))

        self._reader.submit(read)

    def _run(self) -> None:
        while True:
            self._asked.wait()
            # Before the work, so that a request that comes during its last step sets it again.
            self._asked.clear()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                self._hand_out()
                self._give_way()
            # Once more, since a step may have finished a request before its job was among the
            # others.
            self._hand_out()
            drop_pages(self._file)

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
        # A copy, made in one go: the event loop adds to them meanwhile.
        for job in list(self._jobs):
            if job.left:
                job.handle.cancel()
                self._jobs.discard(job)
                continue
            status = job.handle.get_status()
            finished = status != GenerationStatus.RUNNING
            tokens, logprobs = [], []
            while job.handle.can_read():
                for output in job.handle.read().values():
                    tokens += output.generated_ids
                    logprobs += output.generated_log_probs
            if status == GenerationStatus.IGNORED:
                job.put("the engine's cache is full")
            elif tokens or finished:
                self._put(job, tokens, logprobs, finished)
            if finished:
                self._jobs.discard(job)

    def _put(
        self, job: _RunningRequest, tokens: list[int], logprobs: list[float], finished: bool
    ) -> None:
        """Hand out what was read, without the echoed prompt and what nobody asked for."""
        if job.unscored:
            job.written += tokens
            if job.unscored.add(Step(tokens, finished)):
                if not finished:
                    job.handle.cancel()
                    self._jobs.discard(job)
                self._read_again(job)
            return
        scored = []
        if tokens and (count := job.echoed):
            # Nothing comes before the first token of a prompt, so its figure means nothing.
            values = [None, *logprobs[1:count]]
            scored = [
                TokenLikelihood(t, v) for t, v in zip(job.prompt[:count], values, strict=True)
            ]
            tokens, logprobs, job.echoed = tokens[count:], logprobs[count:], 0
        if not job.request.max_tokens:
            tokens = []
        elif job.request.logprobs:
            for token, value in zip(tokens, logprobs, strict=True):
                scored.append(TokenLikelihood(token, value, [(token, value)] * job.request.top))
        job.put(Step(tokens, finished, scored))


class Unsupported(Exception):
    """This engine does not run the model; another one may."""


@cache
def core() -> ov.Core:
    """OpenVINO in this process, kept to the process's end.

    The thread that loads its CPU plugin is given an alternate stack for signals, which goes with
    the plugin, whichever thread drops that: the next signal would end the process without a word.
    """
    return ov.Core()


def open_pipeline(
    folder: Path,
    weights: Weights,
    cache_tokens: int,
    threads: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> ContinuousBatchingPipeline:
    """Load a converted model.

    Args:
        cache_tokens: tokens of all requests together whose keys and values are kept.
        threads: of the arithmetic; None takes what this process may use.
    """
    scheduler = SchedulerConfig()
    scheduler.num_kv_blocks = -(-cache_tokens // BLOCK_TOKENS)
    scheduler.max_num_batched_tokens = batch_tokens
    # What a cached prefix leaves out has no log-probabilities.
    scheduler.enable_prefix_caching = False
    properties = arithmetic(weights, threads)
    # In a thread that ends: see `core`. The pipeline has a plugin of its own.
    with ThreadPoolExecutor(1) as loader:
        return loader.submit(
            lambda: ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        ).result()


def arithmetic(weights: Weights, threads: int | None) -> dict[str, Any]:
    """OpenVINO's properties: float32 where the weights are, else what this processor does fast.

    Keys and values are kept in 16 bits: OpenVINO's own choice of 8 would not be what was judged.
    """
    cores = len(os.sched_getaffinity(0))
    threads = min(threads or cores, cores)
    properties = {"INFERENCE_NUM_THREADS": threads}
    if weights == "f32":
        return properties | {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    instructions = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if instructions in WITHOUT_BFLOAT16:
        if "VNNI" not in instructions:
            # For the same reason: inputs of quantized layers would be quantized, too.
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        return properties | {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}
    if "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return properties | {"KV_CACHE_PRECISION": "f16"}
    if threads == 1:
        # OpenVINO's layer for AMX divides its work by half the threads, rounded down (SIGFPE).
        return properties | {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}
    return properties | {"KV_CACHE_PRECISION": "bf16"}


def drop_pages(file: Path) -> None:
    """Take a mapped file out of this process's memory; a page that is read again comes back.

    OpenVINO keeps the file of the weights mapped. It reads it when it loads a model and when it
    computes a number of tokens for the first time, to arrange the weights for it, and hardly after
    that: the file's pages are as many as the weights (262 MB for 135M parameters), and no use.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {file}"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            size = ctypes.c_size_t(end - start)
            LIBC.madvise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


def token_tensor(tokens: list[int]) -> ov.Tensor:
    """A prompt as the scheduler takes it, shape (1, tokens)."""
    return ov.Tensor(np.array([tokens], np.int64))


def generation_config(most: int, end_tokens: list[int]) -> GenerationConfig:
    """Settings of one request that takes the most likely token each time."""
    config = GenerationConfig()
    # The scheduler writes one token at least.
    config.max_new_tokens = max(most, 1)
    config.ignore_eos = not end_tokens
    # It insists on an end, also where that is ignored.
    config.eos_token_id, *_ = ends = end_tokens or [0]
    config.stop_token_ids = set(ends)
    return config


def score_tokens(pipeline: ContinuousBatchingPipeline, tokens: list[int]) -> list[float]:
    """Log-probability of each token after those before it; of the first one no more than a place.

    Args:
        pipeline: one that nobody else uses meanwhile.
    """
    config = generation_config(1, [])
    config.echo, config.logprobs = True, 1
    handle = pipeline.add_request(0, token_tensor(tokens), config)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    (output,) = handle.read_all()
    return list(output.generated_log_probs[: len(tokens)])


class PromptScorer:
    """A converted model that reads one prompt at a time, in plain OpenVINO.

    openvino-genai's scheduler says how likely each token of a prompt is, but not which ones were
    most likely, which OpenAI's `logprobs: 1` asks for; and it reads the last token too, for which
    there may be no position. So such prompts are read here, with their answers. The weights are in
    memory a second time from the first of them on.
    """

    def __init__(self, folder: Path, weights: Weights, threads: int | None) -> None:
        """Nothing is loaded yet; the arguments are those of `open_pipeline`."""
        self._model = folder / MODEL_NAME
        self._properties = arithmetic(weights, threads)

    @cached_property
    def _request(self) -> ov.InferRequest:
        compiled = core().compile_model(self._model, "CPU", self._properties)
        return compiled.create_infer_request()

    def score(self, tokens: list[int], top: int) -> list[TokenLikelihood]:
        """Each token with its log-probability after those before it, and the `top` likeliest."""
        scored = [TokenLikelihood(tokens[0], None)]
        self._request.reset_state()
        for start in range(0, len(tokens) - 1, BATCH_TOKENS):
            end = min(start + BATCH_TOKENS, len(tokens) - 1)
            logits = self._read(tokens[start:end], start)
            # Without the largest, its exponential may be more than a float holds.
            logits = logits - logits.max(-1, keepdims=True)
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            following = tokens[start + 1 : end + 1]
            for row, token in zip(logprobs, following, strict=True):
                # Not `[-top:]`, which is all of them where none is asked for.
                best = np.argpartition(row, -top)[len(row) - top :]
                best = best[np.argsort(-row[best], kind="stable")]
                likely = [(int(number), float(row[number])) for number in best]
                scored.append(TokenLikelihood(token, float(row[token]), likely))
        return scored

    def _read(self, tokens: list[int], start: int) -> np.ndarray:
        """Logits after each token, shape (tokens, vocabulary)."""
        count = len(tokens)
        outputs = self._request.infer(
            {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, start + count), np.int64),
                "position_ids": np.arange(start, start + count, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        return np.asarray(outputs["logits"][0], np.float32)
