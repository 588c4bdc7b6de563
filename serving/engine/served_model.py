"""What an engine's program asks of a loaded model, whatever computes it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from artifacts.errors import UserError
from artifacts.model.hugging_face import read_model
from serving.engine.protocol import Chunk, GenerateRequest, Refused, TokenScore
from serving.engine.tokenizer import ChatEncoder, ServedTokenizer


class GenerationFailed(Exception):
    """The model could not generate an answer to its end."""


@dataclass(frozen=True)
class Scored:
    """How likely a token was, in natural logarithms, and which one was most likely."""

    token: int
    logprob: float | None
    top: tuple[int, float] | None = None


@dataclass(frozen=True)
class Step:
    """What a model has written since the step before."""

    tokens: list[int]
    finished: bool
    scored: list[Scored] = field(default_factory=list)
    """Of these tokens, where they were asked for; in the first step of the prompt's before them,
    where it is echoed."""


@dataclass(eq=False, kw_only=True)
class Job:
    """One request: the engine's thread puts steps in, the event loop that made it takes them."""

    request: GenerateRequest
    prompt: list[int]
    finished: bool = False
    """Whether the last step was taken out."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _outputs: asyncio.Queue[Step | str] = field(default_factory=asyncio.Queue)

    def put(self, output: Step | str) -> None:
        """Hand over a step, or why there will be none; from any thread."""
        self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Every step to the last; raises GenerationFailed with the reason where none comes."""
        while not self.finished:
            output = await self._outputs.get()
            if isinstance(output, str):
                raise GenerationFailed(output)
            self.finished = output.finished
            yield output


class AnyModel(Protocol):
    """What an engine's program serves: a language model, or an encoder."""

    def encode(self, request: GenerateRequest) -> list[int]:
        """The prompt's tokens; raises Refused where it cannot be served."""

    def generate(self, request: GenerateRequest, tokens: list[int]) -> AsyncGenerator[Chunk, None]:
        """Yield the answer to what was encoded; stops the work when the caller goes away."""


class ServedModel(ABC):
    """A loaded model that answers many requests at once."""

    tokenizer: ServedTokenizer
    context_tokens: int
    """Most tokens of a prompt and its answer together."""
    end_tokens: list[int]

    @cached_property
    def _chat(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer)

    @abstractmethod
    def write(self, request: GenerateRequest, tokens: list[int]) -> AsyncGenerator[Step, None]:
        """Yield new tokens as they are written.

        Closing the generator stops the work.

        Raises:
            GenerationFailed: no more tokens will come.
        """

    async def generate(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Chunk, None]:
        answer = AnswerText(self, request, tokens)
        try:
            async with aclosing(self.write(request, tokens)) as steps:
                async for step in steps:
                    chunk = answer.add(step)
                    if chunk is not None:
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
        except GenerationFailed as error:
            yield Chunk(error=str(error))

    def encode(self, request: GenerateRequest) -> list[int]:
        if isinstance(request.prompt, list):
            tokens, most = request.prompt, self.tokenizer.backend.get_vocab_size()
            if unknown := [token for token in tokens if not 0 <= token < most]:
                raise Refused(f"Token {unknown[0]} is not one of this model's {most}.", "prompt")
        elif request.messages is not None:
            try:
                tokens = self._chat.encode(request.messages, request.allow_role_tokens)
            except TemplateError as error:
                text = f"This chat cannot be written as a prompt: {error}."
                raise Refused(text, "messages") from error
        else:
            tokens = self.tokenizer.encode(request.prompt or "")
        # The last token of what is only scored is predicted, and has no position of its own.
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
        return self.tokenizer.encode(request.written, add_special_tokens=False)


class AnswerText:
    """Turns the tokens of one answer into the pieces of text to show."""

    def __init__(self, model: ServedModel, request: GenerateRequest, prompt: list[int]) -> None:
        self._model, self._request = model, request
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = StopStrings(request.stop)
        self._echo = ""
        if request.echo and not request.written:
            given = request.prompt
            self._echo = given if isinstance(given, str) else model.tokenizer.decode(prompt)
        self._prompt_tokens = len(prompt)
        self._shown = ""
        self._scores: list[TokenScore] = []
        self._tokens = 0
        self._last: int | None = None

    def add(self, step: Step) -> Chunk | None:
        """The next piece, if there is one to show; the last one has a finish reason."""
        for token in step.tokens:
            text = self._decoder.step(self._model.tokenizer.backend, token)
            self._shown += self._stops.add(text or "")
            self._last = token
        self._tokens += len(step.tokens)
        self._scores += [self._score(one) for one in step.scored]
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
            ended = self._last in self._model.end_tokens and not self._request.ignore_eos
            chunk.finish_reason = "stop" if ended or self._stops.hit else "length"
        return chunk

    def _score(self, scored: Scored) -> TokenScore:
        decode = self._model.tokenizer.decode
        top = scored.top and (decode([scored.top[0]]), scored.top[1])
        return TokenScore(token=decode([scored.token]), logprob=scored.logprob, top=top)


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
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.hit = bool(found)
        end = min(found) if found else len(self._held) - self._possible_start()
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


def read_weights(folder: Path, model_class: Any, **options: Any) -> Any:
    """A model for inference; raises UserError where it cannot be read, or is no good."""
    model = read_model(folder, model_class, **options)
    damaged = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if damaged:
        raise UserError(
            f"The model in {folder} has weights that are not finite numbers ({damaged[0]}, "
            f"{len(damaged)} in all): its training went wrong. Serve an earlier checkpoint."
        )
    return model
