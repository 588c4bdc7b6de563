"""Every request's own temperature and top-p inside one batch.

transformers' continuous batching samples the whole batch with one generation config. Processors
like these receive each request's own values, by the interface that transformers gives for it. The
batch takes the largest score; where chance is asked for, it is added to the scores, so that a batch
without it pays nothing.
"""

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)


class _PerRequestFloat(ContinuousBatchingLogitsProcessor):
    """Carries one float of each request through the batch's int32 storage."""

    ignored_kwargs = ()
    name: str
    default: float

    def __init__(self) -> None:
        self.supported_kwargs = {self.name: float}

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        values = torch.full(int32_tensor.shape, self.default, dtype=torch.float32)
        int32_tensor.copy_(values.view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        values = [
            request.state.logit_processor_kwargs.get(self.name, self.default)
            for request in requests_with_new_token
        ]
        return torch.tensor(values, dtype=torch.float32).view(torch.int32)


class Temperature(_PerRequestFloat):
    """Divides by the temperature, where it is not zero."""

    name = "temperature"
    default = 0.0

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return _heat(scores, tensor_arg[: scores.size(0)].view(torch.float32))


class TopP(_PerRequestFloat):
    """Keeps the most likely tokens that together hold `top_p` of the probability."""

    name = "top_p"
    default = 1.0

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return _keep_likely(scores, tensor_arg[: scores.size(0)].view(torch.float32))


class Chance(_PerRequestFloat):
    """Makes the largest score a sample, where the temperature is not zero."""

    name = "temperature"
    default = 0.0

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return _add_chance(scores, tensor_arg[: scores.size(0)].view(torch.float32))


def sample_per_request(manager: Any) -> None:
    """Give a continuous-batching manager that has not started, and takes the largest score, these
    processors."""
    processors = manager.logit_processor
    added = [Temperature(), TopP(), Chance()]
    processors.logits_processor.extend(added)
    processors.tensors_required += len(added)
    processors.do_processing = True
    processors._retrieve_processors_kwargs()


def choose_tokens(
    scores: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The next token of each row, shape (rows,).

    Args:
        scores: logits, shape (rows, vocabulary).
        temperature: shape (rows,); zero takes the most likely token.
        top_p: shape (rows,).
    """
    likely = _keep_likely(_heat(scores, temperature), top_p)
    return _add_chance(likely, temperature).argmax(dim=-1)


def _heat(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    if not (temperature > 0).any():
        return scores
    return scores / torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)


def _keep_likely(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    rows = (top_p < 1).nonzero().squeeze(-1)
    if not len(rows):
        return scores
    ordered, order = scores[rows].sort(dim=-1, descending=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
    ordered = ordered.masked_fill(before >= top_p[rows].unsqueeze(-1), -torch.inf)
    kept = scores.clone()
    kept[rows] = torch.empty_like(ordered).scatter_(-1, order, ordered)
    return kept


def _add_chance(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Add Gumbel noise to the rows that are sampled: the place of the largest sum is distributed
    as the softmax of the scores (Gumbel, 1954), at a fraction of the cost of drawing from it."""
    rows = (temperature > 0).nonzero().squeeze(-1)
    if not len(rows):
        return scores
    noise = -torch.empty_like(scores[rows]).exponential_().log()
    noisy = scores.clone()
    noisy[rows] += noise
    return noisy
