"""What an engine's program asks of a loaded model, whatever computes it: calls in, text out.

A request is encoded (`ServedTokenizer`, `ChatEncoder`), a model makes a job of it, and the tokens
that the job puts out become the pieces of its answer (`AnswerText`). The tokenizer is without
transformers, whose import takes seconds and hundreds of megabytes: what that makes of a folder's
many files is written once, into the cache of converted models.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from artifacts.model import byte_letters
from serving.engine import protocol
from serving.engine.protocol import Chunk, GenerateRequest, LikelyToken, Refused, TokenScore

BROKEN_EXIT_CODE = 70
# UTF-8 has four bytes at most for one, and no token is less than a byte.
CHARACTER_TOKENS = 4
"""The most that one character is spread over."""
SHORT_BYTES = 4_096
"""Calls up to this size are encoded at once, which is done before a thread would have started."""
TOKENIZER_NAME = "tokenizer.json"
CHAT_NAME = "chat.json"
# Tokenizers of bytes write each as a letter that can be printed.
BYTES = {letter: byte for byte, letter in enumerate(byte_letters())}


class AnyModel(Protocol):
    """What an engine's program serves: a language model, or an encoder."""

    def encode(self, request: GenerateRequest) -> list[int]:
        """The prompt's tokens; raises Refused where it cannot be served."""

    def generate(self, request: GenerateRequest, tokens: list[int]) -> AsyncGenerator[Chunk, None]:
        """Yield the answer to what was encoded; stops the work when the caller goes away."""

    async def check(self) -> None:
        """Return once what computes has shown that it is alive; by default, that this is called
        shows it."""
        return


async def answer_calls(model: AnyModel, end: socket.socket, reason: str) -> None:
    """Answer the API server's calls until that is gone; `reason` says what computes, and why."""
    reader, writer = await asyncio.open_connection(sock=end, limit=protocol.LONGEST_LINE)
    tasks: dict[int, asyncio.Task[None]] = {}

    def say(number: int, chunk: Chunk) -> None:
        reply = protocol.Reply(number=number, chunk=chunk)
        writer.write(reply.model_dump_json(exclude_defaults=True).encode() + b"\n")

    async def answer(number: int, request: GenerateRequest | None, is_short: bool) -> None:
        try:
            if request is None:
                await model.check()
                say(number, Chunk(text=reason))
                return
            if is_short:
                tokens = model.encode(request)
            else:
                tokens = await asyncio.to_thread(model.encode, request)
            async for chunk in model.generate(request, tokens):
                say(number, chunk)
        except Refused as refused:
            say(number, Chunk(error=str(refused), field=refused.field))
        except Exception as error:
            traceback.print_exc()
            say(number, Chunk(error=f"an error in the engine ({type(error).__name__})"))
        finally:
            del tasks[number]

    while line := await reader.readline():
        call = protocol.Call.model_validate_json(line)
        # A number that comes again says that nobody waits for its answer any more.
        # Where the answer is complete by then, this is taken for a check, whose reply nobody
        # awaits.
        if given_up := tasks.get(call.number):
            given_up.cancel()
        else:
            work = answer(call.number, call.request, len(line) <= SHORT_BYTES)
            tasks[call.number] = asyncio.create_task(work)


def start_thread(work: Callable[[], None]) -> None:
    """Begin what never returns. Should it end, whatever waits for it would wait for ever: so the
    process ends with it, and the API server starts another engine."""

    def run() -> None:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(BROKEN_EXIT_CODE)

    threading.Thread(target=run, daemon=True).start()


@dataclass(frozen=True)
class TokenLikelihood:
    """How likely a token was, in natural logarithms, and which ones were most likely."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()
    """As many as were asked for, from the likeliest on."""


@dataclass(frozen=True)
class Step:
    """What a model has written since the step before."""

    tokens: list[int]
    finished: bool
    scored: list[TokenLikelihood] = field(default_factory=list)
    """Of these tokens, where they were asked for; in the first step of the prompt's before them,
    where it is echoed."""


@dataclass(eq=False, kw_only=True)
class Job:
    """One request: the engine's thread puts steps in, the event loop that made it takes them."""

    request: GenerateRequest
    prompt: list[int]
    left: bool = False
    """Whether nobody takes any more steps."""
    outputs: asyncio.Queue[Step | str] = field(default_factory=asyncio.Queue)
    # Of whoever makes the job: the threads that call `put` have none.
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def put(self, output: Step | str) -> None:
        """Hand over a step, or why there will be none; from any thread."""
        self._loop.call_soon_threadsafe(self.outputs.put_nowait, output)


