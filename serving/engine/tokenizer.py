"""A model's tokenizer without transformers, whose import takes seconds and hundreds of megabytes.

What transformers makes of a folder's many files is written once, beside the converted model. A chat
becomes the tokens of a prompt, in which what was said in a turn stays text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer

from serving.engine.protocol import Message

TOKENIZER_NAME = "tokenizer.json"
CHAT_NAME = "chat.json"
FIRST_MARK = 0xE000
"""Of the characters for private use; one that no turn holds stands around what must stay text."""


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
        # As a batch of one: by itself, the encoding of a text lets no other thread run meanwhile.
        (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return str(self.backend.decode(tokens, skip_special_tokens=False))


class ChatEncoder:
    """Renders turns with a model's own template.

    A control token that stands in a turn, such as the one that begins an assistant's turn, would
    let whoever wrote it forge a conversation. It is encoded as the characters that it is written
    with, as any other text, unless that was allowed.
    """

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._backend, self._template = tokenizer.backend, tokenizer.chat
        self._plain: Tokenizer = Tokenizer.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        self._control = {
            number
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, turns: Sequence[Message], allow_role_tokens: bool) -> list[int]:
        """The prompt's tokens; raises TemplateError where there is no template, or it refuses."""
        if not self._template:
            raise TemplateError("the model has no chat template; use completions")
        # The part of transformers that needs no torch, read at the first chat.
        from transformers.utils.chat_template_utils import render_jinja_template

        said = "".join(turn.content for turn in turns)
        mark = chr(next(number for number in range(FIRST_MARK, 0xF900) if chr(number) not in said))
        contents = [
            turn.content if allow_role_tokens else self._marked(turn.content, mark)
            for turn in turns
        ]
        chat = [turn.model_dump() | {"content": c} for turn, c in zip(turns, contents, strict=True)]
        (text,), _ = render_jinja_template([chat], add_generation_prompt=True, **self._template)
        parts = text.split(mark)
        if len(parts) - 1 != sum(content.count(mark) for content in contents):
            raise TemplateError("its template does not keep control tokens of a turn")
        # What stands between two marks is every second part.
        encoders = (self._backend, self._plain)
        encoded: list[int] = []
        for number, part in enumerate(parts):
            (found,) = encoders[number % 2].encode_batch_fast([part], add_special_tokens=False)
            encoded += found.ids
        return encoded

    def _marked(self, content: str, mark: str) -> str:
        """The content with a mark before and after each control token."""
        (found,) = self._backend.encode_batch([content], add_special_tokens=False)
        spans = [
            span
            for number, span in zip(found.ids, found.offsets, strict=True)
            if number in self._control
        ]
        for start, end in reversed(spans):
            content = f"{content[:start]}{mark}{content[start:end]}{mark}{content[end:]}"
        return content
