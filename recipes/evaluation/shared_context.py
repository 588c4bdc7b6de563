"""lm-eval's Hugging Face backend, reading each question's context once for all its choices."""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from artifacts.model import attention_window
from recipes.evaluation.bits import batches

Request = tuple[tuple[str, str], list[int], list[int]]
"""lm-eval's: the two texts, the context's tokens, the continuation's tokens."""


@dataclass(frozen=True)
class SharedContext:
    """All requests of one context."""

    context: list[int]
    continuations: list[list[int]]
    places: list[int]
    """Where the answers go in the list of all answers."""

    @property
    def length(self) -> int:
        """Tokens in the packed row: the context, and each continuation but its last token."""
        return len(self.context) + sum(len(tokens) - 1 for tokens in self.continuations)


class SharedContextLM(HFLM):
    """Packs a question into one row: its context, then its choices side by side.

    A mask lets every choice see the context and itself, and its positions go on from the context,
    so each token's probability is what it is when the choice stands alone. Rows are batched by
    token count. What lm-eval does with the answers is untouched.

    Where a model counts places by itself, or its attention ends within a row, choices stand alone.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int) -> None:
        """Wrap a loaded causal model of transformers."""
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            device=str(model.device),
            # What bfloat16 keeps of a sum of log-likelihoods tells no close choices apart.
            softmax_dtype="float32",
        )
        self._batch_tokens = batch_tokens
        self._longest_row = _longest_row(model)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool] | None] = [None] * len(requests)
        fitting: list[SharedContext] = []
        apart: list[SharedContext] = []
        for question in _questions(requests, self._batch_tokens):
            longest = max(map(len, question.continuations))
            # The last token of a choice is only predicted, and takes no position.
            fits = len(question.context) + longest <= self.max_length + 1
            shares = fits and question.length <= self._longest_row
            (fitting if shares else apart).append(question)
        for batch in batches(fitting, lambda question: question.length, self._batch_tokens):
            for question, scores in zip(batch, self._score(batch), strict=True):
                for place, score in zip(question.places, scores, strict=True):
                    answers[place] = score
        # lm-eval cuts what is too long from the left, choice by choice, so no context is shared.
        places = [place for question in apart for place in question.places]
        alone = [requests[place] for place in places]
        if alone:
            scored = super()._loglikelihood_tokens(alone, disable_tqdm, override_bs or 1)
            for place, score in zip(places, scored, strict=True):
                answers[place] = score
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers  # type: ignore[return-value]

    def _score(self, batch: Sequence[SharedContext]) -> list[list[tuple[float, bool]]]:
        """Log-likelihood and greediness of every continuation of every question."""
        tokens, positions, mask = _pack(batch, self.model.dtype, self.device)
        # Nothing before the last token of the shortest context predicts a continuation.
        first = min(len(question.context) for question in batch) - 1
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=tokens.shape[1] - first,
        ).logits
        return [
            [
                self._likelihood(logits[row, [place - first for place in places]], continuation)
                for places, continuation in _predicting(question)
            ]
            for row, question in enumerate(batch)
        ]

    def _likelihood(self, logits: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
        targets = torch.tensor(continuation, device=logits.device)
        likely = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        greedy = bool((likely.argmax(dim=-1) == targets).all())
        return float(likely.gather(-1, targets[:, None]).sum()), greedy


def _longest_row(model: Any) -> float:
    """Tokens of a row in which a model's attention follows the mask and positions it is given."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return 0
    return attention_window(model.config.get_text_config().to_dict()) or math.inf


def _questions(requests: Sequence[Request], most: int) -> Iterator[SharedContext]:
    """Group requests by their context's tokens, into rows of about so many tokens or one choice.

    A task whose questions have no text of their own has one context for all of them.
    """
    by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, (_, context, _) in enumerate(requests):
        by_context[tuple(context)].append(place)
    for tokens, places in by_context.items():
        row = SharedContext(list(tokens), [], [])
        for place in places:
            continuation = requests[place][2]
            # A context that is long itself is still read once for several choices.
            limit = max(most - len(tokens), most // 2)
            if row.places and row.length - len(tokens) + len(continuation) - 1 > limit:
                yield row
                row = SharedContext(list(tokens), [], [])
            row.continuations.append(continuation)
            row.places.append(place)
        yield row


def _pack(
    batch: Sequence[SharedContext], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and positions, shape (questions, width); mask, shape (questions, 1, width, width)."""
    # `batches` gives the longest first.
    width = batch[0].length
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    positions = torch.zeros(len(batch), width, dtype=torch.long)
    visible = torch.zeros(len(batch), width, width, dtype=torch.bool)
    for row, question in enumerate(batch):
        shared = len(question.context)
        tokens[row, :shared] = torch.tensor(question.context)
        positions[row, :shared] = torch.arange(shared)
        visible[row, :, :shared] = True
        start = shared
        for continuation in question.continuations:
            end = start + len(continuation) - 1
            tokens[row, start:end] = torch.tensor(continuation[:-1], dtype=torch.long)
            positions[row, start:end] = torch.arange(shared, shared + end - start)
            visible[row, start:end, start:end] = True
            start = end
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.zeros(len(batch), 1, width, width, dtype=dtype)
    mask.masked_fill_(~(visible & causal)[:, None], torch.finfo(dtype).min)
    return tokens.to(device), positions.to(device), mask.to(device)


def _predicting(question: SharedContext) -> Iterator[tuple[list[int], list[int]]]:
    """For every continuation, the places in the row whose logits predict its tokens."""
    start = len(question.context)
    for continuation in question.continuations:
        end = start + len(continuation) - 1
        yield [len(question.context) - 1, *range(start, end)], continuation
        start = end
