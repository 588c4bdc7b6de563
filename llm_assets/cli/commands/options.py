"""Options and arguments that several commands have."""

import getpass
from pathlib import Path
from typing import Any

import click

from artifacts.errors import UserError, has_control_characters, shown_in_line

version_argument = click.argument("version", type=int)


class Utf8(click.types.StringParamType):
    """Text that is looked for; raises BadParameter for bytes of another encoding, which no text
    that was read has."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"'{shown_in_line(text)}' is not UTF-8. Set the terminal to UTF-8.")
        return text


UTF8 = Utf8()


def _check_line(_: click.Context, __: click.Parameter, value: str) -> str:
    """What is recorded with a decision; raises BadParameter unless it is a line of plain text."""
    if not value.strip():
        raise click.BadParameter("A decision needs a name and a reason: both are recorded with it.")
    if has_control_characters(value):
        raise click.BadParameter(
            f"'{shown_in_line(value)}' contains a line break or another control character. Write "
            "it on one line of plain text."
        )
    return value


def refuse_together(**given: Any) -> None:
    """Raise UsageError where more than one of these options is given: only one would count."""
    names = [f"--{name}" for name, value in given.items() if value not in (None, False)]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} exclude each other: give one of them.")


def read_text(path: Path) -> str:
    """The text of a file that was named; raises UserError where it cannot be read as text."""
    try:
        # Programs on Windows begin a UTF-8 file with a byte order mark.
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}. Give a UTF-8 file.") from error


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # The user id of a container may belong to no user.
        raise click.UsageError("This machine has no name for you. Give --name NAME.") from None


name_option = click.option(
    "--name",
    default=_login,
    callback=_check_line,
    help="Name recorded with the decision (default: your login).",
)
reason_option = click.option(
    "--reason", required=True, callback=_check_line, help="Reason, recorded with the decision."
)
# The board gives it: a decision is refused if the registry has changed since its page was shown.
generation_option = click.option(
    "--generation", type=int, hidden=True, help="Registry generation that the decision refers to."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
