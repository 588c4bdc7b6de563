"""Log-probabilities of a prompt's tokens beside the most likely ones, in plain OpenVINO.

openvino-genai's scheduler says how likely each token of a prompt is, but not which one was most
likely, which OpenAI's `logprobs: 1` asks for. So a prompt is read here once more where that is
asked for together with `echo`. The weights are in memory a second time from the first such request
on.
"""

import threading
from pathlib import Path

import numpy as np
import openvino as ov

from serving.engine.pipeline import BATCH_TOKENS, MODEL_NAME, arithmetic, core
from serving.engine.served_model import Scored
from serving.settings import Weights


class PromptScorer:
    """A converted model that reads one prompt at a time."""

    def __init__(self, folder: Path, weights: Weights, threads: int | None) -> None:
        """Nothing is loaded yet; the arguments are those of `open_pipeline`."""
        self._model = folder / MODEL_NAME
        self._properties = arithmetic(weights, threads)
        self._request: ov.InferRequest | None = None
        self._lock = threading.Lock()

    def score(self, tokens: list[int]) -> list[Scored]:
        """Each token with its log-probability after those before it, and the likeliest one."""
        scored = [Scored(tokens[0], None)]
        with self._lock:
            if self._request is None:
                compiled = core().compile_model(self._model, "CPU", self._properties)
                self._request = compiled.create_infer_request()
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
        assert self._request is not None
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
