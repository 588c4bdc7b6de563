"""Whether keys and values of as many tokens as are asked for can be kept beside the weights."""

from pathlib import Path
from typing import Any

from artifacts.errors import UserError
from artifacts.model_folder import bytes_per_token
from artifacts.reasons import memory_limit
from serving.settings import EndpointSettings

VALUE_BYTES = 2
EXACT_VALUE_BYTES = 4
"""Of a key or a value; the latter where weights are float32."""


def check_memory(folder: Path, config: dict[str, Any], settings: EndpointSettings) -> None:
    """Compare with what processes here may have, before anything is converted or loaded.

    Args:
        folder: the model's, whose weights are counted as they lie there.
        config: its, which says how much one token takes; where it does not, nothing is compared.

    Raises:
        UserError: it cannot; the message says how many tokens can.
    """
    value_bytes = EXACT_VALUE_BYTES if settings.weights == "f32" else VALUE_BYTES
    token_bytes = bytes_per_token(config, value_bytes)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    left = memory_limit() - weights
    if token_bytes * settings.cache_tokens <= left:
        return
    needed = token_bytes * settings.cache_tokens
    raise UserError(
        f"`endpoint.cache_tokens` is {settings.cache_tokens:,}: their keys and values take "
        f"{needed / 1e9:,.1f} GB, and beside the weights ({weights / 1e9:,.1f} GB) this machine "
        f"has {max(left, 0) / 1e9:,.1f} GB. Set at most {max(left, 0) // token_bytes:,}."
    )
