"""The models to measure: loading them, the bits that they need for documents, what they write."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from artifacts.errors import UserError
from artifacts.model import context_tokens, read_model
from artifacts.progress import CountedProgress, Report
from recipes.device import device_of, local_device
from recipes.evaluation.documents import Documents
from recipes.evaluation.results import samples
from recipes.evaluation.settings import GenerationSettings
from recipes.settings import Precision


def precision() -> Precision:
    """The arithmetic that this machine does fast."""
    return device_of(local_device()).precision()


def load_causal(folder: Path) -> Any:
    """A causal language model to measure, its weights rounded to bfloat16 but held in float32. An
    endpoint has no more of them, whatever its processor computes in, and small steps of training
    are lost in the rounding. Raises UserError."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json.")
    model = read_model(folder, AutoModelForCausalLM, dtype=torch.float32)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model.to(local_device())


def as_served(model: Any) -> Any:
    """Turn a model's weights into bfloat16 where that is fast, as the endpoint has them."""
    return model.to(torch.bfloat16) if precision() == "bfloat16" else model


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    at_once: int = 8,
    **options: Any,
) -> list[str]:
    """What a model writes for prompts of token ids (int64), always by the most likely token or
    beam.

    Prompts of about one length share a batch. A causal model ends where its positions do, beyond
    which some fail and none was trained.
    """
    # A causal model continues at the last place, so padding goes to the left of the prompt.
    is_causal = not model.config.is_encoder_decoder
    side, padding = "left" if is_causal else "right", options.get("pad_token_id", 0)
    positions = context_tokens(model.config.get_text_config().to_dict()) if is_causal else None

    def room(number: int) -> int:
        available = max_new_tokens if positions is None else positions - len(prompts[number])
        return min(available, max_new_tokens)

    # Ordered by length, prompts that leave the same room are neighbors, as `groupby` needs them.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    together = [
        (new_tokens, numbers[first : first + at_once])
        for new_tokens, numbers in ((n, list(of)) for n, of in groupby(order, room))
        for first in range(0, len(numbers), at_once)
        if new_tokens > 0
    ]
    results = [""] * len(prompts)
    for new_tokens, numbers in together:
        inputs = [torch.from_numpy(prompts[number]) for number in numbers]
        tokens = pad_sequence(inputs, True, padding, side).to(model.device)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in inputs], True, 0, side)
        outputs = model.generate(
            tokens,
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=new_tokens,
            **options,
        )
        if is_causal:
            outputs = outputs[:, tokens.shape[1] :]
        texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        for number, text in zip(numbers, texts, strict=True):
            results[number] = text
    return results


def complete(
    model: Any,
    tokenizer: Any,
    documents: Documents,
    settings: GenerationSettings,
) -> list[dict[str, str]]:
    """Continue the documents' first tokens; of a conversation, all before its first answer."""
    prompts = [
        document.tokens[: settings.prompt_tokens]
        if document.is_target is None
        else document.tokens[: int(np.argmax(document.is_target))]
        for document in documents
    ]
    texts = generate(model, tokenizer, prompts, settings.new_tokens, at_once=1)
    return samples(tokenizer, documents, prompts, texts)


LOSS_TOKENS = 64
"""Tokens whose logits are in float32 at once; few enough for a processor's cache."""


class Window(NamedTuple):
    """A stretch of one document that is read in one pass."""

    document: int
    start: int
    length: int
    """Predicted tokens; as many are read, from one place before."""


def windows(documents: Documents, sequence_length: int) -> list[Window]:
    """Cut documents so that every token but the first is predicted exactly once; one that is longer
    than the sequence length starts again in each window, without context."""
    return [
        Window(number, start, min(sequence_length, len(document.tokens) - 1 - start))
        for number, document in enumerate(documents)
        for start in range(0, len(document.tokens) - 1, sequence_length)
    ]


Row = TypeVar("Row")


def batches(
    rows: Sequence[Row], length: Callable[[Row], int], batch_tokens: int
) -> Iterator[list[Row]]:
    """Group what is of similar length, so that little is padding; longest first."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: -length(row)):
        # The first row is the longest, and all others are padded to its length.
        if batch and (len(batch) + 1) * length(batch[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def document_bits(
    model: torch.nn.Module,
    documents: Documents,
    sequence_length: int,
    batch_tokens: int,
    report: Report,
    label: str,
) -> np.ndarray:
    """Bits of each document under a causal model: float64, shape (documents,); NaN where it says
    NaN. The report says how far it is, after a label."""
    device = next(model.parameters()).device
    bits = np.zeros(len(documents))
    cut = windows(documents, sequence_length)
    total, done = sum(window.length for window in cut), 0
    progress = CountedProgress(report, label, total, "tokens")
    for batch in batches(cut, lambda window: window.length, batch_tokens):
        inputs, targets = (part.to(device) for part in _tensors(batch, documents))
        logits = model(input_ids=inputs, use_cache=False).logits
        sums = _losses(logits, targets).double().sum(dim=1).cpu().numpy() / math.log(2)
        # Not `+=`, which would count one of several windows of the same document.
        np.add.at(bits, [window.document for window in batch], sums)
        done += sum(window.length for window in batch)
        progress.advance(done)
    return bits


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats of each target, shape (windows, tokens); in parts that a processor's cache holds."""
    parts = zip(
        logits.flatten(0, 1).split(LOSS_TOKENS), targets.flatten().split(LOSS_TOKENS), strict=True
    )
    losses = [
        functional.cross_entropy(part.float(), target, ignore_index=-100, reduction="none")
        for part, target in parts
    ]
    return torch.cat(losses).view_as(targets)


def _tensors(batch: Sequence[Window], documents: Documents) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next tokens, shape (windows, longest window); targets are -100 in the padding.

    Padding stands at the right, where a causal model cannot see it, so it needs no mask.
    """
    inputs, targets = [], []
    for window in batch:
        document, end = documents[window.document], window.start + window.length
        labels = document.tokens[window.start + 1 : end + 1]
        if document.is_target is not None:
            labels = np.where(document.is_target[window.start + 1 : end + 1], labels, -100)
        inputs.append(torch.from_numpy(document.tokens[window.start : end]))
        targets.append(torch.from_numpy(labels))
    return pad_sequence(inputs, True), pad_sequence(targets, True, -100)
