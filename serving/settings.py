"""What the local endpoint offers and how much it takes on."""

from typing import Any

from pydantic import Field

from artifacts.settings import Settings


class EndpointSettings(Settings):
    """The `endpoint` asset on a laptop."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `token_variable`."""
    port: int = Field(default=8010, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    token_variable: str | None = None
    """Environment variable that holds the bearer token; absent asks for none (loopback only)."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Most tokens that one request may ask for; more is refused."""
    max_prompt_tokens: int = Field(default=1_536, ge=1)
    """Longest prompt in tokens; a longer one is refused."""
    max_body_bytes: int = Field(default=256 * 1024, ge=1_024)
    """Largest request body in bytes."""
    max_waiting: int = Field(default=64, ge=1)
    """Requests in work at once; the next one is told 429 with Retry-After."""
    request_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which an unfinished answer is given up."""
    start_timeout: float = Field(default=180.0, gt=0)
    """Seconds that an engine may take to load its model."""
    log_prompts: bool = False
    """Write prompts into the request log; off, since prompts are private."""

    def content(self) -> dict[str, Any]:
        """What decides the artifact: nothing, since this is all about where and how to serve."""
        return {}
