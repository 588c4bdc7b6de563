"""Whether a model computes on packed rows exactly what it computes by itself.

Two short documents go through the model in one row and, one at a time, the way Hugging Face runs
it. Architectures are too many, and change too often, to be known by name; this is the guard that
refuses those whose documents would see each other (state-space, convolutional and recurrent
layers), or whose loss would be another than Hugging Face's.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from artifacts.errors import UserError, first_line
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch
from recipes.model.causal_model import TransformersNetwork

SHORT = 18
"""Tokens of both documents together where no row length is known yet."""
PADDING = 3
REPEATS = 16
"""Copies of a short row in one batch; chance would treat some of them otherwise."""
TOLERANCE = 1e-3
"""Largest difference of two logits that should be equal, as a share of their spread."""
EXACT_TOLERANCE = 1e-4
"""The same where one document's tokens, or chance, should make no difference at all."""
MOST = 0.98
"""Share of a long row's positions that have to agree: float noise sends one token in some thousand
to another expert, while a window or sparse attention changes nearly all."""
LARGE = 100.0
"""Spread of logits at which soft-capping, scaling and head layers cannot hide."""


class _CannotTrain(Exception):
    """What keeps the model from being trained."""


def check_trainable(network: TransformersNetwork, row_length: int = SHORT + PADDING) -> None:
    """Raise UserError for a model whose loss on packed rows is not its own, or that is damaged.

    Leaves the network, in float32, knowing whether its head is plain, with what its loss does not
    reach frozen. Windows and sparse attention show only in rows as long as those to come.
    """
    _check_numbers(network)
    device = network.head_weight.device
    try:
        # The probe's draws leave the random numbers of the run as they are.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            _check_chance(network)
            _check_documents(network, SHORT, 1.0)
            if row_length > SHORT + PADDING:
                _check_documents(network, row_length - PADDING, MOST)
            _freeze_unused(network)
    except _CannotTrain as fault:
        reason = str(fault)
    except Exception as error:
        error_text = f"{type(error).__name__}: {first_line(error)}"
        reason = f"transformers cannot run it on packed rows ({error_text})"
    else:
        return
    name = type(network.inner).__name__
    raise UserError(
        f"`base_model`: the architecture {name} cannot be trained here: {reason}. Choose a model "
        "that attends to earlier tokens alone, such as one of the Llama, Qwen, Mistral, Gemma, "
        "GPT-2 or Phi families."
    )


def _check_numbers(network: TransformersNetwork) -> None:
    """Refuse damaged weights, whose logits would look like those of an odd architecture."""
    for name, parameter in network.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(
                f"`base_model`: {name.removeprefix('inner.')} holds values that are not a number: "
                "the weights are damaged. Fetch the model again."
            )


