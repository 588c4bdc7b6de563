"""Settings of retention; no Dagster here."""

from pydantic import Field

from artifacts.settings import Settings


class RetentionSettings(Settings):
    """What cleaning leaves in the store.

    What is current, serves, served before, is in use or stands behind one of those stays in any
    case, and so do the manifests behind every registered version.
    """

    days: float = Field(default=30, ge=0)
    """Artifacts younger than this stay, and unfinished work touched since."""
    versions: int = Field(default=5, ge=0)
    """So many of the newest registered versions keep their weights, text and evaluation."""
    keep: tuple[int, ...] = ()
    """Numbers of the versions that keep theirs for ever."""
    optimizer_state: bool = False
    """Whether a finished training keeps its resumable state beside the exported model."""
    cache_gb: float = Field(default=20, gt=0)
    """Bound on all caches together, in 10^9 bytes; what was used longest ago goes first."""
    cron: str = "0 5 * * 0"
    """When the schedule cleans, as a cron line in `automation.time_zone`."""