class PromptEncoder(AnyModel):
    """Requests to one model's tokens."""

    tokenizer: "ServedTokenizer"
    context_tokens: int
    """Most tokens of a prompt and its answer together."""

    @cached_property
    def _chat(self) -> "ChatEncoder":
        return ChatEncoder(self.tokenizer)

    def encode(self, request: GenerateRequest) -> list[int]:
        if isinstance(request.prompt, list):
            tokens, most = request.prompt, self.tokenizer.backend.get_vocab_size()
            if unknown := [token for token in tokens if not 0 <= token < most]:
                text = f"Token {unknown[0]} is not in this model's vocabulary of {most} tokens."
                raise Refused(text, "prompt")
        elif request.messages is not None:
            try:
                tokens = self._chat.encode(request.messages)
            except TemplateError as error:
                text = f"This chat cannot be rendered as a prompt: {error}."
                raise Refused(text, "messages") from error
        else:
            tokens = self.tokenizer.encode(request.prompt or "")
        # Where nothing is to be written, the last token is only predicted and needs no position, so
        # the prompt may have one token more (hence -1).
        positions = self.context_tokens - (request.max_tokens or -1)
        limit = min(request.max_prompt_tokens, positions)
        if not tokens:
            raise Refused("The prompt is empty.", "prompt")
        if len(tokens) > limit:
            raise Refused(
                f"The prompt has {len(tokens)} tokens; at most {max(limit, 0)} fit beside "
                f"{request.max_tokens} new ones.",
                "prompt",
            )
        return tokens

    def encode_written(self, request: GenerateRequest) -> list[int]:
        """The tokens of the answer's beginning, where another engine wrote one."""
        text = request.written
        if text.startswith(" "):
            # Some tokenizers begin a text with a space, which would be a second one here.
            tokens = self.tokenizer.encode(text.removeprefix(" "), add_special_tokens=False)
            if b"".join(map(self.tokenizer.token_bytes, tokens)) == text.encode():
                return tokens
        return self.tokenizer.encode(text, add_special_tokens=False)

    def echo(self, request: GenerateRequest, prompt: list[int]) -> str:
        """The prompt's text where it comes before the answer."""
        if not request.echo or request.written:
            return ""
        text = request.prompt
        return text if isinstance(text, str) else self.tokenizer.decode(prompt)