@torch.no_grad()
def _check_chance(network: TransformersNetwork) -> None:
    row = _pack(_draw(network, SHORT // 2), _draw(network, SHORT // 2))
    copies = Batch(*(part.expand(REPEATS, -1).contiguous() for part in vars(row).values()))
    logits = network.train().logits(copies).float()
    # `not <=` rather than `>`, here and below, since NaN has to fail.
    if not _distance(logits, logits[:1]) <= EXACT_TOLERANCE * float(logits.std()):
        raise _CannotTrain(
            "its forward pass is random in training (a router's jitter, for instance: if its "
            "config.json has `router_jitter_noise`, set that to 0)"
        )


def _check_documents(network: TransformersNetwork, count: int, share: float) -> None:
    cut = count * 3 // 5
    first, second = _draw(network, cut), _draw(network, count - cut)
    row = _pack(first, second)
    with torch.no_grad():
        # Apart as Hugging Face evaluates them, together as we train: a dropout left on shows.
        network.eval()
        apart = [network.inner(input_ids=document).logits[0] for document in (first, second)]
        expected = torch.cat(apart).float()
        network.train()
        logits = network.logits(row)[0, :count].float()
        # The second document after another first one, which must change nothing about it.
        other_logits = network.logits(_pack(_draw(network, cut), second))[0, cut:count]
    spread = float(expected.std())
    if not _distance(other_logits, logits[cut:], share) <= EXACT_TOLERANCE * spread:
        raise _CannotTrain(
            "documents packed into one row see each other, as in state-space, convolutional and "
            "recurrent layers"
        )
    if not _distance(logits, expected, share) <= TOLERANCE * spread:
        raise _CannotTrain(
            "in a packed row its logits differ from those of each document by itself"
        )
    network.has_plain_head = _has_plain_head(network, row)
    _compare_losses(network, row, first, second)


def _compare_losses(
    network: TransformersNetwork, row: Batch, first: torch.Tensor, second: torch.Tensor
) -> None:
    """Our summed loss of the row must be the sum of Hugging Face's means, times their targets."""
    expected = 0.0
    with torch.no_grad():
        for document in (first, second):
            mean = network.inner(input_ids=document, labels=document).loss
            expected += float(mean) * (document.shape[1] - 1)
    loss = network.loss(row)
    if network.has_router_loss:
        loss = loss + network.router_loss(row)
    ours = float(loss.detach())
    if not abs(ours - expected) <= TOLERANCE * abs(expected):
        raise _CannotTrain(
            f"its own loss is {expected:.4f} where the cross-entropy of its logits is {ours:.4f}"
        )
    network.zero_grad(set_to_none=True)
    # `_freeze_unused` looks at which parameters have a gradient now.
    loss.backward()


def _freeze_unused(network: TransformersNetwork) -> None:
    """Freeze what the last loss did not reach, such as a pooler: no optimizer state would exist."""
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    network.zero_grad(set_to_none=True)


@torch.no_grad()
def _has_plain_head(network: TransformersNetwork, row: Batch) -> bool:
    """Whether logits are the last hidden states times the output matrix, and nothing else.

    Hidden states that we choose, large enough for any cap to bite, are put in the place of the
    model's own.
    """
    inner, head = network.inner, network.inner.get_output_embeddings()
    body = inner.base_model
    # Not `isinstance`: a subclass may compute more than the product.
    if body is inner or type(head) is not nn.Linear or head.bias is not None:
        return False
    within = {id(parameter) for parameter in body.parameters()} | {id(head.weight)}
    # Any other parameter, such as that of another layer of the head, may change the logits.
    if any(id(parameter) not in within for parameter in inner.parameters()):
        return False
    hidden = torch.randn(*row.tokens.shape, head.in_features, device=row.tokens.device)
    hidden *= LARGE / F.linear(hidden, head.weight).std()

    def replace(module: nn.Module, arguments: object, output: dict[str, torch.Tensor]) -> object:
        if output["last_hidden_state"].shape != hidden.shape:
            raise _CannotTrain("its last hidden states have another shape than its output matrix")
        output["last_hidden_state"] = hidden
        return output

    hook = body.register_forward_hook(replace)
    try:
        logits = network.logits(row)
    finally:
        hook.remove()
    expected = F.linear(hidden, head.weight)
    return bool(_distance(logits, expected) <= EXACT_TOLERANCE * LARGE)


def _distance(left: torch.Tensor, right: torch.Tensor, share: float = 1.0) -> float:
    """The largest difference of two logits, in that share of the positions that differs least."""
    differences = (left.float() - right.float()).abs().amax(dim=-1).flatten().sort().values
    return float(differences[math.ceil(share * len(differences)) - 1])


def _draw(network: TransformersNetwork, length: int) -> torch.Tensor:
    """Random tokens of shape (1, length), special ones at the vocabulary's beginning left out."""
    size, device = network.head_weight.shape[0], network.head_weight.device
    return torch.randint(min(8, size - 1), size, (1, length), device=device)


def _pack(first: torch.Tensor, second: torch.Tensor) -> Batch:
    """One row of both documents and some padding, as packed rows come from the shards."""
    parts = (first[0], second[0], first.new_zeros(PADDING))
    numbers = (0, 1, PADDING_SEGMENT)
    segments = [torch.full_like(part, n) for n, part in zip(numbers, parts, strict=True)]
    positions = [torch.arange(len(part), device=part.device) for part in parts[:2]]
    targets = [F.pad(part[1:], (0, 1), value=IGNORED) for part in parts[:2]]
    rows = (parts, [*targets, parts[2] + IGNORED], [*positions, parts[2]], segments)
    return Batch(*(torch.cat(row)[None] for row in rows))
