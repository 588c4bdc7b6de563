"""What the local endpoint offers and how much it takes on, where it listens, and who may ask it."""

import errno
import os
import re
import socket
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from artifacts.errors import UserError
from artifacts.settings import Address, EnvironmentVariable, Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
Weights = Literal["bf16", "int8", "int4", "f32"]
QUANTIZED: tuple[Weights, ...] = ("int8", "int4")
"""Formats that hold other weights than were trained; OpenVINO alone has them."""


# An address of IPv6 has two colons at least, so that a port after any other is not taken for one.
HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
# `file://` is what programs made of web pages send, such as those of Electron.
ORIGIN = re.compile(r"null|file://|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?")
DEFAULT_PORT = re.compile(r"^(http://.*):80$|^(https://.*):443$")


SAVED = "saved"
"""Context of validation: settings that a running endpoint was started with, which a release before
may have accepted. It has to go on by them, and can only be ended by whoever can read them."""


def unless_saved(check: Callable[[str], str]) -> AfterValidator:
    """A check of what a person sets; what was saved is kept as it is where it does not pass."""

    def checked(value: str, info: ValidationInfo) -> str:
        try:
            return check(value)
        except ValueError:
            if info.context == SAVED:
                return value
            raise

    return AfterValidator(checked)


def check_host(host: str) -> str:
    """The address to listen on, if it is one; raises ValueError otherwise."""
    if not HOST.fullmatch(host):
        raise ValueError("must be a name or an IP address alone; the port is `endpoint.port`")
    return host


Host = Annotated[str, unless_saved(check_host)]


def as_browsers_send(origin: str) -> str:
    """An origin in the one form in which browsers send it; raises ValueError where none does."""
    sent = DEFAULT_PORT.sub(r"\1\2", re.sub("(?<=[^/])/$", "", origin.lower()))
    # `null` is what pages from files and in sandboxes have, all alike.
    if not ORIGIN.fullmatch(sent):
        raise ValueError("must be an origin such as https://page.example, with no path or pattern")
    return sent


