"""Whether a model has positions for rows of some length; importing this loads no torch."""

from typing import Any

from artifacts.errors import UserError

POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""How the families' configs call the number of positions."""


def check_row_length(length: int, config: dict[str, Any]) -> None:
    """Refuse rows that the model of a `config.json` cannot take whole.

    Raises:
        UserError: the rows are longer than its positions or its sliding window.
    """
    config = config | config.get("text_config", {})
    positions = next((config[key] for key in POSITION_KEYS if config.get(key)), None)
    if positions and length > positions:
        raise UserError(
            f"Rows of {length} tokens are longer than the {positions} positions of the base model. "
            "Set a smaller `tokenized_shards.sequence_length`."
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and length > window:
        raise UserError(
            f"Rows of {length} tokens are longer than the base model's sliding window of {window}, "
            "which training does not apply. Set `tokenized_shards.sequence_length` to at most "
            f"{window}."
        )
