"""Settings of what happens by itself, who is told, and what is kept; no Dagster here."""

import os
import re
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, field_validator, model_validator

from artifacts.settings import EnvironmentVariable, Settings
from artifacts.storage.files import LocalPath

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY, _TIME = "|".join(DAYS), r"(?:[01]\d|2[0-3]):[0-5]\d|24:00"
WINDOW = re.compile(
    rf"(?:(?P<first>{_DAY})(?:-(?P<last>{_DAY}))? )?(?P<start>{_TIME})-(?P<end>{_TIME})"
)

_DAY_OF_MONTH, _WEEKDAY = r"0?[1-9]|[12]\d|3[01]", rf"[0-7]|{_DAY}"
_NTH = rf"(?:l[0-7]|(?:{_WEEKDAY})#[1-5])"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


# `(?!)` matches nothing, so without an argument there is no other item and no other text.
def _cron_field(value: str, item: str = "(?!)", whole: str = "(?!)") -> re.Pattern[str]:
    """Lists of values, ranges and steps; also of another item, or another text as a whole."""
    part = rf"(?:(?:\*|(?:{value})(?:-(?:{value}))?)(?:/\d*[1-9]\d*)?|{item})"
    return re.compile(rf"{part}(?:,{part})*|{whole}")


# Dagster refuses some of what other programs take: `l/2`, `?` in a list, and the last Friday (`l5`)
# or the second one (`5#2`) in a list with plain days of the week.
CRON_FIELDS = (
    _cron_field(r"[0-5]?\d"),
    _cron_field(r"[01]?\d|2[0-3]"),
    _cron_field(_DAY_OF_MONTH, item=rf"l|(?:{_DAY_OF_MONTH})-l(?:/\d*[1-9]\d*)?", whole=r"\?"),
    _cron_field(rf"0?[1-9]|1[0-2]|{'|'.join(_MONTHS)}"),
    _cron_field(_WEEKDAY, whole=rf"\?|{_NTH}(?:,{_NTH})*"),
)
"""Minute, hour, day of the month, month, day of the week."""
CRON_NAME = re.compile("@(?:hourly|midnight|daily|weekly|monthly|yearly|annually)")
NO_DAY = re.compile(r"3[01] (?:0?2|feb)|31 (?:0?[469]|11|apr|jun|sep|nov)")
"""Day and month of a date that does not exist."""


def _check_cron(text: str) -> str:
    """The expression, if it is valid; Dagster would refuse it only when it loads the graph."""
    fields = text.lower().split()
    is_cron = len(fields) == len(CRON_FIELDS) and all(
        form.fullmatch(field) for form, field in zip(CRON_FIELDS, fields, strict=True)
    )
    if not is_cron and not CRON_NAME.fullmatch(text.lower()):
        raise ValueError(
            "is not a cron expression; write minute, hour, day of the month, month and day of the "
            "week, such as `0 3 * * 1` for Mondays at 3:00"
        )
    if NO_DAY.fullmatch(" ".join(fields[2:4])):
        raise ValueError("names a day that no year has; for the last of a month, write `L`")
    return text


Cron = Annotated[str, AfterValidator(_check_cron)]


MOST_DAYS = 36_525
MOST_MINUTES = 525_960
"""A hundred years, and a year: with infinite values, no time can be computed."""


class QualitySettings(Settings):
    """What happens if the serving version is degraded.

    That is so if too many requests fail, or if its bits on held-out text are no longer those that
    its evaluation measured. A local endpoint is checked every 15 minutes; for one on Google Cloud,
    set up alerts there.
    """

    then: Literal["tell", "retrain"] = "tell"
    """`tell` reports it, also to those whom `notifications` names; `retrain` additionally runs the
    graph, which trains the serving model further even if the text is unchanged, and again as often
    as `automation.retries` allows if that does not help, each time twice as long, at most eight
    times the usual length."""
    most_failures: float = Field(default=0.05, ge=0, lt=1)
    """Maximum share of the requests since the previous check that may fail (status 500 and above);
    fewer than 20 requests are counted with those of the next check."""


