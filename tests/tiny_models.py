"""Tiny models of random weights, of every architecture that the recipes train."""

from pathlib import Path
from typing import Any

from tests.tiny import save_random_model, tiny_base_model, tiny_sequence_to_sequence_model

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def chat_model(folder: Path) -> None:
    """A random Llama whose tokenizer has a chat template."""
    tiny_base_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def far_model(folder: Path, seed: int = 1) -> None:
    """A random Llama with weights far from zero.

    Its probabilities differ much by the token before; and where only adapters are trained, its
    embeddings are large enough for them to change what it says.
    """
    from transformers import AutoConfig, LlamaForCausalLM

    tiny_base_model(folder)
    config = AutoConfig.from_pretrained(folder, initializer_range=0.2)
    save_random_model(folder, LlamaForCausalLM, config, {}, seed=seed)


def wide_model(folder: Path) -> None:
    """A random Llama whose matrices are blocks of four-bit weights: multiples of 16,384 numbers."""
    from transformers import AutoConfig, LlamaForCausalLM

    tiny_base_model(folder)
    config = AutoConfig.from_pretrained(
        folder, hidden_size=128, intermediate_size=256, num_key_value_heads=4, head_dim=32
    )
    save_random_model(folder, LlamaForCausalLM, config, {})


def far_chat_model(folder: Path) -> None:
    """The same, its tokenizer with a chat template."""
    far_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def gpt2(folder: Path) -> None:
    """A random two-layer GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer, special = _tokenizer(folder)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=256, **special
    )
    save_random_model(folder, GPT2LMHeadModel, config, special)


def opt(folder: Path) -> None:
    """A random two-layer OPT, which has no chat template."""
    from transformers import OPTConfig, OPTForCausalLM

    tokenizer, special = _tokenizer(folder)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **special,
    )
    save_random_model(folder, OPTForCausalLM, config, special)


def encoder_decoder(folder: Path, kind: str = "t5") -> None:
    """A random two-layer T5 or BART."""
    import transformers

    tokenizer, special = _tokenizer(folder)
    special |= {"decoder_start_token_id": special["eos_token_id"]}
    if kind == "t5":
        tiny_sequence_to_sequence_model(folder, folder, initializer_factor=1.0)
        return
    size = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
    size |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    module = {"bart": "Bart", "marian": "Marian"}[kind]
    config = getattr(transformers, f"{module}Config")(
        vocab_size=len(tokenizer), d_model=64, max_position_embeddings=128, **size, **special
    )
    architecture = getattr(
        transformers, {"bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}[kind]
    )
    save_random_model(folder, architecture, config, special)


def encoder(folder: Path, mask: bool = False) -> None:
    """A random two-layer RoBERTa."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    tokenizer, special = _tokenizer(folder)
    if mask:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        tokenizer.save_pretrained(folder)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        **special,
    )
    save_random_model(folder, RobertaForMaskedLM, config, special)


def masked_encoder(folder: Path) -> None:
    """The same, its tokenizer with a mask token."""
    encoder(folder, mask=True)


def _tokenizer(folder: Path) -> tuple[Any, dict[str, int]]:
    from transformers import AutoTokenizer

    tiny_base_model(folder)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    return tokenizer, {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