class ServedModel(PromptEncoder, ABC):
    """A loaded model that answers many requests at once."""

    end_tokens: list[int]
    is_encoder_decoder = False
    """Whether an answer is a text of its own, not what comes after the prompt."""

    @abstractmethod
    def submit(self, request: GenerateRequest, tokens: list[int]) -> Job:
        """Begin to write an answer; the work stops where nobody takes its steps."""

    async def generate(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Chunk, None]:
        answer, job, chunk = AnswerText(self, request, tokens), self.submit(request, tokens), None
        try:
            while chunk is None or (chunk.finish_reason is None and chunk.error is None):
                output = await job.outputs.get()
                chunk = Chunk(error=output) if isinstance(output, str) else answer.add(output)
                if chunk is not None:
                    yield chunk
        finally:
            job.left = True


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
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for in UTF-8, which may be a part of a character; empty where the
        model has more tokens than the tokenizer."""
        name = self.backend.id_to_token(token) or ""
        if token in self._added:
            return name.encode()
        if "ByteLevel" in self._decoder:
            return bytes(BYTES[character] for character in name)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(byte[1])
        # Tokenizers of words mark the beginning of one, or what is none.
        is_piece = "WordPiece" in self._decoder
        return (name.removeprefix("##") if is_piece else name.replace("\u2581", " ")).encode()

    @cached_property
    def _added(self) -> Container[int]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _decoder(self) -> str:
        return json.dumps(json.loads(self.backend.to_str())["decoder"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return str(self.backend.decode(tokens, skip_special_tokens=False))


class ChatEncoder:
    """Renders turns with a model's own template.

    A control token that stands in a turn, such as the one that begins an assistant's turn, would
    let whoever wrote it forge a conversation. It is encoded as the characters that it is written
    with, as any other text.
    """

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._backend, self._template = tokenizer.backend, tokenizer.chat
        self._plain: Tokenizer = Tokenizer.from_str(self._backend.to_str())
        # The name says the opposite: with it, special tokens in a text are encoded as its letters.
        self._plain.encode_special_tokens = True
        self._control = {
            number
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, turns: Sequence[protocol.Message]) -> list[int]:
        """The prompt's tokens; raises TemplateError where there is no template, or it refuses."""
        if not self._template:
            raise TemplateError("the model has no chat template; use completions")
        # The part of transformers that needs no torch, read at the first chat.
        from transformers.utils.chat_template_utils import render_jinja_template

        # What must stay text stands between two of these; no client knows it, so no turn holds it.
        mark = secrets.token_hex(16)
        contents = list(self._marked([turn.content for turn in turns], mark))
        chat = [turn.model_dump() | {"content": c} for turn, c in zip(turns, contents, strict=True)]
        try:
            (text,), _ = render_jinja_template([chat], add_generation_prompt=True, **self._template)
        except Exception as error:
            # A template is a program: on a turn that it was not written for, anything may go wrong.
            raise TemplateError(str(error)) from error
        parts = text.split(mark)
        if len(parts) - 1 != sum(content.count(mark) for content in contents):
            raise TemplateError("its template does not keep control tokens of a turn")
        # What stands between two marks is every second part. All at once, since there may be many.
        outside = self._backend.encode_batch_fast(parts[::2], add_special_tokens=False)
        inside = self._plain.encode_batch_fast(parts[1::2], add_special_tokens=False)
        encoded = [*outside, *inside]
        encoded[::2], encoded[1::2] = outside, inside
        return [token for part in encoded for token in part.ids]

    def _marked(self, contents: list[str], mark: str) -> Iterator[str]:
        """Each content with a mark before and after each control token."""
        # Not `encode_batch_fast`, which tells no offsets.
        encoded = self._backend.encode_batch(contents, add_special_tokens=False)
        for content, encoding in zip(contents, encoded, strict=True):
            pieces, position = [], 0
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if token in self._control:
                    pieces += [content[position:start], mark, content[start:end], mark]
                    position = end
            yield "".join([*pieces, content[position:]])


class AnswerText:
    """Turns the tokens of one answer into the pieces of text to show."""

    def __init__(self, model: ServedModel, request: GenerateRequest, prompt: list[int]) -> None:
        self._model, self._request = model, request
        self._decoder = DecodeStream(self._tokens_before(prompt), skip_special_tokens=True)
        self._stops = StopStrings(request.stop)
        self._echo = model.echo(request, prompt)
        count = len(prompt) if self._echo else 0
        self._token_texts = TokenTexts(model.tokenizer, self._echo, count, len(request.written))
        self._prompt_tokens = len(prompt)
        self._shown = ""
        self._scores: list[TokenScore] = []
        self._tokens = 0
        self._last: int | None = None
        self._unshown: list[int] = []

    def _tokens_before(self, prompt: list[int]) -> list[int]:
        """The last tokens before the answer's first one, as a decoder drops the space of a token
        that begins a text; none where they end within a character, which would be shown once
        more."""
        model = self._model
        tokens = model.encode_written(self._request)
        before = tokens if model.is_encoder_decoder else [*prompt[-CHARACTER_TOKENS:], *tokens]
        for count in range(CHARACTER_TOKENS, 0, -1):
            if not model.tokenizer.decode(before[-count:]).endswith("\N{REPLACEMENT CHARACTER}"):
                return before[-count:]
        return []

    def _text_of(self, token: int) -> str:
        """What a token adds to the text, nothing while a character is not complete."""
        tokenizer = self._model.tokenizer
        self._unshown.append(token)
        try:
            text = self._decoder.step(tokenizer.backend, token) or ""
        except Exception:  # The library has no class of its own for it.
            # A decoder of bytes reads those of a character that was broken off together with what
            # was shown before them, such as a line break, and then takes all for no characters.
            text = b"".join(map(tokenizer.token_bytes, self._unshown)).decode(errors="replace")
            self._decoder = DecodeStream([token], skip_special_tokens=True)
        if text:
            self._unshown = []
        return text

    def add(self, step: Step) -> Chunk | None:
        """The next piece, if there is one to show; the last one has a finish reason."""
        # The last scores of a step are those of its own tokens; any before them are the prompt's.
        scored = deque(step.scored)
        while len(scored) > len(step.tokens):
            self._scores.append(self._token_texts.score(scored.popleft()))
        for token in step.tokens:
            # What a step wrote after the stop string is neither shown nor counted.
            if self._stops.hit:
                break
            self._shown += self._stops.add(self._text_of(token))
            self._last = token
            self._tokens += 1
            if scored:
                self._scores.append(self._token_texts.score(scored.popleft()))
        is_last = step.finished or self._stops.hit
        if not is_last and not (self._request.stream and self._shown):
            return None
        chunk = Chunk(
            echo=self._echo,
            text=self._shown + (self._stops.finish() if is_last else ""),
            scores=self._scores,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._tokens,
        )
        self._echo, self._shown, self._scores = "", "", []
        if is_last:
            is_end = self._last in self._model.end_tokens and not self._request.ignore_eos
            chunk.finish_reason = "stop" if is_end or self._stops.hit else "length"
        return chunk


