"""What a training takes of the memory of each of its GPUs, by a reckoning.

It decides whether activations are kept, refuses what cannot fit before anything is read, and says
what took the memory where it ran out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artifacts.errors import UserError
from recipes.model.decoder.loss import TOKENS_IN_FLIGHT
from recipes.model.decoder.network import DECODER_MODEL_TYPES
from recipes.settings import PlacementSettings, TrainingSettings

USABLE = 0.85
"""Of a GPU's memory; CUDA itself, buffers of messages and gaps between tensors take the rest."""
EAGER = 2
"""Times what a compiled decoder keeps that a model of transformers does."""
MOST_WORKERS = 1024


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each GPU."""

    state: float
    """Weights, gradients and the optimizer's moments, in float32, divided over the workers."""
    copies: float
    """Weights in the type that they are multiplied in; of several workers, those of two layers and
    of the embeddings."""
    logits: float
    """Those that exist at once, and the gradient of the output matrix."""
    activations: float
    """What the backward pass needs of the forward pass."""
    recomputed: float
    """The same where only the inputs of layers are kept."""

    def total(self, keeps: bool) -> float:
        """The sum, with activations kept or computed twice."""
        kept = self.activations if keeps else self.recomputed
        return self.state + self.copies + self.logits + kept

    def described(self, keeps: bool) -> str:
        """The parts in words, the largest first."""
        parts = {
            "weights, gradients and optimizer state": self.state,
            "weights as they are multiplied": self.copies,
            "logits": self.logits,
            "activations": self.activations if keeps else self.recomputed,
        }
        ordered = sorted(parts, key=lambda name: -parts[name])
        return ", ".join(f"{name} {parts[name] / 1e9:,.1f} GB" for name in ordered)


def training_memory(
    config: Any,
    training: TrainingSettings,
    parameters: int,
    trained: int,
    tokens: int,
    workers: int,
) -> TrainingMemory:
    """What one of `workers` holds.

    Args:
        config: a transformers config of the model.
        parameters: all of them.
        trained: those that are not frozen.
        tokens: of one forward pass.
    """
    text = config.get_text_config()
    layers, hidden, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    keys, times = hidden, EAGER
    if text.model_type in DECODER_MODEL_TYPES:
        head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
        keys, times = text.num_key_value_heads * head_dim, 1
    width = 4 if training.precision == "float32" else 2
    moments = 2 if training.optimizer.name == "adamw" else 1
    in_flight, degree = min(tokens, TOKENS_IN_FLIGHT["cuda"]), training.placement.tensor_parallel
    divided = max(workers // training.placement.replicas, 1)
    embeddings = vocabulary * hidden * (1 if text.tie_word_embeddings else 2)
    copied = parameters if width == 2 else 0
    if divided > degree:
        copied = embeddings + 2 * max(parameters - embeddings, 0) // layers
    # Of each token and layer in float32 the residual stream, twice; in the type of the products
    # what both norms, the queries and the attention give, keys and values, and three times the
    # inner feed-forward.
    products = width * (4 * hidden + 2 * keys + 3 * inner) / degree
    of_a_layer = tokens * times * (8 * hidden + products)
    # Where the tokens take several turns, a product is added to the sum in float32.
    product = width + (8 if tokens > in_flight else 4 * (width < 4))
    logits = vocabulary * (width * in_flight / degree + product * hidden)
    return TrainingMemory(
        state=((8 + 4 * moments) * trained + 4 * (parameters - trained)) / divided,
        copies=width * copied / degree,
        logits=logits,
        activations=layers * of_a_layer,
        # Logits are gone when the last layer is computed again.
        recomputed=layers * tokens * 4 * hidden + max(of_a_layer - logits, 0),
    )


def check_memory(
    reckon: Callable[[int, int], TrainingMemory],
    placement: PlacementSettings,
    row_tokens: int,
    workers: int,
    memory: float,
) -> None:
    """Refuse a training that fits GPUs of so many bytes in no way of computing it.

    Args:
        reckon: `training_memory` of tokens and workers.
        row_tokens: of one row.

    Raises:
        UserError: naming what takes the memory, and what helps, the cheapest first.
    """
    rows = placement.device_batch_size
    needed = reckon(rows * row_tokens, workers)
    if needed.total(keeps=False) <= memory:
        return

    def fits(rows: int, workers: int) -> bool:
        return reckon(rows * row_tokens, workers).total(keeps=False) <= USABLE * memory

    fewer = next((n for n in range(rows - 1, 0, -1) if fits(n, workers)), None)
    doubled = (workers << n for n in range(1, MOST_WORKERS.bit_length()))
    more = next((n for n in doubled if fits(1, n)), None)
    remedy = "Shorten `tokenized_shards.sequence_length`, or choose a smaller `base_model`."
    if fewer:
        remedy = f"Set `checkpoint.placement.device_batch_size` to {fewer}."
    elif more:
        remedy = (
            f"It fits {more} workers with `checkpoint.placement.device_batch_size` at 1; fewer do "
            "with `checkpoint.lora`, which trains adapters alone."
        )
    raise UserError(
        f"This training does not fit a GPU of {memory / 1e9:,.0f} GB: on each of {workers} "
        f"worker(s), with `checkpoint.placement.device_batch_size` at {rows}, it takes "
        f"{needed.total(keeps=False) / 1e9:,.0f} GB even where activations are computed twice "
        f"({needed.described(keeps=False)}). {remedy}"
    )
