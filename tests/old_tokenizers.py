"""Tokenizers in the forms that were published before `tokenizer.json`, trained small."""

import json
from pathlib import Path
from typing import Any

from recipes.model.tokenizer_conversion import SAMPLE
from tests.tiny import tiny_texts

SENTENCEPIECE: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("spiece.model", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
    "mt5": (
        "spiece.model",
        {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "byte_fallback": True},
    ),
    "xlm-roberta": ("sentencepiece.bpe.model", {}),
    "llama": (
        "tokenizer.model",
        {
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_digits": True,
            "allow_whitespace_only_pieces": True,
        },
    ),
}
SENTENCEPIECE["mistral"] = SENTENCEPIECE["llama"]
SENTENCEPIECE["gemma"] = (
    "tokenizer.model",
    SENTENCEPIECE["llama"][1]
    | {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
)
SENTENCEPIECE["deberta-v2"] = (
    "spm.model",
    {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "byte_fallback": True}
    | {f"{name}_piece": f"[{name.upper()}]" for name in ("pad", "unk")}
    | {"bos_piece": "[CLS]", "eos_piece": "[SEP]"},
)
"""Model type to the file's name and how the published one was trained."""
CONFIGURED: dict[str, dict[str, Any]] = {
    "t5": {"tokenizer_class": "T5Tokenizer", "extra_ids": 100},
    "mt5": {"tokenizer_class": "T5Tokenizer", "extra_ids": 0},
    "xlm-roberta": {},
    "deberta-v2": {"do_lower_case": False, "vocab_type": "spm"},
    "llama": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    "mistral": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    "gemma": {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True},
    "opt": {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"),
        "pad_token": "<pad>",
    },
    "gpt2": {},
    "roberta": {},
    "bart": {},
}
"""Model type to the published `tokenizer_config.json`."""


def write_old_tokenizer(folder: Path, kind: str, vocab_size: int = 600) -> int:
    """Write it without `tokenizer.json` and return how many ids it has."""
    from sentencepiece import SentencePieceTrainer
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIGURED[kind]))
    # Two thirds of the sample alone: some letters stay unknown, as some always are.
    texts = [*tiny_texts(60), *SAMPLE[:9]]
    if kind in SENTENCEPIECE:
        name, settings = SENTENCEPIECE[kind]
        with (folder / name).open("wb") as file:
            SentencePieceTrainer.train(
                sentence_iterator=iter(line for text in texts for line in text.splitlines()),
                model_writer=file,
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                minloglevel=2,
                **settings,
            )
        return vocab_size + 102
    tokenizer = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"] if kind == "gpt2" else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(
        texts, vocab_size=vocab_size, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(folder))
    return vocab_size
