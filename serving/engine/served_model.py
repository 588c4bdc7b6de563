"""What the engine asks of a loaded model, of whatever kind."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from artifacts.errors import UserError
from serving.engine.chat import ChatEncoder
from serving.engine.packed_linear import pack_linear_layers
from serving.engine.protocol import Chunk, GenerateRequest, Refusal
from serving.engine.stopping import StopStrings


class GenerationFailed(Exception):
    """The model could not generate an answer to its end."""


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
    def write(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[tuple[list[int], bool], None]:
        """Yield new tokens as they are written, and whether they are the last ones.

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
        answer = AnswerText(self, request, len(tokens))
        try:
            async with aclosing(self.write(request, tokens)) as steps:
                async for new, finished in steps:
                    chunk = answer.add(new, finished)
                    if chunk is not None:
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
        except GenerationFailed as error:
            yield Chunk(error=str(error))

    def encode(self, request: GenerateRequest) -> list[int] | Refusal:
        """The prompt's tokens, or why it cannot be served."""
        if request.messages is not None:
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

    def __init__(self, model: ServedModel, request: GenerateRequest, prompt_tokens: int) -> None:
        self._tokenizer = model.tokenizer._tokenizer
        self._end_tokens = model.end_tokens
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = StopStrings(request.stop)
        self._stream = request.stream
        self._prompt_tokens = prompt_tokens
        self._shown = ""
        self._tokens = 0
        self._last: int | None = None

    def add(self, tokens: Sequence[int], is_finished: bool) -> Chunk | None:
        """The next piece, if there is one to show; the last one has a finish reason."""
        for token in tokens:
            self._shown += self._stops.add(self._decoder.step(self._tokenizer, token) or "")
            self._last = token
        self._tokens += len(tokens)
        if is_finished or self._stops.hit:
            ended = self._stops.hit or self._last in self._end_tokens
            return Chunk(
                text=self._shown + self._stops.finish(),
                finish_reason="stop" if ended else "length",
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._tokens,
            )
        if not (self._stream and self._shown):
            return None
        chunk = Chunk(text=self._shown, completion_tokens=self._tokens)
        self._shown = ""
        return chunk


def read_model(folder: Path, model_class: Any) -> tuple[Any, Any]:
    """Tokenizer and model, in bfloat16, for inference; raises UserError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = model_class.from_pretrained(
            folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:
        # Damaged files surface as errors of safetensors, json, torch or transformers alike.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"The model in {folder} cannot be read: {first}") from error
    damaged = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if damaged:
        raise UserError(
            f"The model in {folder} has weights that are not finite numbers ({damaged[0]}, "
            f"{len(damaged)} in all): its training went wrong. Serve an earlier checkpoint."
        )
    pack_linear_layers(model)
    return tokenizer, model.eval()


def end_tokens_of(model: Any) -> list[int]:
    """The tokens that end an answer; one that never comes where the model names none."""
    ends = model.generation_config.eos_token_id
    return list(ends) if isinstance(ends, list) else [-1 if ends is None else ends]
