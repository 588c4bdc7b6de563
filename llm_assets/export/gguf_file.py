"""A Hugging Face model as one GGUF file, as llama.cpp, Ollama and LM Studio read it.

llama.cpp's own converter is not in its `gguf` package, which has the format and the names of
tensors. Here are the families whose weights need no more than those names (and for Llama the order
of rotary dimensions, which Hugging Face changed); every other one is refused by name.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

from artifacts.errors import UserError

FAMILIES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
LLAMA_ORDER = (gguf.MODEL_ARCH.LLAMA,)
"""Families whose pairs of rotary dimensions lie side by side in GGUF, and half a head apart in
Hugging Face's weights."""
SPLIT_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (SPLIT_LLAMA_3, "ByteLevel"): "llama-bpe",
    (SPLIT_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"), "ByteLevel"): "qwen2",
}
"""How a text is split before its bytes are merged, to llama.cpp's name of it."""


def write_gguf(folder: Path, target: Path, name: str) -> None:
    """Write a model folder as one file: matrices in 16 bits, vectors in 32, nothing quantized.

    Args:
        folder: a Hugging Face folder with safetensors and tokenizer.json.
        target: the file.
        name: of the model, as programs show it.

    Raises:
        UserError: the model's family, its positions, its attention or its tokenizer has no form
            here that was checked.
    """
    config = json.loads((folder / "config.json").read_text())
    family = _family(folder, config)
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[family], use_temp_file=True)
    writer.add_name(name)
    _write_sizes(writer, family, config)
    _write_tokenizer(writer, folder, config["vocab_size"])
    names = gguf.get_tensor_name_map(family, config["num_hidden_layers"])
    for tensor_name, tensor in _tensors(folder):
        found = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"GGUF has no name for the tensor {tensor_name} of {folder}.")
        values = _as_llama(tensor_name, tensor, config) if family in LLAMA_ORDER else tensor
        kind = gguf.GGMLQuantizationType.F32
        if tensor.ndim > 1:
            kind = _kind(tensor.dtype)
        data = gguf.quants.quantize(values.float().numpy(), kind)
        writer.add_tensor(found, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _family(folder: Path, config: dict[str, Any]) -> Any:
    (architecture,) = config.get("architectures") or [""]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    window = config.get("sliding_window") or math.inf
    obstacle = None
    if architecture not in FAMILIES:
        obstacle = f"it is a {architecture}, and these are known: {', '.join(FAMILIES)}"
    elif rope.get("rope_type", "default") != "default":
        obstacle = f"its positions are scaled ({rope['rope_type']})"
    elif config.get("use_sliding_window", True) and window < config["max_position_embeddings"]:
        obstacle = f"its attention sees {window} tokens back"
    if obstacle:
        raise UserError(
            f"The model in {folder} cannot be written as GGUF here: {obstacle}. Export it with "
            "`--to safetensors`, and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    return FAMILIES[architecture]


def _write_sizes(writer: gguf.GGUFWriter, family: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_vocab_size(config["vocab_size"])
    if family in LLAMA_ORDER:
        writer.add_rope_dimension_count(head_size)


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """The tokens with their kinds, the merges, the special tokens and the chat template."""
    content = json.loads((folder / "tokenizer.json").read_text())
    model = content["model"]
    pre = _pre_tokenizer(content.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or pre not in PRE_TOKENIZERS:
        raise UserError(
            f"The tokenizer in {folder} ({model.get('type')}, {' '.join(pre) or 'no splitting'}) "
            "cannot be written as GGUF here: byte-level BPE of GPT-2, SmolLM, Llama 3 and Qwen 2 "
            "can. Export the model with `--to safetensors`."
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in content.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        special, other = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
        kinds[added["id"]] = special if added["special"] else other
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[pre])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _pre_tokenizer(content: dict[str, Any]) -> tuple[str, ...]:
    """The steps by which a text is split: a regular expression, or a step's name."""
    steps = content.get("pretokenizers") or [content]
    return tuple(step.get("pattern", {}).get("Regex") or step.get("type", "") for step in steps)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                yield name, weights.get_tensor(name)


def _kind(dtype: torch.dtype) -> Any:
    """What was 16 bits stays as it is; 32 bits are rounded as llama.cpp's converter does."""
    is_bfloat16 = dtype == torch.bfloat16
    return gguf.GGMLQuantizationType.BF16 if is_bfloat16 else gguf.GGMLQuantizationType.F16


def _as_llama(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Queries and keys with each rotary pair side by side, shape as before."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(tensor.shape)
