"""What clients ask and how they are answered: OpenAI's completions and chat, predict.

Each shape is checked here, becomes the engine's requests, and writes their answers as its clients
read them, whole or as a stream of events.
"""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import islice
from time import time
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from serving.api.dispatcher import Stream
from serving.engine import protocol
from serving.engine.protocol import Chunk, GenerateRequest, TokenScore
from serving.errors import ServingError, invalid
from serving.settings import EndpointSettings
from serving.state import Desired

# OpenAI's own bounds are kept where there are any: four stop strings, log-probabilities of five
# tokens in completions and of twenty in chats, a temperature of 2, seeds of 64 bits.
MAX_INSTANCES = 32
MAX_STOPS = 4
MAX_CHOICES = 8
LEAST_TEMPERATURE = 1e-5
"""Below it the most likely token is taken, as vLLM does: engines divide by it in 32 bits."""
LEAST_TOP_P = 1e-5
"""What engines round to 0, which is no share."""

Body = TypeVar("Body", bound=BaseModel)
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """A body or a part of one: nothing is converted, nothing unknown taken.

    OpenAI's clients send null for what was not said.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None}


NOT_SUPPORTED = "is not supported"
LONGEST_SHOWN = 60
"""Characters of a value that a refusal repeats."""


def neutral(*values: Any) -> PlainValidator:
    """A validator of a field that is taken only at values that change nothing.

    Many clients send such fields. One that has no effect is never accepted in silence.
    """

    def check(value: Any, field: ValidationInfo) -> Any:
        if value not in values:
            # No more of it is written than is shown: it may be nested as deep as the stack is.
            excerpt = "".join(islice(json.JSONEncoder().iterencode(value), LONGEST_SHOWN))
            raise ValueError(f"{field.field_name}: {excerpt[:LONGEST_SHOWN]} {NOT_SUPPORTED}")
        return value

    return PlainValidator(check)


class Sampling(Strict):
    """What every request may say about how to generate."""

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    """0 always takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []

    def generate_request(
        self, settings: EndpointSettings, prompt: str | list[int] | None = None, **asked: Any
    ) -> GenerateRequest:
        """The engine's request; raises ServingError 400 where a limit is passed."""
        most = settings.max_new_tokens
        # Only what a client asked for is refused; the default is cut to what the endpoint allows.
        if self.max_tokens > most and "max_tokens" in self.model_fields_set:
            message = f"max_tokens is {self.max_tokens}; this endpoint generates at most {most}."
            raise invalid(message, "max_tokens")
        if prompt is not None and not prompt:
            raise invalid("The prompt is empty.", "prompt")
        return GenerateRequest(
            prompt=prompt,
            max_tokens=min(self.max_tokens, most),
            max_prompt_tokens=settings.max_prompt_tokens,
            temperature=self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=max(self.top_p, LEAST_TOP_P),
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            **asked,
        )


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """Whether a last piece counts the tokens."""
    continuous_usage_stats: bool = False
    """Whether every piece counts those so far; vLLM's, as load generators ask for it."""


