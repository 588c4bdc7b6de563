"""Settings of who is told what happened; no Dagster here."""

from pydantic import Field

from artifacts.settings import Settings


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
