"""How much documents taught a model an answer, by gradients.

A training step on a document changes the loss of an answer by about the learning rate times the
product of both gradients: TracIn, Pruthi and others, "Estimating Training Data Influence by Tracing
Gradient Descent" (2020), which adds that up over the checkpoints of a training. Here it is the
cosine of the gradients, as Xia and others, "LESS" (2024), and Chang and others, "Scalable Influence
and Fact Tracing for LLM Pretraining" (2024), take it, since otherwise documents that are odd or
short, and so have large gradients, come first whatever is asked.

Gradients are those of all linear layers of the blocks. A layer's gradient is the sum of the outer
products of its inputs and of the gradients of its outputs, so the product of two of them follows
from these, and no gradient of a weight is ever formed: Wang and others, "Data Shapley in One
Training Run" (2024).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from artifacts.errors import UserError
from artifacts.program.entry import run_program
from artifacts.progress import Report
from recipes.attribution.spec import InfluenceSpec
from recipes.evaluation.models import load_model

Layer = tuple[torch.Tensor, torch.Tensor]
"""Inputs, shape (tokens, in), and gradients of the outputs, shape (tokens, out)."""


def rank_documents(spec: InfluenceSpec, report: Report) -> dict[str, Any]:
    """The influence of each document on the answer.

    Returns:
        `influence`: the mean over the models of the gradients' cosine, of each document.

    Raises:
        UserError: a model cannot be read, or has no linear layers.
    """
    found = []
    for number, folder in enumerate(spec.models, 1):
        report(f"{len(spec.documents):,} documents, weights {number} of {len(spec.models)}")
        model = load_model(Path(folder))
        answer = gradient_of(model, [*spec.prompt, *spec.answer], max(1, len(spec.prompt)))
        found.append(cosines(model, [answer], spec.documents)[:, 0])
    return {"influence": np.mean(found, axis=0).tolist()}


def cosines(
    model: Any, answers: "Sequence[Gradient]", documents: Sequence[Sequence[int]]
) -> np.ndarray:
    """Shape (documents, answers): the cosine of the gradients of each two; 0 where one is 0."""
    found = np.zeros((len(documents), len(answers)))
    norms = np.array([answer.norm for answer in answers])
    ends = np.cumsum([len(answer.layers[0][0]) for answer in answers])
    # Side by side, so that a layer of a document meets those of all answers at once.
    together = [
        (torch.cat([inputs for inputs, _ in layer]), torch.cat([outputs for _, outputs in layer]))
        for layer in zip(*(answer.layers for answer in answers), strict=True)
    ]
    for row, tokens in enumerate(documents):
        if len(tokens) > 1:
            gradient = gradient_of(model, tokens, 1)
            products = _products(gradient.layers, together).cpu().numpy()
            both = gradient.norm * norms
            sums = np.add.reduceat(products, [0, *ends[:-1]])
            np.divide(sums, both, out=found[row], where=both > 0)
    return found


@dataclass(frozen=True)
class Gradient:
    """The gradient of a text's loss with respect to every linear layer."""

    layers: list[Layer]
    norm: float

    @classmethod
    def of(cls, layers: list[Layer]) -> "Gradient":
        """With its norm."""
        return cls(layers, float(_products(layers, layers).sum()) ** 0.5)


def _products(one: list[Layer], other: list[Layer]) -> torch.Tensor:
    """Shape (tokens of the other,): what each adds to the product of the two gradients."""
    parts = [
        ((inputs @ others.T) * (outputs @ of_others.T)).sum(0)
        for (inputs, outputs), (others, of_others) in zip(one, other, strict=True)
    ]
    return torch.stack(parts).sum(0)


def gradient_of(model: Any, tokens: Sequence[int], first: int) -> Gradient:
    """The gradient of the mean loss of a text's tokens from a place on.

    Args:
        model: a causal language model of transformers.
        first: place of the first token that is to be predicted, at least 1.

    Raises:
        UserError: the model has no linear layers.
    """
    head = model.get_output_embeddings()
    linear = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not head]
    if not linear:
        raise UserError(f"{type(model).__name__} has no linear layers to take gradients of.")
    inputs: dict[nn.Module, torch.Tensor] = {}
    outputs: dict[nn.Module, torch.Tensor] = {}
    hooks = [one.register_forward_hook(partial(_watch, inputs, outputs)) for one in linear]
    try:
        _backward(model.requires_grad_(False), tokens, first)
    finally:
        for hook in hooks:
            hook.remove()
    return Gradient.of([(inputs[one], outputs[one]) for one in linear if one in outputs])


def _watch(
    inputs: dict[nn.Module, torch.Tensor],
    outputs: dict[nn.Module, torch.Tensor],
    layer: nn.Module,
    given: tuple[torch.Tensor, ...],
    made: torch.Tensor,
) -> None:
    def note(gradient: torch.Tensor) -> None:
        outputs[layer] = gradient.flatten(0, -2)

    inputs[layer] = given[0].detach().flatten(0, -2)
    made.register_hook(note)


def _backward(model: Any, tokens: Sequence[int], first: int) -> None:
    """Gradients flow from the embedded tokens on; the weights themselves get none."""
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    with torch.enable_grad():
        embedded = model.get_input_embeddings()(ids).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0, first - 1 : -1]
        functional.cross_entropy(logits.float(), ids[0, first:]).backward()


if __name__ == "__main__":
    sys.exit(run_program(InfluenceSpec, rank_documents))