class OpenAIRequest(Sampling):
    """What completions and chats take and give."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken and ignored."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers to each prompt; at temperature 0 they are all the same."""
    best_of: Annotated[Any, neutral(1)] = 1
    frequency_penalty: Annotated[Any, neutral(0)] = 0
    presence_penalty: Annotated[Any, neutral(0)] = 0
    logit_bias: Annotated[Any, neutral({})] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same request with the same seed draws the same, as long as one version answers."""
    ignore_eos: bool = False
    """Whether to write up to `max_tokens`; vLLM's, as load generators ask for it."""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.stream and self.n > 1:
            raise ValueError("n must be 1 for a stream")
        return self

    def asked(self) -> list[dict[str, Any]]:
        """What each prompt asks of the engine."""
        raise NotImplementedError

    def choice(self, chunk: Chunk, index: int = 0) -> dict[str, Any]:
        """An answer, or a piece of one, as it is told."""
        raise NotImplementedError

    def generate_requests(self, settings: EndpointSettings) -> list[GenerateRequest]:
        """The engine's requests, `n` for each prompt; raises ServingError 400 beyond a limit."""
        # Each answer to a prompt has the next seed, or all would be the same.
        seeds = [None if self.seed is None else self.seed + number for number in range(self.n)]
        return [
            self.generate_request(settings, seed=seed, ignore_eos=self.ignore_eos, **arguments)
            for arguments in self.asked()
            for seed in seeds
        ]

    def whole(self, name: str, by: Desired, answers: Sequence[Chunk]) -> dict[str, Any]:
        """All of a version's answers, to a request of this name."""
        choices = [self.choice(answer, index) for index, answer in enumerate(answers)]
        usage = _usage(answers, self.n)
        return self._envelope(name, by) | {"choices": choices, "usage": usage}

    async def events(self, name: str, stream: Stream) -> AsyncIterator[str]:
        """One answer as a stream of events, a piece each."""
        options, envelope = self.stream_options or StreamOptions(), self._envelope(name, stream.by)
        last_chunk, any_before = Chunk(), False
        try:
            while chunk := await stream.read():
                choice = self.choice(chunk)
                if any_before:
                    # Clients join what comes in pieces, and the role comes once.
                    choice.get("delta", {}).pop("role", None)
                last_chunk, piece, any_before = chunk, envelope | {"choices": [choice]}, True
                if options.continuous_usage_stats:
                    piece["usage"] = _usage([chunk])
                yield _event(piece)
        except ServingError as error:
            # The answer has begun with status 200, so only an event can tell of the fault.
            yield _event(error.body)
            return
        if options.include_usage:
            yield _event(envelope | {"choices": [], "usage": _usage([last_chunk])})
        yield "data: [DONE]\n\n"

    def _envelope(self, name: str, by: Desired) -> dict[str, Any]:
        """What the whole of an answer and each of its events have in common."""
        is_chat = isinstance(self, ChatRequest)
        kind = "chat.completion" if is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": f"{kind}.chunk" if is_chat and self.stream else kind,
            "created": int(time()),
            "model": by.model(self.model),
            "system_fingerprint": f"{by.version}-{by.fingerprint}",
        }


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
PROMPTS = Field(min_length=1, max_length=MAX_INSTANCES)
"""How many prompts one request may have."""


def _kind_of_prompt(prompt: Any) -> str:
    """The kind of a prompt, by the first of several, so that a fault is told of that kind alone."""
    if not isinstance(prompt, list):
        return "text"
    kinds = {int: "tokens", list: "several tokens"}
    return kinds.get(type(prompt[0]), "texts") if prompt else "texts"


class CompletionRequest(OpenAIRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Tokens, Tag("tokens")]
        | Annotated[list[str], PROMPTS, Tag("texts")]
        | Annotated[list[Tokens], PROMPTS, Tag("several tokens")],
        Discriminator(_kind_of_prompt),
    ]
    """A text or its tokens, or several of one kind."""
    max_tokens: int = Field(default=64, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=5)
    """Whether to say how likely each token was, and how many of the most likely ones to name."""
    suffix: Annotated[Any, neutral("")] = ""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, a text or its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream and len(self.prompts) > 1:
            raise ValueError("A stream takes one prompt")
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens may be 0 only with echo")
        return self

    def asked(self) -> list[dict[str, Any]]:
        scores = {"logprobs": self.logprobs is not None, "top": self.logprobs or 0}
        return [{"prompt": prompt, "echo": self.echo, **scores} for prompt in self.prompts]

    def choice(self, chunk: Chunk, index: int = 0) -> dict[str, Any]:
        return {
            "index": index,
            "text": chunk.echo + chunk.text,
            "logprobs": _logprobs(chunk.scores) if chunk.scores else None,
            "finish_reason": chunk.finish_reason,
        }


class TextPart(Strict):
    """A part of a message, where it is not just a text."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One turn as OpenAI's clients send it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    """Taken and ignored."""

    def as_text(self) -> protocol.Message:
        """The turn as chat templates know it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        # `developer` is OpenAI's newer name of the role that chat templates call `system`.
        return protocol.Message(
            role="system" if self.role == "developer" else self.role, content=text
        )


