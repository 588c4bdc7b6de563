"""openvino-genai's scheduler over a converted model: paged cache, continuous batching, in C++."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from serving.engine.served_model import Scored
from serving.settings import Weights

MODEL_NAME = "openvino_model.xml"
BLOCK_TOKENS = 32
"""Of the cache; what OpenVINO has on a CPU."""
BATCH_TOKENS = 256


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
    properties = {"INFERENCE_NUM_THREADS": threads or len(os.sched_getaffinity(0))}
    if weights == "f32":
        return properties | {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    capabilities = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return properties | {"KV_CACHE_PRECISION": "bf16" if "BF16" in capabilities else "f16"}


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

    openvino-genai's scheduler says how likely each token of a prompt is, but not which one was most
    likely, which OpenAI's `logprobs: 1` asks for; and it reads the last token too, for which there
    may be no position. So such prompts are read here. The weights are in memory a second time from
    the first of them on.
    """

    def __init__(self, folder: Path, weights: Weights, threads: int | None) -> None:
        """Nothing is loaded yet; the arguments are those of `open_pipeline`."""
        self._model = folder / MODEL_NAME
        self._properties = arithmetic(weights, threads)
        self._lock = threading.Lock()

    @cached_property
    def _request(self) -> ov.InferRequest:
        compiled = core().compile_model(self._model, "CPU", self._properties)
        return compiled.create_infer_request()

    def score(self, tokens: list[int]) -> list[Scored]:
        """Each token with its log-probability after those before it, and the likeliest one."""
        scored = [Scored(tokens[0], None)]
        with self._lock:
            self._request.reset_state()
            for start in range(0, len(tokens) - 1, BATCH_TOKENS):
                end = min(start + BATCH_TOKENS, len(tokens) - 1)
                logprobs = _log_softmax(self._read(tokens[start:end], start))
                following = tokens[start + 1 : end + 1]
                for row, token in zip(logprobs, following, strict=True):
                    top = int(row.argmax())
                    scored.append(Scored(token, float(row[token]), (top, float(row[top]))))
        return scored

    def _read(self, tokens: list[int], start: int) -> np.ndarray:
        """Logits after each token, shape (tokens, vocabulary)."""
        count = len(tokens)
        found = self._request.infer(
            {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, start + count), np.int64),
                "position_ids": np.arange(start, start + count, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        return np.asarray(found["logits"][0], np.float32)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