class TokenTexts:
    """What each token adds to a text, so that together they are the text."""

    def __init__(
        self, tokenizer: ServedTokenizer, prompt: str, prompt_tokens: int, offset: int
    ) -> None:
        """Begin.

        Args:
            prompt: its text, where its tokens come first.
            prompt_tokens: how many those are.
            offset: where the first token begins.
        """
        self._tokenizer, self._offset = tokenizer, offset
        self._prompt, self._prompt_tokens = prompt, prompt_tokens
        self._characters = getincrementaldecoder("utf-8")("replace")

    def score(self, scored: TokenLikelihood) -> TokenScore:
        """The next token as it is told."""
        own_bytes = self._tokenizer.token_bytes(scored.token)
        text = self._characters.decode(own_bytes)
        if self._prompt_tokens:
            # Some tokenizers begin a text with a space, or with a token that it does not have.
            self._prompt_tokens -= 1
            fits = [fit for fit in (text, text.removeprefix(" ")) if self._prompt.startswith(fit)]
            text = fits[0] if fits else ""
            if not self._prompt_tokens:
                text = self._prompt
                # A prompt of tokens may end within a character, which the answer does not go on
                # with.
                self._characters.reset()
            self._prompt = self._prompt[len(text) :]
        likely, names = [], {text}
        for token, logprob in scored.top:
            name = text if token == scored.token else self._name(token, names)
            names.add(name)
            bytes_ = list(self._tokenizer.token_bytes(token))
            likely.append(LikelyToken(token=name, bytes=bytes_, logprob=logprob))
        offset, self._offset = self._offset, self._offset + len(text)
        return TokenScore(
            token=text, bytes=list(own_bytes), logprob=scored.logprob, offset=offset, top=likely
        )

    def _name(self, token: int, other_names: set[str]) -> str:
        """A token's text, else its bytes, else its number: the first one that no other has."""
        own_bytes = self._tokenizer.token_bytes(token)
        escaped = "bytes:" + "".join(f"\\x{byte:02x}" for byte in own_bytes)
        with suppress(UnicodeDecodeError):
            if (text := own_bytes.decode()) not in other_names:
                return text
        return escaped if escaped not in other_names else f"token_id:{token}"


class StopStrings:
    """Holds back just so much text as could still turn into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Take more text and return what may be shown; nothing after a stop string was met."""
        if self.hit:
            return ""
        self._held += text
        hits = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        self.hit = bool(hits)
        # The one that is complete first, however the text is divided into tokens.
        end = min(hits)[1] if hits else len(self._held) - self._possible_start()
        shown, held = self._held[:end], self._held[end:]
        self._held = "" if self.hit else held
        return shown

    def finish(self) -> str:
        """The text held back, when no more will come."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        starts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        return max((len(start) for start in starts if self._held.endswith(start)), default=0)
