"""Tokenizes documents with gigatoken or Hugging Face tokenizers, with equal results.

Special-token strings inside a document are plain text: they are spelled out, never turned into the
special token. Start and end of a document follow the model family:

- The end is the family's document separator, where its vocabulary has one (`<|endoftext|>`,
  `<|end_of_text|>`, `</s>`, `<eos>`), else the tokenizer's own EOS. A chat model's EOS, which ends
  a turn (`<|im_end|>`, `<|eot_id|>`), is not the end of a document.
- The start is the family's BOS, unless that is a chat mark (`<|im_start|>`); families without a
  BOS (GPT-2, SmolLM2, Qwen2) begin a document with the separator.

Both can be set by hand (`tokenized_shards.start_token`, `.end_token`).

gigatoken is used if it agrees with Hugging Face on a sample of the texts.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic_core import to_json

from artifacts.cache import cache_key, cached
from artifacts.errors import UserError
from artifacts.examples import Example, Form
from artifacts.model import byte_letters, fitting_vocab_size
from artifacts.numbers import ends_of
from artifacts.shards.format import in_split
from artifacts.storage import files
from spark_jobs.runtime.parquet import Part
from spark_jobs.settings import ExampleSettings
from spark_jobs.tokenize.survey import Mixing

Engine = Literal["gigatoken", "hugging_face"]

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
DOCUMENT_STARTS = ("<|begin_of_text|>", "<s>", "<bos>")
BERT_ENDS = ("[CLS]", "[SEP]")
"""Around each text in BERT and its like, whose tokenizers name no token of a text's end."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What is read of a model folder; small enough to be sent to every task."""

    definition: str
    """`tokenizer.json`, with its special tokens taken out so that they are plain text."""
    original: str
    """`tokenizer.json` as it is on disk."""
    sha256: str
    """Of `tokenizer.json` as it is on disk."""
    chat_template: str | None
    specials: dict[str, int]
    """Special token to id."""
    bos_token: str | None
    eos_token: str | None
    vocab_size: int
    """The model's, from `config.json`; without one, the tokenizer's largest id plus one."""
    absent_letters: tuple[str, ...]
    """Byte-level letters that the vocabulary lacks, so that their bytes vanish from every text."""
    first_absent_id: int
    """The first id past all that the tokenizer gives."""
    gigatoken_definition: str
    """The definition with an entry for every byte, which gigatoken needs: the absent letters get
    ids past the vocabulary, and `encode` removes these again, as Hugging Face does silently."""

    def plain_tokenizer(self) -> Any:
        """A tokenizer for which special tokens are plain text."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.definition)

    def start_and_end(self, start: str | None, end: str | None) -> tuple[int, int]:
        """The ids put around each document; `start` and `end` override the family's rule.

        Raises:
            UserError: a token named by hand is unknown, or the family has no end token.
        """
        usual = self.eos_token or (BERT_ENDS[1] if BERT_ENDS[1] in self.specials else None)
        separator = next((token for token in SEPARATORS if token in self.specials), usual)
        if end is None and separator is None:
            raise UserError(
                "The base model's tokenizer has no end-of-document token. Name one in "
                "`tokenized_shards.end_token`."
            )
        end = end or separator
        if start is None and end == BERT_ENDS[1] and BERT_ENDS[0] in self.specials:
            start = BERT_ENDS[0]
        start = start or (self.bos_token if self.bos_token in DOCUMENT_STARTS else separator)
        return self._id(start or end, "start_token"), self._id(end, "end_token")

    def _id(self, token: str | None, key: str) -> int:
        if token not in self.specials:
            names = ", ".join(list(self.specials)[:8])
            raise UserError(
                f"`tokenized_shards.{key}` {token!r} is not a special token of the base model; "
                f"its special tokens are {names}."
            )
        return self.specials[token]


def load_tokenizer(url: str) -> TokenizerFiles:
    """Read a Hugging Face model folder's tokenizer, local or `gs://`.

    Raises:
        UserError: no `tokenizer.json` is there, or its ids go past the model's vocabulary.
    """
    content = files.find(f"{url}/tokenizer.json")
    if content is None:
        raise UserError(
            f"{url} holds no tokenizer.json. Materialize `base_model` again, or name a model that "
            "has a fast tokenizer."
        )
    definition = json.loads(content)
    added = definition.get("added_tokens") or []
    specials = {token["content"]: token["id"] for token in added if token["special"]}
    definition["added_tokens"] = [token for token in added if not token["special"]]
    # A text gets its start and end by number, and is neither cut nor padded here.
    definition["post_processor"] = definition["truncation"] = definition["padding"] = None
    if isinstance(definition["model"]["vocab"], list):
        # In Unigram models they are pieces as well, the likeliest of all (older files name no
        # type). They get names that occur in no text, since none has the character 0.
        pieces = definition["model"]["vocab"]
        definition["model"]["vocab"] = [
            (f"\0{number}" if piece in specials else piece, score)
            for number, (piece, score) in enumerate(pieces)
        ]
    config = json.loads(files.find(f"{url}/tokenizer_config.json") or b"{}")
    ids = [*_vocabulary(definition).values(), *(token["id"] for token in added)]
    model = json.loads(files.find(f"{url}/config.json") or b"{}")
    names = {number: token for token, number in specials.items()}
    # Older models such as RoBERTa, whose tokenizer does not name its ends, give only their ids.
    bos, eos = (
        _token_text(config[key]) if key in config else names.get(_first(model.get(f"{key}_id")))
        for key in ("bos_token", "eos_token")
    )
    vocab_size = fitting_vocab_size(url, model, max(ids) + 1)
    absent_letters = _absent_letters(definition)
    first_absent_id = max(vocab_size, max(ids) + 1)
    # In place of `json.dumps`, which takes 0.09 s for 49,000 tokens, seven times as long.
    plain = to_json(definition).decode()
    # After `plain` was written: only gigatoken needs these entries.
    _vocabulary(definition).update(zip(absent_letters, count(first_absent_id), strict=False))
    return TokenizerFiles(
        definition=plain,
        original=content.decode(),
        chat_template=_chat_template(url, config),
        sha256=hashlib.sha256(content).hexdigest(),
        specials=specials,
        bos_token=bos,
        eos_token=eos,
        vocab_size=vocab_size,
        absent_letters=absent_letters,
        first_absent_id=first_absent_id,
        gigatoken_definition=to_json(definition).decode() if absent_letters else plain,
    )


class DocumentTokenizer:
    """Turns texts into token ids, without start and end tokens."""

    def __init__(self, files: TokenizerFiles, engine: Engine) -> None:
        self.files = files
        self.engine = engine

    @cached_property
    def _hugging_face(self) -> Any:
        return self.files.plain_tokenizer()

    @cached_property
    def _gigatoken(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self.files.gigatoken_definition)

    @cached_property
    def absent_bytes(self) -> bytes:
        """The byte values that the vocabulary cannot express; they vanish from every text."""
        letters = byte_letters()
        return bytes(letters.index(letter) for letter in self.files.absent_letters)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """`(token ids of all texts, one after another; offsets of shape (len(texts) + 1,))`."""
        if self.engine == "gigatoken":
            return self._encode_gigatoken(texts)
        # The fast one leaves out where in the text each token stands.
        encodings = self._hugging_face.encode_batch_fast(
            texts.to_pylist(), add_special_tokens=False
        )
        ids = [np.asarray(encoding.ids, np.uint32) for encoding in encodings]
        offsets = ends_of(np.array([len(tokens) for tokens in ids], np.int64))
        return np.concatenate([np.empty(0, np.uint32), *ids]), offsets

    def _encode_gigatoken(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        import awkward

        column = awkward.from_arrow(texts.cast(pa.large_string()))
        # Each core has a task of Spark's already.
        encoded = self._gigatoken.encode_batch(column, parallel=False).layout
        offsets = np.asarray(encoded.offsets.data).astype(np.int64)
        ids = np.asarray(encoded.content.data)[: offsets[-1]]
        # Ids past the vocabulary stand for bytes that it cannot express; they are removed.
        present = ids < self.files.first_absent_id
        return (ids, offsets) if present.all() else (ids[present], ends_of(present)[offsets])


def measure_bytes_per_token(files: TokenizerFiles, engine: Engine, sample: list[str]) -> float:
    """Bytes of text that a token stands for, on a sample."""
    ids, _ = DocumentTokenizer(files, engine).encode(pa.array(sample, pa.string()))
    return sum(len(text.encode()) for text in sample) / max(1, len(ids))


def _absent_letters(definition: dict[str, Any]) -> tuple[str, ...]:
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return ()
    vocabulary = _vocabulary(definition)
    return tuple(letter for letter in byte_letters() if letter not in vocabulary)


def _vocabulary(definition: dict[str, Any]) -> dict[str, int]:
    vocabulary = definition["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}


def _chat_template(url: str, config: dict[str, Any]) -> str | None:
    file = files.find(f"{url}/chat_template.jinja")
    template = file.decode() if file else config.get("chat_template")
    return template if isinstance(template, str) else None


def _first(ids: Any) -> Any:
    return next(iter(ids), None) if isinstance(ids, list) else ids


def _token_text(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def choose_engine(
    files: TokenizerFiles, engine_setting: str, sample: list[str], cache: str | None
) -> tuple[Engine, list[str]]:
    """Choose the engine; also return the warnings to keep.

    Args:
        cache: folder of what earlier runs found. A grown corpus often has the same sample, and
            loading both tokenizers takes longer than all else of a small growth.

    Raises:
        UserError: gigatoken is wanted by name, and cannot be used.
    """
    if engine_setting == "hugging_face":
        return "hugging_face", []
    try:
        differing = _count_differences(files, sample, cache)
        fault = f"differs from Hugging Face on {differing} of {len(sample)} documents"
    except UserError:
        raise
    except Exception as error:  # gigatoken raises its own types for what it cannot load
        differing, fault = 1, f"cannot load this tokenizer ({error})"
    if not differing:
        return "gigatoken", []
    if engine_setting == "gigatoken":
        raise UserError(
            f"gigatoken {fault}. Set `tokenized_shards.engine: auto` to use Hugging Face instead."
        )
    return "hugging_face", [f"gigatoken {fault}; the Hugging Face tokenizer was used instead"]


def _count_differences(files: TokenizerFiles, sample: list[str], cache: str | None) -> int:
    """How many of the texts gigatoken and Hugging Face tokenize differently.

    Raises:
        Exception: gigatoken cannot load this tokenizer.
    """

    def tokens(engine: Engine) -> list[np.ndarray]:
        ids, offsets = DocumentTokenizer(files, engine).encode(pa.array(sample, pa.string()))
        return np.split(ids, offsets[1:-1])

    def compare() -> bytes:
        pairs = zip(tokens("gigatoken"), tokens("hugging_face"), strict=True)
        return str(sum(not np.array_equal(fast, slow) for fast, slow in pairs)).encode()

    key = cache_key(
        "differences of tokenizers",
        __name__,
        ["awkward", "gigatoken", "numpy", "pyarrow", "tokenizers"],
        tokenizer=files.sha256,
        sample=hashlib.sha256(json.dumps(sample).encode()).hexdigest(),
    )
    return int(cached(cache, key, compare))


# Examples of a task as tokens, of which those to be learnt are marked.
# - A conversation is rendered by the model's chat template, or plainly, turn by turn. Each part is
#   tokenized by itself, as by the endpoint; the assistant's turns are learnt.
# - A pair is its input, as the model's tokenizer encodes a text, followed by its target.
# - A prompt with two answers is the conversation that ends with the chosen one, followed by the one
#   that ends with the rejected one. These answers are marked, so each ends where its marks do.
# - A labeled text is the encoded text, followed by the number of its class in place of a token.
TOO_LONG, SPECIAL, RARE_CLASS = "too_long", "holds_special_token", "of_a_class_too_rare"
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
    """Maximum tokens of an example; each of two answers may have half of them."""
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
        answers = []
        for key in ("chosen", "rejected"):
            messages = [*example["prompt"], {"role": "assistant", "content": example[key]}]
            conversation = self._conversation(messages, f"{name}, {key}", self.row_tokens // 2)
            if conversation.left_out:
                return conversation
            # Only the last answer is compared: earlier ones are part of the prompt.
            answer = (
                np.arange(len(conversation.tokens)) > np.flatnonzero(~conversation.is_target)[-1]
            )
            answers.append(replace(conversation, is_target=answer))
        chosen, rejected = answers
        # If both are cut to the same tokens, there is nothing to prefer.
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
            # The tokens that fit hold nothing of the answers.
            return TokenizedExample.none(TOO_LONG)
        return TokenizedExample(tokens, is_target, was_cut=True)

    def _chat(self, messages: list[dict[str, str]]) -> Iterator[MarkedTokens]:
        shown = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], True)
            whole = self._render(messages[: number + 1], False)
            # Only a template that leaves earlier turns as they are shows what each turn adds.
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
            # Special tokens at the beginning of a text belong to the first prompt alone.
            first = not any(m["role"] == "assistant" for m in messages[:number])
            yield self._tokenizer.encode(pending, add_special_tokens=first).ids, False
            yield [*self._ids(message["content"]), self.end_token_id], True
            pending = ""

    def _input_and_target(self, example: Example, name: str) -> TokenizedExample:
        labeled = self.form == "labeled"
        if labeled and example["label"] not in self.labels:
            return TokenizedExample.none(RARE_CLASS)
        input_text = example["text"] if labeled else self.settings.input_prefix + example["input"]
        inputs = self._within(input_text, self.settings.input_tokens, name, "input")
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
        encoding = self._tokenizer.encode(text)
        # Special tokens in the text are plain text; only those around it are special.
        if self._holds_special(text):
            plain = self._plain_tokenizer.encode(text, add_special_tokens=False)
            encoding = self._tokenizer.post_process(plain)
        ids = list(encoding.ids)
        # Not every tokenizer ends a text with this token, by which a model learns to end.
        if what == "target" and ids[-1:] != [self.end_token_id]:
            ids.append(self.end_token_id)
        if len(ids) <= limit:
            return ids, False
        if self.settings.too_long == "refuse":
            key = f"`tokenized_shards.examples.{what}_tokens` ({limit})"
            raise self._refusal(name, f"an {what} of {len(ids)} tokens", key)
        if self.settings.too_long == "drop":
            return None
        # When the text is cut, a special token at its end stays.
        end = [ids[-1]] if ids[-1] in self.files.specials.values() else []
        return ids[: limit - len(end)] + end, True

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
    def _plain_tokenizer(self) -> Any:
        return self.files.plain_tokenizer()

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.files.original)
        # The settings limit the length of examples, not the tokenizer's file.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def _template(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            chat_template=template_used(self.files, self.form, self.settings),
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


def template_used(files: TokenizerFiles, form: Form, settings: ExampleSettings) -> str | None:
    """The chat template that conversations or preferences are written by; empty if plainly.

    For other forms, the one from the settings, which the trained model keeps.
    """
    if form not in ("conversations", "preferences"):
        return settings.chat_template
    if settings.template == "plain":
        return ""
    return settings.chat_template or files.chat_template


def template_libraries(form: Form, settings: ExampleSettings) -> set[str]:
    """The libraries that render examples of this form, where a chat template does."""
    is_rendered = form in ("conversations", "preferences") and settings.template == "chat"
    return {"Jinja2", "transformers"} if is_rendered else set()


def find_labels(
    parts: list[Part], listed: Sequence[str], mixing: Mixing
) -> tuple[tuple[str, ...], list[int], list[str]]:
    """The classes in the order of their numbers, the training examples of each, and what to say of
    those that are left out.

    A class with a single example, or none to train on, cannot be learnt. Tickets that arrive have
    such classes, new ones and misspelled ones, which are not to stop all the others.

    Args:
        listed: the classes that there may be, none of which is left out; where empty, those that
            occur, sorted.
        mixing: says how often each example is trained on.

    Raises:
        UserError: a class is none of those, or cannot be learnt; or there are fewer than two.
    """
    tables = [part.read(["id", "source", "label", "split"]) for part in parts]
    table = pa.concat_tables(tables).combine_chunks()
    table = table.filter(table["label"].is_valid())
    everywhere = Counter(table["label"].to_pylist())
    times = mixing.copies(table) * in_split(table, "train")
    counts: Counter[str] = Counter()
    for label, number in zip(table["label"].to_pylist(), times.tolist(), strict=True):
        counts[label] += number
    if listed and (unknown := sorted(everywhere.keys() - set(listed))):
        raise UserError(
            f"{everywhere[unknown[0]]:,} examples have the class {unknown[0]!r}, which is none of "
            f"`tokenized_shards.examples.labels` ({', '.join(listed)}). Add it there, or correct "
            "the examples."
        )
    occurring = listed or sorted(everywhere)
    rare = [one for one in occurring if not counts[one] or everywhere[one] < 2]
    told = ", ".join(f"{label!r} ({everywhere[label]:,})" for label in rare)
    labels = tuple(label for label in occurring if label not in rare)
    if len(labels) < 2 or (listed and rare):
        raise UserError(
            "It takes two classes to tell apart, and of each class two examples, one of them to "
            f"train on. Enough have: {', '.join(labels) or 'none'}. Too few: {told or 'none'}. "
            "Give more examples, or take a class out (`tokenized_shards.examples.labels`)."
        )
    note = "left out, since nothing can be learnt of a class with one example, or none to train on"
    return labels, [counts[one] for one in labels], [f"{note}: {told}"] if rare else []
