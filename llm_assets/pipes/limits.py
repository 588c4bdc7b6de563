"""How long a client waits, and how often it tries."""

from collections.abc import Callable
from dataclasses import dataclass, field

from llm_assets.pipes.retries import RetryPolicy
from llm_assets.pipes.service import RemoteJob


@dataclass(frozen=True)
class Limits:
    """How long to wait for what."""

    poll_seconds: float = 10.0
    """Longest time between two looks at a job in which nothing happens; the first come sooner."""
    pending_seconds: float | None = 3600.0
    """How long a job may wait for machines before it is cancelled; None waits for ever."""
    reason_seconds: float = 90.0
    """How long to wait for a failed job's reason, which services give some time after its state."""
    drain_seconds: float = 30.0
    """How long to wait for the last messages after a job has ended."""
    restarts: int = 3
    """How often an interrupted job (pre-emption, exit code 75) is started again within one run."""
    restart_delay_seconds: float = 10.0
    """Wait before the first restart; it doubles with each, up to ten minutes."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    objection: Callable[[RemoteJob], str | None] = lambda job: None
    """Asked at each look at a job; a reason that it must not go on has it cancelled."""
