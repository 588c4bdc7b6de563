"""The public request shapes: OpenAI completions and chat, and Vertex predict."""

from itertools import accumulate
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.api.errors import invalid
from serving.engine.protocol import Chunk, GenerateRequest, Message, TokenScore
from serving.settings import EndpointSettings

MAX_INSTANCES = 32
MAX_STOPS = 4
MAX_CHOICES = 8

Body = TypeVar("Body", bound=BaseModel)
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


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


class Sampling(Strict):
    """What every request may say about how to generate."""

    max_tokens: int = Field(default=64, ge=1)
    temperature: Temperature = 0.0
    """0 always takes the most likely token."""
    top_p: TopP = 1.0
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []

    def generate_request(
        self,
        settings: EndpointSettings,
        prompt: str | list[int] | None = None,
        messages: list[Message] | None = None,
    ) -> GenerateRequest:
        """The engine's request; raises ServingError 400 where a limit is passed."""
        if self.max_tokens > settings.max_new_tokens:
            raise invalid(
                f"max_tokens is {self.max_tokens}; this endpoint generates at most "
                f"{settings.max_new_tokens}.",
                "max_tokens",
            )
        if prompt is not None and not prompt:
            raise invalid("The prompt is empty.", "prompt")
        return GenerateRequest(
            prompt=prompt,
            messages=messages,
            allow_role_tokens=settings.allow_role_tokens,
            max_tokens=self.max_tokens,
            max_prompt_tokens=settings.max_prompt_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
        )


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """Whether a last piece counts the tokens."""
    continuous_usage_stats: bool = False
    """Whether every piece counts those so far; vLLM's, as load generators ask for it."""


class OpenAIRequest(Sampling):
    """What completions and chats take.

    Clients send many fields at the value that changes nothing. That value is accepted, any other
    refused: a field that has no effect is never taken in silence.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken and ignored."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers to each prompt; at temperature 0 they are all the same."""
    best_of: Literal[1] = 1
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same request with the same seed draws the same, as long as one version answers."""
    ignore_eos: bool = False
    """Whether to write up to `max_tokens`; vLLM's, as load generators ask for it."""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.stream and self.n > 1:
            raise ValueError("n: a stream holds one answer")
        return self

    def generate_requests(self, settings: EndpointSettings) -> list[GenerateRequest]:
        """The engine's requests, `n` for each prompt; raises ServingError 400 beyond a limit."""
        raise NotImplementedError

    def choice(self, chunk: Chunk, index: int = 0) -> dict[str, Any]:
        """An answer, or a piece of one, as it is told."""
        raise NotImplementedError

    def choices_of(self, wanted: GenerateRequest, **given: bool) -> list[GenerateRequest]:
        """The engine's request for each of the `n` answers; a seed counts on."""
        seeds = [None if self.seed is None else self.seed + number for number in range(self.n)]
        given["ignore_eos"] = self.ignore_eos
        return [wanted.model_copy(update=given | {"seed": seed}) for seed in seeds]


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_INSTANCES)]


class CompletionRequest(OpenAIRequest):
    """`POST /v1/completions`."""

    prompt: str | Tokens | Prompts
    """A text or its tokens, or several of one kind."""
    max_tokens: int = Field(default=64, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)
    """Whether to say how likely each token was, and with 1 which one was most likely, as far as the
    engine knows."""
    suffix: Literal[""] = ""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, a text or its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream and len(self.prompts) > 1:
            raise ValueError("a stream answers one prompt")
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens is 0, which makes sense with echo alone")
        return self

    def generate_requests(self, settings: EndpointSettings) -> list[GenerateRequest]:
        given = {"echo": self.echo, "logprobs": self.logprobs is not None}
        given["top"] = bool(self.logprobs)
        asked = [self.generate_request(settings, prompt=prompt) for prompt in self.prompts]
        return [choice for one in asked for choice in self.choices_of(one, **given)]

    def choice(self, chunk: Chunk, index: int = 0) -> dict[str, Any]:
        return {
            "index": index,
            "text": chunk.echo + chunk.text,
            "logprobs": _logprobs(chunk.scores) if chunk.scores else None,
            "finish_reason": chunk.finish_reason,
        }


class TextPart(Strict):
    """A part of a message, where it is not just a text."""

    type: Literal["text", "input_text", "output_text"]
    """The latter two of `/v1/responses`."""
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = []


class ChatMessage(Strict):
    """One turn as OpenAI's clients send it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    """Taken and ignored."""

    def as_text(self) -> Message:
        """The turn as chat templates know it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


class ResponseFormat(Strict):
    """The form of an answer: text."""

    type: Literal["text"] = "text"


class ChatRequest(OpenAIRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`."""
    logprobs: Literal[False] = False
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] = []
    tool_choice: Literal["none", "auto"] = "none"

    def generate_requests(self, settings: EndpointSettings) -> list[GenerateRequest]:
        tokens = self.max_completion_tokens or self.max_tokens
        sampling = self.model_copy(update={"max_tokens": tokens})
        messages = [message.as_text() for message in self.messages]
        return self.choices_of(sampling.generate_request(settings, messages=messages))

    def choice(self, chunk: Chunk, index: int = 0) -> dict[str, Any]:
        message = {"role": "assistant", "content": chunk.text}
        said = "delta" if self.stream else "message"
        return {"index": index, said: message, "finish_reason": chunk.finish_reason}


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
        return [
            self.parameters.generate_request(settings, prompt=instance)
            if isinstance(instance, str)
            else instance.generate_request(settings, prompt=instance.prompt)
            for instance in self.instances
        ]


def _logprobs(scores: list[TokenScore]) -> dict[str, Any]:
    """Log-probabilities as OpenAI's completions have them; offsets count from the first token."""
    ends = list(accumulate(len(score.token) for score in scores))
    tops = [
        None if score.top is None else dict([score.top, (score.token, score.logprob)])
        for score in scores
    ]
    return {
        "tokens": [score.token for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": [0, *ends[:-1]],
    }


def parse(kind: type[Body], content: Any) -> Body:
    """A body as a model; raises ServingError 400 with its faults and the first faulty field."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        faults = [
            (".".join(str(part) for part in fault["loc"]) or "body", fault["msg"])
            for fault in error.errors()
        ]
        told = "; ".join(f"{field}: {text}" for field, text in faults[:5])
        raise invalid(f"{told}.", faults[0][0]) from error
