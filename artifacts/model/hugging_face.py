"""Reads a Hugging Face folder into transformers: safetensors alone, and no code of the folder."""

from pathlib import Path
from typing import Any

from artifacts.errors import UserError, first_line


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder; raises UserError naming the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"The tokenizer in {folder} cannot be read: {first_line(error)}") from error


def read_model(folder: Path, model_class: Any, **options: Any) -> Any:
    """A model for inference.

    Args:
        model_class: one of transformers' classes, such as `AutoModelForCausalLM`.
        options: of its `from_pretrained`.

    Raises:
        UserError: the folder holds no model that can be read.
    """
    try:
        model = model_class.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, **options
        )
    except Exception as error:
        # Damaged files surface as errors of safetensors, json, torch or transformers alike.
        raise UserError(f"The model in {folder} cannot be read: {first_line(error)}") from error
    return model.eval()
