"""What an engine's program asks of a loaded model, whatever computes it."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from artifacts.errors import UserError
from serving.engine.chat import ChatEncoder
from serving.engine.protocol import Chunk, GenerateRequest, Refusal, TokenScore
from serving.engine.stopping import StopStrings


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


class ServedModel(ABC):
    """A loaded model that answers many requests at once."""

    tokenizer: Any
    context_tokens: int
    """Most tokens of a prompt and its answer together."""
    end_tokens: list[int]

    @cached_property
    def _chat(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer)

    @abstractmethod
    def start(self) -> None:
        """Start the thread that writes; there are no answers before."""

    @property
    @abstractmethod
    def fault(self) -> str | None:
        """Why the model answers no more, or None while it does."""

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
        """Yield text as it is written; stops the work when the caller goes away.

        Args:
            request: what is asked for.
            tokens: the prompt's, from `encode`.
        """
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

    def encode(self, request: GenerateRequest) -> list[int] | Refusal:
        """The prompt's tokens, or why it cannot be served."""
        if isinstance(request.prompt, list):
            tokens, most = request.prompt, len(self.tokenizer)
            if unknown := [token for token in tokens if not 0 <= token < most]:
                text = f"Token {unknown[0]} is not one of this model's {most}."
                return Refusal(field="prompt", message=text)
        elif request.messages is not None:
            if not self.tokenizer.chat_template:
                return Refusal(
                    field="messages", message="This model has no chat template; use completions."
                )
            try:
                tokens = self._chat.encode(request.messages, request.allow_role_tokens)
            except TemplateError as error:
                return Refusal(
                    field="messages", message=f"The model's chat template refuses this: {error}"
                )
        else:
            tokens = self.tokenizer.encode(request.prompt or "")
        limit = min(request.max_prompt_tokens, self.context_tokens - request.max_tokens)
        if not tokens:
            return Refusal(field="prompt", message="The prompt is empty.")
        if len(tokens) > limit:
            return Refusal(
                field="prompt",
                message=f"The prompt has {len(tokens)} tokens; at most {max(limit, 0)} fit beside "
                f"{request.max_tokens} new ones.",
            )
        return list(tokens)

    def encode_written(self, request: GenerateRequest) -> list[int]:
        """The tokens of the answer's beginning, where another engine wrote one."""
        return list(self.tokenizer.encode(request.written, add_special_tokens=False))


class AnswerText:
    """Turns the tokens of one answer into the pieces of text to show."""

    def __init__(self, model: ServedModel, request: GenerateRequest, prompt: list[int]) -> None:
        self._model = model
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = StopStrings(request.stop)
        self._stream = request.stream
        self._ignore_eos = request.ignore_eos
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
        tokenizer = self._model.tokenizer
        for token in step.tokens:
            text = self._decoder.step(tokenizer._tokenizer, token)
            self._shown += self._stops.add(text or "")
            self._last = token
        self._tokens += len(step.tokens)
        self._scores += [self._score(one) for one in step.scored]
        is_last = step.finished or self._stops.hit
        if not is_last and not (self._stream and self._shown):
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
            ended = self._last in self._model.end_tokens and not self._ignore_eos
            chunk.finish_reason = "stop" if ended or self._stops.hit else "length"
        return chunk

    def _score(self, scored: Scored) -> TokenScore:
        decode = self._model.tokenizer.decode
        top = scored.top and (decode([scored.top[0]]), scored.top[1])
        return TokenScore(token=decode([scored.token]), logprob=scored.logprob, top=top)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder; raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"The tokenizer in {folder} cannot be read: {first_line(error)}") from error


def read_weights(folder: Path, model_class: Any, **options: Any) -> Any:
    """A model for inference, from safetensors alone; raises UserError, also where it is no good."""
    try:
        model = model_class.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, **options
        )
    except Exception as error:
        # Damaged files surface as errors of safetensors, json, torch or transformers alike.
        raise UserError(f"The model in {folder} cannot be read: {first_line(error)}") from error
    damaged = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if damaged:
        raise UserError(
            f"The model in {folder} has weights that are not finite numbers ({damaged[0]}, "
            f"{len(damaged)} in all): its training went wrong. Serve an earlier checkpoint."
        )
    return model.eval()


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
