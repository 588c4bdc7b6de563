"""What the local endpoint offers and how much it takes on, where it listens, and who may ask it."""

import os
import socket
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from artifacts.errors import UserError
from artifacts.settings import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
Weights = Literal["bf16", "int8", "int4", "f32"]
QUANTIZED: tuple[Weights, ...] = ("int8", "int4")
"""Formats that hold other weights than were trained; OpenVINO alone has them."""


class OpenAIEngine(Settings):
    """Another server as the engine, by OpenAI's `/v1/completions`: vLLM, SGLang, llama-server."""

    address: str = "http://127.0.0.1:{port}/v1"
    """Where it answers; `{port}` is a free port, which its command is told."""
    command: tuple[str, ...] = ()
    """Starts it, a word each, for every version; `{model}` is the version's folder, `{port}` where
    it shall listen. Absent where it runs already."""
    model: str = "{model}"
    """What it calls the model; vLLM and SGLang call it by its folder."""
    key_variable: str | None = None
    """Environment variable that holds its key; unset: it needs no key."""
    unchecked: bool = False
    """Let a version serve though the engine gives no log-probabilities of prompts, so that nothing
    shows whether it serves what was judged."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.address.startswith(("http://", "https://")) or "@" in self.address:
            raise ValueError("address must be as http://127.0.0.1:8001/v1, without a password")
        in_command = any("{port}" in word for word in self.command)
        if in_command != bool(self.command) or in_command != ("{port}" in self.address):
            raise ValueError(
                "give a command with {port} in it, such as [vllm, serve, '{model}', --port, "
                "'{port}'], or else the address, with its port, of a server that runs already"
            )
        return self


class RolloutSettings(Settings):
    """How a new version takes over from the old one."""

    steps: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.1, 0.5)
    """Shares of the traffic that the new version gets, one after another, before all of it."""
    step_seconds: float = Field(default=2.0, ge=0)
    """How long each share is watched at least."""
    min_requests: int = Field(default=500, ge=1)
    """Requests that each version answers in a step before the next; a step in which fewer come ends
    after `request_timeout`, and one in which none come after `step_seconds`."""
    block: int = Field(default=20, ge=1)
    """Answers of each version whose mean seconds for a token are compared at a time."""
    warm_up: int = Field(default=50, ge=0)
    """First answers of a new version whose speed does not count, since its caches are cold."""


class JournalSettings(Settings):
    """What is kept of the answers, for `llm-assets trace --request`; in files of this machine that
    their owner alone may read."""

    keep: Literal["off", "hashes", "text"] = "text"
    """Nothing; which version answered, with keyed hashes of prompt and answer; or the texts too."""
    days: float = Field(default=1, ge=0)
    """Days after which what was kept is found no more; the next answer removes it."""


class EndpointSettings(Settings):
    """The `endpoint` asset: all of it on a laptop, `rollout` alone on Google Cloud."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `token_variable`."""
    port: int = Field(default=8010, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    token_variable: str | None = None
    """Environment variable that holds the bearer token; unset: no token (loopback only)."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Most tokens that one request may ask for; more is refused."""
    max_prompt_tokens: int = Field(default=1_536, ge=1)
    """Longest prompt in tokens; a longer one is refused."""
    max_body_bytes: int = Field(default=256 * 1024, ge=1_024)
    """Largest request body in bytes."""
    max_waiting: int = Field(default=64, ge=1)
    """Requests in flight at once; further ones get 429 with Retry-After."""
    max_connections: int = Field(default=512, ge=1)
    """Open connections; one more is told 503 and closed."""
    header_timeout: float = Field(default=10.0, gt=0)
    """Seconds of silence, or of an incomplete header, after which a connection is closed."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside loopback's by which clients may call an endpoint that listens on loopback."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the endpoint (CORS); none by default."""
    request_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which an unfinished answer is given up."""
    body_timeout: float = Field(default=10.0, gt=0)
    """Seconds that a client may take to send its request's body."""
    engine_timeout: float = Field(default=30.0, gt=0)
    """Seconds without an answer to its health check after which an engine is started again."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to load its model, and to convert it before, once."""
    engine: Annotated[
        Annotated[Literal["auto", "openvino", "transformers"], Tag("name")]
        | Annotated[OpenAIEngine, Tag("server")],
        Discriminator(lambda given: "name" if isinstance(given, str) else "server"),
    ] = "auto"
    """What computes: `openvino` is fast on a processor, `transformers` runs every model and is the
    reference; `auto` takes OpenVINO where it runs the model, and the log says which and why; or
    another server, such as vLLM on a GPU, by its command or its address."""
    weights: Weights = "bf16"
    """How weights are kept: `int8` and `int4` are smaller and faster, and lose a little, by which
    the gate judges and which is measured before a version gets traffic; `f32` is exact."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of an engine's arithmetic; absent takes the processors that it may use."""
    cache_tokens: int = Field(default=16_384, ge=512)
    """Tokens of all requests in flight whose keys and values an engine keeps; more wait."""
    rollout: RolloutSettings = RolloutSettings()
    """How a new version takes over from the old one."""
    journal: JournalSettings = JournalSettings()
    """What is kept of the answers."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises UserError where the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host} port {port} ({error.strerror}). Another program may be using "
            "it: choose another `endpoint.port` in the pipeline file, or end that program."
        ) from error


def bearer_token(settings: EndpointSettings) -> str | None:
    """The token to ask for; raises UserError where one is needed and there is none."""
    if settings.token_variable:
        token = os.environ.get(settings.token_variable, "")
        if not token:
            raise UserError(
                f"`endpoint.token_variable` names {settings.token_variable}, which is not set. Put "
                "the bearer token into it."
            )
        return token
    if settings.host not in LOOPBACK:
        raise UserError(
            f"`endpoint.host` is {settings.host}, which others can reach: set "
            "`endpoint.token_variable` to the name of a variable that holds a bearer token."
        )
    return None
