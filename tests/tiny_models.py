"""Tiny models of random weights, of every architecture that the recipes train."""

from pathlib import Path
from typing import Any

from tests.tiny import save_random_model, tiny_base_model, tiny_sequence_to_sequence_model

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def chat_model(folder: Path) -> None:
    """A random Llama whose tokenizer has a chat template."""
    tiny_base_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def far_model(folder: Path) -> None:
    """A random Llama with weights far from zero.

    Its probabilities differ much by the token before; and where only adapters are trained, its
    embeddings are large enough for them to change what it says.
    """
    _resize(folder, 1, initializer_range=0.2)


def wide_model(folder: Path) -> None:
    """A random Llama whose matrices are blocks of four-bit weights: multiples of 16,384 numbers."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    _resize(folder, 0, **sizes, num_key_value_heads=4, head_dim=32)


def far_chat_model(folder: Path) -> None:
    """The far one, its tokenizer with a chat template."""
    far_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def gpt2(folder: Path) -> None:
    """A random two-layer GPT-2."""
    _write(folder, "GPT2", "LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=256)


def opt(folder: Path) -> None:
    """A random two-layer OPT, which has no chat template."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    _write(folder, "OPT", "ForCausalLM", **LAYERS, **sizes, max_position_embeddings=256)


def encoder_decoder(folder: Path, kind: str = "t5") -> None:
    """A random two-layer T5, BART or Marian."""
    if kind == "t5":
        tiny_base_model(folder)
        (folder / "model.safetensors").unlink()
        tiny_sequence_to_sequence_model(folder, folder, initializer_factor=1.0)
        return
    size = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "d_model": 64}
    size |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    size |= {"max_position_embeddings": 128}
    names = {"bart": ("Bart", "ForConditionalGeneration"), "marian": ("Marian", "MTModel")}
    _write(folder, *names[kind], special=(*SPECIAL, "decoder_start_token_id"), **size)


def encoder(folder: Path, mask: bool = False) -> None:
    """A random two-layer RoBERTa."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    _write(folder, "Roberta", "ForMaskedLM", mask=mask, **LAYERS, **sizes, initializer_range=0.1)


def masked_encoder(folder: Path) -> None:
    """The same, its tokenizer with a mask token."""
    encoder(folder, mask=True)


def _resize(folder: Path, seed: int, **changes: Any) -> None:
    """A random Llama with another config."""
    from transformers import AutoConfig, LlamaForCausalLM

    tiny_base_model(folder)
    config = AutoConfig.from_pretrained(folder, **changes)
    save_random_model(folder, LlamaForCausalLM, config, {}, seed)


def _write(
    folder: Path,
    family: str,
    head: str,
    special: tuple[str, ...] = SPECIAL,
    mask: bool = False,
    **config: Any,
) -> None:
    """A random model by how transformers calls its family and what it does, with a tokenizer."""
    import transformers
    from transformers import AutoTokenizer

    tiny_base_model(folder)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = dict.fromkeys(special, tokenizer.eos_token_id)
    if mask:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        tokenizer.save_pretrained(folder)
    architecture = getattr(transformers, f"{family}{head}")
    made = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **config, **ends)
    save_random_model(folder, architecture, made, ends)
