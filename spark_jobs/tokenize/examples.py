"""Examples of a task as tokens, with a mark on those that are learnt to be written.

- A conversation is rendered by the model's chat template, or plainly, turn by turn, each part
  tokenized by itself as the endpoint does it: what is learnt are the assistant's turns.
- A pair is its input, as the model's tokenizer encodes a text, and then its target.
- A prompt with two answers is the conversation that ends with the chosen one, and then the one
  that ends with the rejected one. These answers are marked, so each ends where its marks do.
- A labeled text is the text encoded alike, and then the number of its class in place of a token.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.errors import UserError
from artifacts.examples import Example, Form
from spark_jobs.runtime.parquet import Part
from spark_jobs.settings import ExampleSettings
from spark_jobs.tokenize.tokenizer import TokenizerFiles

TOO_LONG, SPECIAL = "too_long", "holds_special_token"
"""Reasons why an example is left out."""

MarkedTokens = tuple[list[int], bool]
"""Tokens, and whether they are learnt."""


@dataclass(frozen=True)
class TokenizedExample:
    """One example, or why it is left out."""

    tokens: np.ndarray
    is_target: np.ndarray
    """bool, shape (tokens,)."""
    was_cut: bool = False
    left_out: str | None = None

    @classmethod
    def none(cls, reason: str) -> "TokenizedExample":
        """An example that is left out."""
        return cls(np.empty(0, np.int64), np.empty(0, bool), left_out=reason)


@dataclass
class ExampleTokenizer:
    """Turns examples of one form into tokens."""

    files: TokenizerFiles
    form: Form
    settings: ExampleSettings
    row_tokens: int
    """Most tokens of an example; of two answers, one may have half of them."""
    end_token_id: int
    labels: tuple[str, ...] = ()

    def encode(self, example: Example, name: str) -> TokenizedExample:
        """The example's tokens; raises UserError naming one that is too long, where so set."""
        if self.form == "conversations":
            return self._conversation(example["messages"], name, self.row_tokens)
        if self.form == "preferences":
            return self._preference(example, name)
        return self._input_and_target(example, name)

    def _preference(self, example: Example, name: str) -> TokenizedExample:
        found = []
        for key in ("chosen", "rejected"):
            messages = [*example["prompt"], {"role": "assistant", "content": example[key]}]
            one = self._conversation(messages, f"{name}, {key}", self.row_tokens // 2)
            if one.left_out:
                return one
            # Earlier answers are part of the prompt.
            answer = np.arange(len(one.tokens)) > np.flatnonzero(~one.is_target)[-1]
            found.append(replace(one, is_target=answer))
        chosen, rejected = found
        cut_alike = np.array_equal(chosen.tokens, rejected.tokens)
        if cut_alike or not (chosen.is_target.any() and rejected.is_target.any()):
            return TokenizedExample.none(TOO_LONG)
        return TokenizedExample(
            np.concatenate([chosen.tokens, rejected.tokens]),
            np.concatenate([chosen.is_target, rejected.is_target]),
            chosen.was_cut or rejected.was_cut,
        )

    def _conversation(
        self, messages: list[dict[str, str]], name: str, limit: int
    ) -> TokenizedExample:
        if any(self._holds_special(message["content"]) for message in messages):
            return TokenizedExample.none(SPECIAL)
        parts = list(
            self._chat(messages) if self.settings.template == "chat" else self._plain(messages)
        )
        tokens = np.array([token for part, _ in parts for token in part], np.int64)
        is_target = np.repeat([learnt for _, learnt in parts], [len(part) for part, _ in parts])
        if len(tokens) <= limit:
            return TokenizedExample(tokens, is_target)
        if self.settings.too_long == "refuse":
            key = f"`tokenized_shards.sequence_length` ({limit})"
            raise self._refusal(name, f"{len(tokens)} tokens", key)
        tokens, is_target = tokens[:limit], is_target[:limit]
        if self.settings.too_long == "drop" or not is_target.any():
            # Cut to its first tokens, nothing would be left of the answers.
            return TokenizedExample.none(TOO_LONG)
        return TokenizedExample(tokens, is_target, was_cut=True)

    def _chat(self, messages: list[dict[str, str]]) -> Iterator[MarkedTokens]:
        shown = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], True)
            whole = self._render(messages[: number + 1], False)
            if not prompt.startswith(shown) or not whole.startswith(prompt):
                raise UserError(
                    "The base model's chat template changes earlier turns when a turn is added, so "
                    "the answers in a conversation cannot be told from the rest. Give another in "
                    "`tokenized_shards.examples.chat_template`."
                )
            yield self._ids(prompt[len(shown) :]), False
            yield self._ids(whole[len(prompt) :]), True
            shown = whole

    def _render(self, messages: list[dict[str, str]], prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._template.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
        except TemplateError as error:
            raise UserError(
                f"The base model's chat template refuses a conversation with the roles "
                f"{', '.join(message['role'] for message in messages)}: {error}"
            ) from error
        return text

    def _plain(self, messages: list[dict[str, str]]) -> Iterator[MarkedTokens]:
        pending = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                pending += message["content"] + "\n"
                continue
            first = not any(m["role"] == "assistant" for m in messages[:number])
            yield self._tokenizer.encode(pending, add_special_tokens=first).ids, False
            yield [*self._ids(message["content"]), self.end_token_id], True
            pending = ""

    def _input_and_target(self, example: Example, name: str) -> TokenizedExample:
        labeled = self.form == "labeled"
        given = example["text"] if labeled else self.settings.input_prefix + example["input"]
        inputs = self._within(given, self.settings.input_tokens, name, "input")
        target: tuple[list[int], bool] | None
        if labeled:
            target = [self.labels.index(example["label"])], False
        else:
            target = self._within(example["target"], self.settings.target_tokens, name, "target")
        if inputs is None or target is None:
            return TokenizedExample.none(TOO_LONG)
        tokens = np.array([*inputs[0], *target[0]], np.int64)
        is_target = np.arange(len(tokens)) >= len(inputs[0])
        return TokenizedExample(tokens, is_target, was_cut=inputs[1] or target[1])

    def _within(self, text: str, limit: int, name: str, what: str) -> tuple[list[int], bool] | None:
        """A text's tokens as the model wants them, cut if it may be, and whether it was."""
        ids = list(self._tokenizer.encode(text).ids)
        if what == "target" and ids[-1:] != [self.end_token_id]:
            ids.append(self.end_token_id)
        if len(ids) <= limit:
            return ids, False
        if self.settings.too_long == "refuse":
            key = f"`tokenized_shards.examples.{what}_tokens` ({limit})"
            raise self._refusal(name, f"an {what} of {len(ids)} tokens", key)
        if self.settings.too_long == "drop":
            return None
        last = ids[-1]
        return [*ids[: limit - 1], last] if last in self.files.specials.values() else ids[
            :limit
        ], True

    @staticmethod
    def _refusal(name: str, found: str, limit: str) -> UserError:
        return UserError(
            f"Example {name!r} has {found}, more than {limit}. Raise that, or set "
            "`tokenized_shards.examples.too_long` to cut or drop."
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _holds_special(self, text: str) -> bool:
        return any(token in text for token in self.files.specials)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.files.original)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def _template(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            chat_template=self.settings.chat_template or self.files.chat_template,
            bos_token=self.files.bos_token,
            eos_token=self.files.eos_token,
        )


def check_template(files: TokenizerFiles, settings: ExampleSettings) -> None:
    """Raise UserError where conversations need a chat template and there is none."""
    if settings.template == "chat" and not (settings.chat_template or files.chat_template):
        raise UserError(
            "The base model's tokenizer has no chat template. Give one in "
            "`tokenized_shards.examples.chat_template`, or set "
            "`tokenized_shards.examples.template: plain`."
        )


def find_labels(parts: list[Part], wanted: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The classes in the order of their numbers, and the training examples of each.

    Args:
        wanted: the classes that there may be; where empty, those that occur, sorted.

    Raises:
        UserError: a class is none of those, has a single example, or none to train on; or there is
            only one class.
    """
    table = pa.concat_tables([part.read(["label", "split"]) for part in parts])
    pairs = zip(table["label"].to_pylist(), table["split"].to_pylist(), strict=True)
    counts = Counter((label, split) for label, split in pairs if label is not None)
    everywhere: Counter[str] = Counter()
    for (label, _), count in counts.items():
        everywhere[label] += count
    if wanted and (unknown := sorted(everywhere.keys() - set(wanted))):
        raise UserError(
            f"{everywhere[unknown[0]]:,} examples have the class {unknown[0]!r}, which is none of "
            f"`tokenized_shards.examples.labels` ({', '.join(wanted)}). Add it there, or correct "
            "the examples."
        )
    labels = tuple(wanted) or tuple(sorted(everywhere))
    for label in labels:
        if not counts[label, "train"] or everywhere[label] < 2:
            raise UserError(
                f"The class {label!r} has {everywhere[label]} examples, "
                f"{counts[label, 'train']} of them to train on: nothing can be learnt of it. Give "
                "more examples of it, or leave the class out."
            )
    if len(labels) < 2:
        raise UserError(
            f"All examples have the class {labels[0]!r}; it takes two classes to tell apart."
        )
    return labels, [counts[label, "train"] for label in labels]
