"""The public request shapes: OpenAI completions and chat, and Vertex predict."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.errors import invalid
from serving.protocol import GenerateRequest, Message
from serving.settings import EndpointSettings

MAX_INSTANCES = 32
MAX_STOPS = 4

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Sampling(BaseModel):
    """What every request may say about how to write."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    """0 always takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []

    def generate_request(
        self,
        settings: EndpointSettings,
        prompt: str | None = None,
        messages: list[Message] | None = None,
    ) -> GenerateRequest:
        """The engine's request; raises HTTPException 400 where a limit is passed."""
        if self.max_tokens > settings.max_new_tokens:
            raise invalid(
                f"max_tokens is {self.max_tokens}; this endpoint writes at most "
                f"{settings.max_new_tokens}.",
                "max_tokens",
            )
        if prompt is not None and not prompt:
            raise invalid("The prompt is empty.", "prompt")
        return GenerateRequest(
            prompt=prompt,
            messages=messages,
            max_tokens=self.max_tokens,
            max_prompt_tokens=settings.max_prompt_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
        )


class _OpenAIRequest(Sampling):
    model: str | None = None
    stream: bool = False
    n: Literal[1] = 1
    user: str | None = None
    """Taken and ignored."""


class CompletionRequest(_OpenAIRequest):
    """`POST /v1/completions`."""

    prompt: str


class ChatRequest(_OpenAIRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)


class Instance(Sampling):
    """One of the instances of `POST /predict`, where it is not just a text."""

    prompt: str


class PredictRequest(BaseModel):
    """`POST /predict`, as Vertex AI sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    instances: list[str | Instance] = Field(min_length=1, max_length=MAX_INSTANCES)
    parameters: dict[str, Any] = {}
    """Sampling for the instances that are just a text."""

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        Sampling.model_validate(self.parameters)
        return self

    def generate_requests(self, settings: EndpointSettings) -> list[GenerateRequest]:
        """One engine request an instance."""
        common = Sampling.model_validate(self.parameters)
        return [
            common.generate_request(settings, prompt=instance)
            if isinstance(instance, str)
            else instance.generate_request(settings, prompt=instance.prompt)
            for instance in self.instances
        ]


def describe(error: ValidationError) -> tuple[str, str]:
    """A validation error as one sentence and the first faulty field."""
    faults = [
        (".".join(str(part) for part in fault["loc"]) or "body", fault["msg"])
        for fault in error.errors()
    ]
    return "; ".join(f"{field}: {text}" for field, text in faults[:5]) + ".", faults[0][0]
