"""Settings of what happens by itself, who is told, and what is kept; no Dagster here."""

import re
from typing import Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from artifacts.settings import Settings

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
WINDOW = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))? )?(?P<start>\d\d:\d\d)-(?P<end>\d\d:\d\d)"
)


class QualitySettings(Settings):
    """When what serves counts as worse than it was, and what happens then."""

    then: Literal["tell", "retrain"] = "tell"
    """`tell` says so, to those that `notifications` names too; `retrain` besides makes the graph
    once for each version, trained on from the model that serves."""
    most_failures: float = Field(default=0.05, ge=0, lt=1)
    """Share of the requests since the look before that may fail (status 500 and above)."""


class AutomationSettings(Settings):
    """When the graph is made by itself, and when it is not."""

    enabled: bool = False
    """Whether sensors and schedules are on from the start; each can be switched in the UI too.
    Nothing happens by itself without a running `dagster-daemon` (`make up` keeps one)."""
    continue_from_champion: bool = True
    """Whether what is launched trains on from the model that serves, long enough to read what
    arrived last; otherwise it trains as `checkpoint` says."""
    time_zone: str = "UTC"
    """Of every cron line and of `blackouts`, such as `Europe/Berlin`."""
    blackouts: tuple[str, ...] = ()
    """Times at which nothing is launched: `08:00-18:00` or `mon-fri 08:00-18:00`; a window may
    pass midnight."""
    check_seconds: int = Field(default=300, ge=1)
    """How often the sources and the endpoint are looked at."""
    quiet_minutes: float = Field(default=5, ge=0)
    """How long the text must stay as it is before it is trained on."""
    minimum_changed_megabytes: float = Field(default=0, ge=0)
    """How much of the files must differ from what the wanted model knows, where all sources are
    files; files that were only renamed never count. Other sources count whenever they change."""
    retries: int = Field(default=3, ge=0)
    """How often a failed run is launched again."""
    retry_minutes: float = Field(default=10, ge=0)
    """Pause before the first retry; each further one waits twice as long."""
    fresh_days: float | None = Field(default=30, gt=0)
    """Days after which a source that has not changed, text that was not read again, or an endpoint
    that was not looked after, counts as stale in the UI; null for never."""
    observe_cron: str = "0 * * * *"
    """When a schedule looks at the sources for the UI, as a cron line in `time_zone`; nothing is
    trained by it. It is on from the start, also where `enabled` is not, unless looking is billed: a
    BigQuery source with a `watermark_column` runs a query."""
    new_base_model: Literal["tell", "retrain", "ignore"] = "tell"
    """What happens when the folder or package of `base_model` holds other weights than the ones
    trained on: `retrain` makes the graph from them, as `checkpoint` says. Of a new revision on the
    Hub people are told, since the pipeline file pins one."""
    quality: QualitySettings = QualitySettings()
    longer_attempts: int = Field(default=1, ge=0)
    """How often a model that the gate rejected is followed by one trained twice as long on the
    same text, before more text or a person is waited for."""
    monthly_hours: float | None = Field(default=None, gt=0)
    """Hours that the runs launched by automation may take in a calendar month, all together."""
    monthly_cost: float | None = Field(default=None, gt=0)
    """The same in money, at `cost_per_hour`."""
    cost_per_hour: float | None = Field(default=None, gt=0)
    """Price of an hour of running, in your currency."""

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError("is no time zone; give a name such as `Europe/Berlin`") from None
        return name

    @field_validator("blackouts")
    @classmethod
    def _are_windows(cls, windows: tuple[str, ...]) -> tuple[str, ...]:
        for window in windows:
            found = WINDOW.fullmatch(window)
            days = {found["first"], found["last"]} - {None} if found else set()
            times = (found["start"], found["end"]) if found else ("99",)
            if not days <= set(DAYS) or any(time > "24:00" or time[3:] > "59" for time in times):
                raise ValueError(f"{window!r} is no window; write `mon-fri 08:00-18:00`")
        return windows

    @model_validator(mode="after")
    def _can_count_cost(self) -> Self:
        if self.monthly_cost and not self.cost_per_hour:
            raise ValueError("monthly_cost needs cost_per_hour")
        return self

    @property
    def hours(self) -> float | None:
        """Hours a month that launches may take; None for no limit."""
        limits = [self.monthly_hours] if self.monthly_hours else []
        if self.monthly_cost and self.cost_per_hour:
            limits.append(self.monthly_cost / self.cost_per_hour)
        return min(limits, default=None)


class EmailSettings(Settings):
    """A mail server, and who writes to whom."""

    host: str
    """The mail server (SMTP)."""
    port: int = Field(default=587, ge=1, le=65_535)
    """465 is encrypted from the start, 587 by STARTTLS, any other is not."""
    sender: str
    """From whom; also the user name, where there is a password."""
    to: tuple[str, ...] = Field(min_length=1)
    """To whom."""
    password_variable: str | None = None
    """Environment variable that holds the password; absent signs in nowhere."""


class NotificationSettings(Settings):
    """Who is told of promotions, rejections, failed runs, and of what waits for a person."""

    webhook_variable: str | None = None
    """Environment variable that holds the address of a webhook, which takes `{"text": ...}` as
    Slack's do; the address is a secret."""
    email: EmailSettings | None = None
    """The same by e-mail."""

    @property
    def is_on(self) -> bool:
        """Whether anybody is told."""
        return self.webhook_variable is not None or self.email is not None


class RetentionSettings(Settings):
    """What cleaning leaves in the store.

    What is current, serves, served before, is in use or stands behind one of those stays in any
    case, and so do the manifests behind every registered version. `llm-assets run` cleans a local
    store when it has succeeded, and the schedule at `cron`.
    """

    days: float = Field(default=30, ge=0)
    """Artifacts younger than this stay, and unfinished work touched since. The weights of
    registered versions stay by `versions` and `keep` alone."""
    versions: int = Field(default=2, ge=0)
    """So many of the newest registered versions keep their weights, text and evaluation."""
    keep: tuple[int, ...] = ()
    """Numbers of the versions that keep theirs for ever."""
    optimizer_state: bool = False
    """Whether a finished training keeps its resumable state beside the exported model."""
    cache_gb: float = Field(default=20, gt=0)
    """Bound on all caches together, in 10^9 bytes; what was used longest ago goes first."""
    cron: str = "0 5 * * 0"
    """When the schedule cleans, as a cron line in `automation.time_zone`."""


class ForgettingSettings(Settings):
    """What `llm-assets forget` does beside keeping a document out of every later corpus."""

    signing_key: str = ".llm_assets/forgetting.pem"
    """File with the ed25519 key, in PEM, that signs certificates; one that is absent is made, and
    its public half beside it with the ending `.pub`."""
    grace_days: float = Field(default=7, ge=0)
    """How long the weights of withdrawn versions stay, for going back; then cleaning removes
    them, except of a version that still serves."""
