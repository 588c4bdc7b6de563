"""A model's tokenizer without transformers, whose import takes seconds and hundreds of megabytes.

What transformers makes of a folder's many files is written once, beside the converted model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
CHAT_NAME = "chat.json"


@dataclass(frozen=True)
class ServedTokenizer:
    """Text to tokens and back, as a fast tokenizer of transformers does it."""

    backend: Tokenizer
    chat: dict[str, str] = field(default_factory=dict)
    """The `chat_template` and the special tokens that it names; empty where there is none."""

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """From a fast tokenizer of transformers."""
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # By itself, a tokenizer's file may cut and fill what it encodes.
        backend.no_truncation()
        backend.no_padding()
        if not tokenizer.chat_template:
            return cls(backend)
        template = tokenizer.get_chat_template()
        return cls(backend, tokenizer.special_tokens_map | {"chat_template": template})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` wrote."""
        backend = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
        return cls(backend, json.loads((folder / CHAT_NAME).read_text()))

    def write(self, folder: Path) -> None:
        """Add two files to a folder."""
        self.backend.save(str(folder / TOKENIZER_NAME))
        (folder / CHAT_NAME).write_text(json.dumps(self.chat))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, between those that the model begins and ends a text with."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return str(self.backend.decode(tokens, skip_special_tokens=False))
