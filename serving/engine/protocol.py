"""What API server and engine say to each other over loopback: JSON lines."""

import hmac
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SECRET_VARIABLE = "ENGINE_SECRET"  # noqa: S105
FinishReason = Literal["stop", "length"]


class _Line(BaseModel):
    """Either says nothing that the other does not know."""

    model_config = ConfigDict(extra="forbid")


class Message(_Line):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class GenerateRequest(_Line):
    """What the engine is asked for: the continuation of a text, or of a chat."""

    prompt: str | list[int] | None = None
    """Raw text, no chat template; or its tokens."""
    messages: list[Message] | None = None
    """A chat, rendered with the model's own template."""
    allow_role_tokens: bool = False
    """Whether control tokens written in a turn are control tokens; they are text otherwise."""
    max_tokens: int = Field(ge=0)
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt that is taken; the engine alone can count tokens."""
    temperature: float = Field(default=0.0, ge=0)
    """0 takes the most likely token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: list[str] = []
    ignore_eos: bool = False
    """Whether to write on where the model would end."""
    seed: int | None = None
    """Of what is drawn at a temperature; the same request with the same seed draws the same."""
    stream: bool = True
    """Whether to send each piece when it is written, or everything in one line at the end."""
    logprobs: bool = False
    """Whether to say how likely each token was."""
    top: bool = False
    """Whether to say which token was most likely in each place of an echoed prompt, too."""
    echo: bool = False
    """Whether to give the prompt back before the answer, with its log-probabilities if asked."""
    written: str = ""
    """The beginning of the answer, written by an engine that died before it was complete."""


class TokenScore(_Line):
    """A token and how likely it was."""

    token: str
    logprob: float | None
    """Natural logarithm; None of a prompt's first token, which nothing predicts."""
    top: tuple[str, float] | None = None
    """The most likely token of this place and its log-probability."""


class Chunk(_Line):
    """One line of the engine's answer; the last one has a finish reason."""

    echo: str = ""
    """The prompt, before the first piece, where it was asked for."""
    text: str = ""
    scores: list[TokenScore] = []
    """Of the echoed prompt and of the tokens of this piece, where they were asked for."""
    class_scores: dict[str, float] = {}
    """Of a classifier's answer, the probability of each class."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    """Why generation ended early; nothing follows."""


class Refused(Exception):
    """The engine cannot serve this request at all: its answer has a status of 400."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def carries(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request's headers have the bearer token."""
    given = headers.get("authorization", "").encode()
    return hmac.compare_digest(given, f"Bearer {token}".encode())