WHOLE_TEXT = 0.95
"""From this coverage on, a text counts as read. A row of which most was read is not read again for
the rest of it, so after changes of the text a little may stay unread."""


class AutomationSettings(Settings):
    """When runs are launched automatically, and when they are not."""

    enabled: bool = False
    """Whether the sensors that launch runs are on from the start; each sensor and schedule can also
    be switched in the UI. Nothing happens automatically without a running `dagster-daemon`
    (`llm-assets up` keeps one running)."""
    continue_from_champion: bool = True
    """Whether runs for new text continue training the serving model: as long as `checkpoint.budget`
    says (its epochs are passes over the whole train split), or up to eight times as long if the
    newest text needs it. Otherwise, they train as `checkpoint` says."""
    least_coverage: float = Field(default=0, ge=0, le=WHOLE_TEXT)
    """Train further on unchanged text while the wanted version has read less than this share of the
    training text (`coverage`), for example 0.95; 0 for never. Each such run continues from the
    version before with text that was not read yet, is judged by the gate, and counts in the limits
    of automatic runs; it ends when the gate finds that the rest adds nothing. Needs
    `continue_from_champion`."""
    time_zone: str = "UTC"
    """Time zone of all cron expressions and of `blackouts`, such as `Europe/Berlin`."""
    blackouts: tuple[str, ...] = ()
    """Times at which no training run is launched: `08:00-18:00` or `mon-fri 08:00-18:00`; a window
    may span midnight."""
    check_seconds: int = Field(default=300, ge=1)
    """How often the sources, the base model and the endpoint are checked, in seconds."""
    quiet_minutes: float = Field(default=5, ge=0)
    """How many minutes the text, or another base model, must stay unchanged before it is trained
    on."""
    minimum_changed_megabytes: float = Field(default=0, ge=0)
    """If all sources are files: how many megabytes of files must have been added or removed since
    the text that the wanted version (the one that should serve) was trained on. A changed file
    counts as both, a renamed one not at all. If any source is of another type, every change
    counts."""
    retries: int = Field(default=3, ge=0)
    """How many times a failed run is launched again."""
    retry_minutes: float = Field(default=10, ge=0, le=MOST_MINUTES)
    """Minutes to wait before the first retry; each further wait is twice as long as the one
    before."""
    fresh_days: float | None = Field(default=30, ge=0.001, le=MOST_DAYS)
    """Days after which the UI shows a source as stale if it has not changed, and `raw_corpus` and
    `endpoint` if they have not been materialized again; `null` for never."""
    observe_cron: Cron = "0 * * * *"
    """When a schedule checks the sources for the UI, as a cron expression in `time_zone`; it never
    starts training. It is on from the start, but if checking is billed, only with `enabled`: for a
    BigQuery source with a `watermark_column`, it runs a query."""
    new_base_model: Literal["tell", "retrain", "ignore"] = "tell"
    """What happens if the folder or package of `base_model` contains weights other than those
    trained on: `tell` reports it, and `retrain` rebuilds the graph from them, as `checkpoint` says.
    A new revision on the Hub is only reported, since the pipeline file pins one. `ignore` reports
    neither."""
    quality: QualitySettings = QualitySettings()
    longer_attempts: int = Field(default=1, ge=0)
    """How many times a model that the gate rejected as not better is followed by one trained twice
    as long on the same text, before automation waits for more text or a person. Without
    `continue_from_champion`, none follows, since the same model would be trained again."""
    monthly_hours: float | None = Field(default=None, gt=0)
    """Maximum total hours of automatic runs in a calendar month; once they are used up, no more
    training runs are launched automatically until the next month."""
    monthly_cost: float | None = Field(default=None, gt=0)
    """The same limit in money, at `cost_per_hour`."""
    cost_per_hour: float | None = Field(default=None, gt=0)
    """Price of one hour of a run, in your currency."""

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError("is not a time zone; use a name such as `Europe/Berlin`") from None
        return name

    @field_validator("blackouts")
    @classmethod
    def _are_windows(cls, windows: tuple[str, ...]) -> tuple[str, ...]:
        for window in windows:
            match = WINDOW.fullmatch(window)
            if match is None:
                raise ValueError(f"{window!r} is not a time window; write `mon-fri 08:00-18:00`")
            if match["start"] == match["end"]:
                raise ValueError(f"{window!r} has no length; a whole day is `00:00-24:00`")
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


