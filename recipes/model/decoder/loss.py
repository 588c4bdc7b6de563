"""Cross-entropy of the next token, without holding all logits in float32."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from recipes.data.batch import IGNORED

TOKENS_IN_FLIGHT = {"cpu": 1024, "cuda": 8192}
"""Tokens whose logits exist at once, in the type of the matrix product; elsewhere all, since XLA
divides the work itself."""
TOKENS_IN_FLOAT32 = {"cpu": 64}
"""Tokens whose logits exist at once in float32; few enough for a processor's cache."""


def summed_cross_entropy(
    hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The loss in nats, summed over all positions that have a target.

    Args:
        hidden: shape (rows, sequence_length, hidden_size).
        head_weight: shape (vocabulary, hidden_size).
        targets: shape (rows, sequence_length), `IGNORED` where there is nothing to predict.
    """
    device = hidden.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else hidden.dtype
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden.flatten(0, 1), head_weight, targets.flatten(), dtype, torch.is_grad_enabled()
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Output matrix and cross-entropy in one, the gradients made in the forward pass.

    Logits become their own gradient in place, so neither are they kept nor computed again (the
    idea of Hsu et al., "Liger Kernel", 2024).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> torch.Tensor:
        weight = head_weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if differentiate else None
        weight_gradient: torch.Tensor | None = None
        size = TOKENS_IN_FLIGHT.get(hidden.device.type, len(targets))
        to_gradient = _compiled_to_gradient() if hidden.is_cuda else _to_gradient
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            inputs = hidden[part].to(dtype)
            logits = F.linear(inputs, weight)
            loss += to_gradient(logits, targets[part], differentiate)
            if hidden_gradient is not None:
                hidden_gradient[part] = logits @ weight
            if differentiate and ctx.needs_input_grad[1]:
                # In float32 also where the matrix arrives from other workers in bfloat16.
                product = (logits.T @ inputs).float()
                weight_gradient = (
                    product if weight_gradient is None else weight_gradient.add_(product)
                )
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = head_weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        return hidden_gradient * scale, weight_gradient, None, None, None


@functools.cache
def _compiled_to_gradient() -> Any:
    """On a GPU two fused kernels instead of a dozen passes over the logits."""
    return torch.compile(to_gradient_by_mask, dynamic=False)


def to_gradient_by_mask(logits: torch.Tensor, targets: torch.Tensor, replace: bool) -> torch.Tensor:
    """As `_to_gradient`; without its scatter, for which all logits would be written in float32."""
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    log_probabilities = torch.log_softmax(logits.float(), dim=1)
    if replace:
        counted = (targets != IGNORED)[:, None]
        logits.copy_((log_probabilities.exp() - is_target.float()) * counted)
    return -torch.where(is_target, log_probabilities, 0.0).sum()


def _to_gradient(logits: torch.Tensor, targets: torch.Tensor, replace: bool) -> torch.Tensor:
    """The summed loss of some logits, which their gradient replaces on request."""
    counted = targets != IGNORED
    places = targets.clamp_min(0)[:, None]
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    size = TOKENS_IN_FLOAT32.get(logits.device.type, len(targets))
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        log_probabilities = torch.log_softmax(logits[part].float(), dim=1)
        chosen = log_probabilities.gather(1, places[part])[:, 0]
        loss -= (chosen * counted[part]).sum()
        if replace:
            gradient = log_probabilities.exp_()
            gradient.scatter_add_(1, places[part], gradient.new_full((len(chosen), 1), -1.0))
            logits[part] = gradient.mul_(counted[part, None])
    return loss
