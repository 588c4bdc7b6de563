"""Which kind of model a folder holds."""

import json
from pathlib import Path

from artifacts.errors import UserError
from recipes.settings.training import ModelFamily

WANTED = {
    "causal": "causal models (Llama, Qwen, GPT-2 and such)",
    "sequence_to_sequence": "encoder-decoder models (T5, mT5, BART, Marian)",
    "encoder": "encoders (RoBERTa, BERT and such)",
}


def check_family(folder: Path, family: ModelFamily) -> None:
    """Raise UserError where a Hugging Face folder holds a model of another family."""
    found, kind = _family_of(folder)
    if found != family:
        raise UserError(
            f"The recipe trains {WANTED[family]}, but {folder} holds a {kind}, which is none of "
            "them. Choose another `base_model`, or the `checkpoint.recipe` that trains it."
        )


def _family_of(folder: Path) -> tuple[ModelFamily, str]:
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

    raw = json.loads((folder / "config.json").read_text())
    kind = raw["model_type"]
    if raw.get("is_encoder_decoder") or AutoConfig.for_model(kind).is_encoder_decoder:
        return "sequence_to_sequence", kind
    architecture = (raw.get("architectures") or [""])[0]
    if architecture.endswith("ForCausalLM") or raw.get("is_decoder"):
        return "causal", kind
    is_encoder = type(AutoConfig.for_model(kind)) in MODEL_FOR_MASKED_LM_MAPPING
    return "encoder" if is_encoder else "causal", kind