def _check_email_address(address: str) -> str:
    # In one line, as a message's head has it.
    if not re.fullmatch(r"[^\r\n]+@[^\r\n]+", address):
        raise ValueError("must be an e-mail address in one line, such as team@example.com")
    return address


EmailAddress = Annotated[str, AfterValidator(_check_email_address)]


class EmailSettings(Settings):
    """The mail server, the sender and the recipients."""

    host: str
    """The mail server (SMTP). Where it is encrypted, its certificate has to be for this name and
    valid; for an authority of your own, set `SSL_CERT_FILE`."""
    port: int = Field(default=587, ge=1, le=65_535)
    """Port 465 is encrypted from the start and 587 with STARTTLS; any other is not encrypted."""
    sender: EmailAddress
    """The sender's address; also the user name if there is a password."""
    to: tuple[EmailAddress, ...] = Field(min_length=1)
    """The recipients' addresses."""
    password_variable: EnvironmentVariable | None = None
    """Environment variable that holds the password; if unset, there is no login."""


class NotificationSettings(Settings):
    """Who is notified of promotions, rejections, failed runs and whatever waits for a person."""

    webhook_variable: EnvironmentVariable | None = None
    """Environment variable that holds the URL of a webhook that accepts `{"text": ...}`, as Slack's
    do; the URL is a secret."""
    email: EmailSettings | None = None
    """The same notifications by e-mail."""

    @property
    def is_on(self) -> bool:
        """Whether anybody is told."""
        return self.webhook_variable is not None or self.email is not None

    def unset(self) -> list[str]:
        """Warnings about variables that messages need and that this environment does not have."""
        password = self.email and self.email.password_variable
        variables = {"webhook_variable": self.webhook_variable, "email.password_variable": password}
        return [
            f"`notifications.{key}` names {variable}, which is not set here; without it where "
            "`llm-assets up` or the daemon is started, nothing is sent that way."
            for key, variable in variables.items()
            if variable and not os.environ.get(variable)
        ]


class RetentionSettings(Settings):
    """What cleaning leaves in the store.

    Artifacts that are current, serving, previously serving or in use are always kept, together with
    everything behind them, and so are the manifests behind every registered version; only weights
    that `llm-assets forget` withdrew go after `forgetting.grace_days`. `llm-assets run` and the job
    `retraining` clean a local store after they succeed, and the schedule cleans at `cron`.
    """

    days: float = Field(default=30, ge=0)
    """Artifacts younger than this are kept, and so is unfinished work touched within this time. For
    the weights of registered versions, only `versions` and `keep` count."""
    versions: int = Field(default=2, ge=0)
    """Number of newest registered versions that keep their weights, text and evaluation."""
    keep: tuple[int, ...] = ()
    """Numbers of the versions that keep their weights, text and evaluation forever."""
    optimizer_state: bool = False
    """Whether a finished training run keeps its resumable state (its last and its permanent
    checkpoints) beside the exported model."""
    cache_gb: float = Field(default=20, gt=0)
    """Maximum size of all caches together, in units of 10^9 bytes; the least recently used entries
    are deleted first."""
    cron: Cron = "0 5 * * 0"
    """When the schedule cleans, as a cron expression in `automation.time_zone`. For a store in a
    bucket, the schedule is off until you turn it on in the UI."""


class ForgettingSettings(Settings):
    """How `llm-assets forget` signs its certificates, and how long withdrawn weights are kept."""

    signing_key: LocalPath = ".llm_assets/forgetting.pem"
    """File with the ed25519 key, in PEM format, that signs certificates. If it does not exist, it
    is created, and so is a file with the public key, with the extension `.pub`."""
    grace_days: float = Field(default=7, ge=0)
    """How many days the weights of withdrawn versions are kept so that you can go back; then
    cleaning removes them, except those of a version that is still serving."""
