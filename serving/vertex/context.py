"""How long a text an engine can hold: what the model allows, as far as its accelerators' memory."""

import json

from artifacts.errors import UserError
from artifacts.model import bytes_per_token, context_tokens
from artifacts.storage import files

STEP = 256
"""Tokens; lengths are rounded down to a multiple of it."""
SHORTEST = 1024
"""Tokens below which an endpoint is of no use."""


def longest_context(model: str, memory_bytes: int | None) -> int:
    """Tokens of the longest prompt and answer together that an engine has room for.

    Args:
        model: a Hugging Face folder, of this machine or of a bucket.
        memory_bytes: of all accelerators, for weights and cache; None has no limit.

    Raises:
        UserError: the weights leave no room for a text of 1,024 tokens.
    """
    config = json.loads(files.read(f"{model}/config.json"))
    positions = context_tokens(config) or SHORTEST
    if memory_bytes is None:
        return positions
    sizes = files.list_sizes(model)
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    if (config.get("dtype") or config.get("torch_dtype")) == "float32":
        # vLLM loads such weights in half precision, in which it keeps keys and values, too.
        weights //= 2
    room = max(0, memory_bytes - weights)
    fits = room // bytes_per_token(config) // STEP * STEP
    if fits >= positions:
        return positions
    if fits < SHORTEST:
        raise UserError(
            f"The model does not fit: its weights take {weights / 1e9:,.1f} GB of the "
            f"{memory_bytes / 1e9:,.1f} GB that the accelerators have for weights and cache, "
            f"which leaves room for {fits:,} tokens. Ask for a larger "
            "`endpoint.accelerator_type`, or for more `endpoint.accelerator_count`, in the cloud "
            "project's file."
        )
    return int(fits)