class OpenAIEngine(Settings):
    """Another server as the engine, called through OpenAI's `/v1/completions`: vLLM, SGLang,
    llama-server."""

    address: Address = "http://127.0.0.1:{port}/v1"
    """Its base URL; `{port}` is a free port, which is passed to `command`."""
    command: tuple[str, ...] = ()
    """The command that starts it for every version, one word per entry; `{model}` is the version's
    folder, and `{port}`, which must occur, is the port to listen on. If the server is already
    running, leave this unset and set `address`."""
    model: str = "{model}"
    """The name of the model on that server: by default the version's folder, as vLLM and SGLang
    have it."""
    key_variable: EnvironmentVariable | None = None
    """Environment variable that holds its API key; leave it unset if the server needs no key."""
    unchecked: bool = False
    """Let a version serve even if the engine tells no log-probabilities of a prompt, neither with
    `echo` nor with `logit_bias`, without which nothing shows that it serves the model that was
    evaluated."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        # With a command, `{port}` has to stand both in it and in the address; without one, in
        # neither.
        in_command = any("{port}" in word for word in self.command)
        if in_command != bool(self.command) or in_command != ("{port}" in self.address):
            raise ValueError(
                "give a command with {port} in it, such as [vllm, serve, '{model}', --port, "
                "'{port}'], or the address, with its port, of a server that is already running"
            )
        return self


class RolloutSettings(Settings):
    """How a new version takes over from the old one."""

    steps: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.1, 0.5)
    """Shares of the traffic that the new version gets, one after another, before it gets all of
    it."""
    step_seconds: float = Field(default=2.0, ge=0)
    """Minimum time for which each share is watched, in seconds."""
    min_requests: int = Field(default=500, ge=1)
    """Requests that each version must answer in a step before the next one begins. A step with
    fewer requests ends `request_timeout` after `step_seconds` (on Google Cloud, the endpoint's
    `request_seconds` after it); a version that gets no request at all is not waited for."""
    block: int = Field(default=20, ge=1)
    """Number of answers of each version whose mean time per token (on Google Cloud, per answer) is
    compared at a time."""
    warm_up: int = Field(default=50, ge=0)
    """Number of first answers of a new version whose speed does not count, since its caches are
    cold."""


class JournalSettings(Settings):
    """What is recorded about answers, for `llm-assets trace --request`, in files on this machine
    that only their owner can read."""

    keep: Literal["off", "hashes", "text"] = "text"
    """`off` records nothing, `hashes` records which version answered, with keyed hashes of prompt
    and answer, and `text` also records the texts."""
    days: float = Field(default=1, ge=0)
    """How many whole days (UTC) after the day of an answer its entry can be found; the first answer
    of each day deletes older entries."""

    @field_validator("keep", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        # YAML reads `off` without quotes as false.
        return "off" if value is False else value


class EndpointSettings(Settings):
    """The `endpoint` asset. With `platform: google_cloud`, only `rollout` applies; the rest is set
    in `config/google_cloud.yaml`."""

    host: Host = "127.0.0.1"
    """Address to listen on. Any address other than loopback needs `token_variable`."""
    port: int = Field(default=8010, ge=0, le=65_535)
    """Port to listen on; 0 picks a free one."""
    token_variable: EnvironmentVariable | None = None
    """Environment variable that holds the bearer token; if unset, no token is needed (loopback
    only)."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens that a request may ask for; requests for more are rejected."""
    max_prompt_tokens: int = Field(default=1_536, ge=1)
    """Maximum length of a prompt, in tokens; longer ones are rejected."""
    max_body_bytes: int = Field(default=256 * 1024, ge=1_024)
    """Maximum size of a request body, in bytes."""
    max_waiting: int = Field(default=64, ge=1)
    """Maximum number of requests in flight; further ones get a 429 with Retry-After."""
    max_connections: int = Field(default=512, ge=1)
    """Maximum number of open connections; further ones get a 503 with Retry-After and are closed.
    The system's limit on open files may lower it."""
    header_timeout: float = Field(default=10.0, gt=0)
    """Seconds after which a connection is closed if no complete request header has arrived, or if
    the client has stopped reading its answer."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names other than loopback's by which clients may call an endpoint that listens on
    loopback."""
    allowed_origins: tuple[Annotated[str, unless_saved(as_browsers_send)], ...] = ()
    """Origins of web pages that may use the endpoint (CORS), such as `https://page.example`, with
    the port if there is one and without a path; none by default."""
    request_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which an unfinished answer is abandoned."""
    body_timeout: float = Field(default=10.0, gt=0)
    """Seconds that a client may take to send the body of its request."""
    engine_timeout: float = Field(default=30.0, gt=0)
    """Seconds for which an engine may neither answer a health check nor generate anything before it
    is restarted."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to load its model, including the one-time conversion."""
    engine: Annotated[
        Annotated[Literal["auto", "openvino", "transformers"], Tag("name")]
        | Annotated[OpenAIEngine, Tag("server")],
        Discriminator(lambda value: "name" if isinstance(value, str) else "server"),
    ] = "auto"
    """The engine: `openvino` is fast on a CPU; `transformers` runs every supported model and is the
    reference; `auto` uses OpenVINO if it can run the model, and the log says which engine it chose
    and why. Alternatively, another server, such as vLLM on a GPU, by its command or its address."""
    weights: Weights = "bf16"
    """How weights are stored: `int8` and `int4` (OpenVINO only) are smaller and faster but lose a
    little quality, which the gate takes into account; they are refused if it decides by another
    metric than bits per byte. `f32` keeps the exported weights unchanged; on a processor without
    bfloat16 it takes more memory, and is slower for one client and faster for many. Another server
    as the engine stores them in its own way."""
    threads: int | None = Field(default=None, ge=1)
    """Number of threads for an engine's computation; if unset, one for each CPU that it may use."""
    cache_tokens: int = Field(default=16_384, ge=512)
    """With OpenVINO, the size of the KV cache in tokens over all requests in flight; further
    requests wait. With `transformers`, the maximum length of one request's prompt and answer
    together."""
    rollout: RolloutSettings = RolloutSettings()
    """How a new version takes over from the old one."""
    journal: JournalSettings = JournalSettings()
    """What is recorded about answers."""


def listen(
    host: str, port: int, chosen_by: str = "`endpoint.port` in the pipeline file"
) -> socket.socket:
    """A listening socket.

    Args:
        chosen_by: what chooses the port, as a message names it.

    Raises:
        UserError: the port is taken or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Connections wait there while an API server that died is started again.
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # Python adds the address, in brackets, to what the system says.
        reason = (error.strerror or str(error)).partition(" (")[0]
        # The errors of a resolver have negative numbers.
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
            raise UserError(
                f"Cannot listen on {host} ({reason}). Set `endpoint.host` to an address of this "
                "machine, such as 127.0.0.1."
            ) from error
        raise UserError(
            f"Cannot listen on {host} port {port} ({reason}). Another program may be using it: "
            f"choose another {chosen_by}, or end that program."
        ) from error


def bearer_token(settings: EndpointSettings) -> str | None:
    """The token to ask for; raises UserError where one is needed and there is none, or no client
    could send it."""
    if settings.token_variable:
        token = os.environ.get(settings.token_variable, "")
        if not token:
            raise UserError(
                f"`endpoint.token_variable` names {settings.token_variable}, which is not set. Put "
                "the bearer token into it."
            )
        if not (token.isascii() and token.isprintable()) or token != token.strip():
            raise UserError(
                f"The bearer token in {settings.token_variable} (`endpoint.token_variable`) cannot "
                "be sent in a header: it has a line break, a blank at an end, or a character that "
                "is not ASCII. Put one without them into it."
            )
        return token
    if settings.host not in LOOPBACK:
        raise UserError(
            f"`endpoint.host` is {settings.host}, which others can reach: set "
            "`endpoint.token_variable` to the name of a variable that holds a bearer token."
        )
    return None
