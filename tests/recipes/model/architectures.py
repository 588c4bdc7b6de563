"""A tiny random model of every causal architecture that transformers can build tiny."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES = [name for name in CONFIG_MAPPING_NAMES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
"""All causal architectures that transformers knows, by name: nothing of them is imported yet."""

VOCABULARY = 96
LARGEST = 3_000_000
"""Parameters of a model that counts as tiny."""

_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim",), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("rotary_dim",), 4),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
_LATENT = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
    *("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"),
)
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in _LATENT},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""What a family needs beside the sizes; None leaves a size out."""


def tiny_config(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """A config of small sizes; raises whatever the class raises at sizes it was not made for."""
    default = kind()
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name == "pad_token_id" or getattr(default, name, None) is not None
    }
    chosen = sizes | _OWN.get(kind.model_type, {}) | changes
    return kind(**{name: value for name, value in chosen.items() if value is not None})


def tiny_kind(kind: str, base_model: Path, folder: Path) -> Path:
    """A model of an architecture with the tokenizer of a base model, whose vocabulary it has."""
    shutil.copytree(base_model, folder)
    vocabulary = json.loads((base_model / "config.json").read_text())["vocab_size"]
    write_tiny(tiny_config(CONFIG_MAPPING[kind], vocab_size=vocabulary), folder)
    return folder


def write_tiny(config: PretrainedConfig, folder: Path, auto: Any = AutoModelForCausalLM) -> None:
    """A model with weights far from their mild start, so that every part of it shows.

    Raises:
        ValueError: the model is not tiny at these sizes.
    """
    with torch.device("meta"):
        sketch = auto.from_config(config)
    if sum(parameter.numel() for parameter in sketch.parameters()) > LARGEST:
        raise ValueError("too large at the sizes given")
    torch.manual_seed(1)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