class ChatRequest(OpenAIRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many of the most likely tokens of each place to name."""
    response_format: Annotated[Any, neutral({"type": "text"}, {})] = {"type": "text"}
    tools: Annotated[Any, neutral([])] = []
    tool_choice: Annotated[Any, neutral("none", "auto")] = "none"

    def asked(self) -> list[dict[str, Any]]:
        messages = [message.as_text() for message in self.messages]
        scores = {"logprobs": self.logprobs, "top": self.top_logprobs or 0}
        return [{"messages": messages, **scores}]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs")
        if self.max_completion_tokens:
            # As a field that was set, it counts as asked for in `generate_request`.
            self.max_tokens = self.max_completion_tokens
        return self

    def choice(self, chunk: Chunk, index: int = 0) -> dict[str, Any]:
        message = {"role": "assistant", "content": chunk.text}
        key = "delta" if self.stream else "message"
        scores = [
            _logprob(score) | {"top_logprobs": [_logprob(likely) for likely in score.top]}
            for score in chunk.scores
        ]
        return {
            "index": index,
            key: message,
            "logprobs": {"content": scores, "refusal": None} if self.logprobs else None,
            "finish_reason": chunk.finish_reason,
        }


class Instance(Sampling):
    """One of the instances of `POST /predict`, where it is not just a text."""

    prompt: str


class PredictRequest(Strict):
    """`POST /predict`, as Vertex AI sends it."""

    instances: list[str | Instance] = Field(min_length=1, max_length=MAX_INSTANCES)
    parameters: Sampling = Sampling()
    """For the instances that are just a text."""

    def generate_requests(self, settings: EndpointSettings) -> list[GenerateRequest]:
        """One engine request per instance; raises ServingError 400 beyond a limit."""
        pairs = [
            (self.parameters, instance)
            if isinstance(instance, str)
            else (instance, instance.prompt)
            for instance in self.instances
        ]
        return [
            sampling.generate_request(
                settings,
                prompt=prompt,
                is_input=True,
                own_length="max_tokens" not in sampling.model_fields_set,
            )
            for sampling, prompt in pairs
        ]


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(ends: Sequence[Chunk], choices: int = 1) -> dict[str, int]:
    """Tokens of the prompts, each counted once for its `choices` answers in a row, and of all
    answers."""
    prompt = sum(end.prompt_tokens for end in ends[::choices])
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(scores: list[TokenScore]) -> dict[str, Any]:
    """Log-probabilities as OpenAI's completions have them; offsets count in the text sent."""
    # A token that was drawn is named as well, though it may be none of the most likely.
    tops = [
        {likely.token: likely.logprob for likely in [*score.top, score]} if score.top else None
        for score in scores
    ]
    return {
        "tokens": [score.token for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": [score.offset for score in scores],
    }


def _logprob(likely: protocol.LikelyToken) -> dict[str, Any]:
    """A token as OpenAI's chats have it."""
    return likely.model_dump(include={"token", "logprob", "bytes"})


def parse(kind: type[Body], content: Any) -> Body:
    """A body as a model; raises ServingError 400 with what is wrong and where."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # One fault, as OpenAI tells it. An unknown name says more than that the right one is
        # missing. Of the kinds of a union, the one that the value comes closest to, whose fault
        # lies deepest, says most.
        fault = min(
            error.errors(),
            key=lambda item: (item["type"].endswith(("missing", "_type")), -len(item["loc"])),
        )
        field, message = _message_of(fault, content)
        if message.endswith(NOT_SUPPORTED):
            supported = (
                name
                for name, info in kind.model_fields.items()
                if not any(isinstance(part, PlainValidator) for part in info.metadata)
            )
            message += f". Supported: {', '.join(sorted(supported))}"
        raise invalid(f"{message}.", field) from error


IN_WORDS = {
    "missing": "is required",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
}
"""Faults that pydantic words in terms of Python, in terms of JSON."""


def _message_of(fault: ErrorDetails, content: Any) -> tuple[str, str]:
    """The field that a fault is about, and what is wrong with it, in the API's words."""
    field = _place(fault, content)
    if fault["type"] == "extra_forbidden":
        return field, f"{field} {NOT_SUPPORTED}"
    if fault["type"] == "too_long":
        limit, actual = fault["ctx"]["max_length"], fault["ctx"]["actual_length"]
        return field, f"{field}: at most {limit} are allowed, and {actual} were sent"
    if fault["type"] == "value_error":
        return field, str(fault["ctx"]["error"])
    message = re.sub("^(Input|String) should", "must", fault["msg"])
    return field, f"{field}: {IN_WORDS.get(fault['type'], message)}"


def _place(fault: ErrorDetails, content: Any) -> str:
    """Where in the body a fault is: the path without the kinds of a union, which pydantic names."""
    path = []
    is_missing = fault["type"] == "missing"
    for part in fault["loc"][:-1] if is_missing else fault["loc"]:
        with suppress(LookupError, TypeError):
            content = content[part]
            path.append(str(part))
    if is_missing:
        path.append(str(fault["loc"][-1]))
    return ".".join(path) or "body"
