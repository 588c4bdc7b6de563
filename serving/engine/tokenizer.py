"""A model's tokenizer without transformers, whose import takes seconds and hundreds of megabytes.

What transformers makes of a folder's many files is written once, beside the converted model.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
CHAT_NAME = "chat.json"


@dataclass(frozen=True)
class ChatTemplate:
    """How a model writes a chat."""

    source: str
    """In Jinja's language."""
    special_tokens: dict[str, str]
    """By the names that the template knows them by, such as `bos_token`."""


@dataclass(frozen=True)
class ServedTokenizer:
    """Text to tokens and back, as a fast tokenizer of transformers does it."""

    backend: Tokenizer
    chat: ChatTemplate | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """From a fast tokenizer of transformers."""
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # By itself, a tokenizer's file may cut and fill what it encodes.
        backend.no_truncation()
        backend.no_padding()
        if not tokenizer.chat_template:
            return cls(backend)
        source = tokenizer.get_chat_template()
        return cls(backend, ChatTemplate(source, tokenizer.special_tokens_map))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` wrote."""
        backend = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
        said = json.loads((folder / CHAT_NAME).read_text())
        return cls(backend, said and ChatTemplate(**said))

    def write(self, folder: Path) -> None:
        """Add two files to a folder."""
        self.backend.save(str(folder / TOKENIZER_NAME))
        (folder / CHAT_NAME).write_text(json.dumps(self.chat and asdict(self.chat)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, between those that the model begins and ends a text with."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return str(self.backend.decode(tokens, skip_special_tokens=False))
