"""Hugging Face folders in the form that transformers 4, and what is built on it, reads too.

transformers 5 writes a tokenizer's class and a model's rotary embedding under new names. Version 4
refuses the one and takes the default for the other without a word: another model. Version 5 reads
both forms (its migration guide, and `standardize_rope_params` of its configurations).
"""

import json
from pathlib import Path
from typing import Any

TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Class as transformers 5 names it, to its name in both versions."""


def write_older_names(folder: Path) -> None:
    """Add to a folder's `config.json` and `tokenizer_config.json` what transformers 4 looks for."""
    _change(folder / "config.json", older_config)
    _change(folder / "tokenizer_config.json", older_tokenizer)


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with its rotary embedding and precision under their older names as well.

    Embeddings that differ between kinds of layers stay as they are.
    """
    names: dict[str, Any] = {}
    if "dtype" in config:
        names["torch_dtype"] = config["dtype"]
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        names["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            names["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        if "partial_rotary_factor" in rope:
            names["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return config | names


def older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's config whose class and special tokens both versions know."""
    changed = dict(config)
    known = str(config.get("tokenizer_class"))
    if known in TOKENIZER_CLASSES:
        changed["tokenizer_class"] = TOKENIZER_CLASSES[known]
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):
        changed["additional_special_tokens"] = extra
        del changed["extra_special_tokens"]
    return changed


def _change(path: Path, change: Any) -> None:
    if path.exists():
        before = json.loads(path.read_text())
        after = change(before)
        if after != before:
            path.write_text(json.dumps(after, indent=2))
