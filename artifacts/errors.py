"""Errors that a user can act on."""

import os
import re

PREFIX_VARIABLE = "LLM_ASSETS_KEY_PREFIX"
"""Prefix of the asset keys of the pipeline in force; programs that it starts inherit it."""


class UserError(Exception):
    """A fault in what the user gave: a setting, a file, a missing input.

    The message names the file, key or row, says what was expected and what to do next. Entry points
    print it alone, without a traceback.
    """


class MissingArtifact(UserError):
    """An input artifact does not exist yet, or no longer."""


class LeaseLost(UserError):
    """Another maker has taken over; what this one made is not committed.

    Raised where this machine was asleep or cut off for longer than the lease lasts. Asking again
    finds what the other made.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} This machine was asleep, or cut off from the store, for too long, and nothing "
            "of its work was entered. Run the same command again: what exists by then is used."
        )


class DamagedArtifact(UserError):
    """A file of an artifact has another size or checksum than its manifest says."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def make_command(asset: str) -> str:
    """The shell line that makes an asset and whatever before it does not exist."""
    return materialize_command(f"*{asset}")


def materialize_command(*selected: str) -> str:
    """The shell line that materializes assets, an asterisk before a name meaning all before it.

    Asset keys have the prefix that PREFIX_VARIABLE names, as they have in the pipeline in force.
    """
    prefix = os.environ.get(PREFIX_VARIABLE)
    before = f"{prefix}/" if prefix else ""
    keys = ",".join(re.sub(r"^(\*?)", rf"\1{before}", name) for name in selected)
    return f'dagster asset materialize --select "{keys}"'


def mend_command(folder: str) -> str:
    """The shell line that sets a damaged artifact aside and makes it again from its inputs.

    Args:
        folder: of the artifact, wherever its store is: `.../<kind>/<fingerprint>`.
    """
    kind, fingerprint = folder.rstrip("/").split("/")[-2:]
    return f"llm-assets doctor --repair {kind}/{fingerprint} && {make_command(kind)}"
