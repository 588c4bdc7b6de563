"""The `llm-assets` command: every one of its commands, in the order of their use.

What a command needs is imported when it runs: Dagster alone takes longer than most commands.
"""

import importlib.metadata
import logging
import os
import re
import sys
from pathlib import Path

import click

from artifacts.errors import UserError, shown
from artifacts.reasons import reason_of
from llm_assets.cli.commands import cloud, operations, pipeline, text, versions
from llm_assets.config import CONFIG_VARIABLE, DEFAULT_CONFIG, say_how_found


@click.group(context_settings={"max_content_width": 100})
@click.version_option(importlib.metadata.version("llm-assets"), prog_name="llm-assets")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help=f"The pipeline file. Default: the one that {CONFIG_VARIABLE} names, else "
    f"{DEFAULT_CONFIG}, else the only one here.",
)
def commands(config: Path | None) -> None:
    """Keep a language model current on your own text.

    \b
    Examples:
      llm-assets init /data/manuals                write a pipeline file for a folder
      llm-assets --config config/manuals.yaml run  build everything and serve the result
      llm-assets status                            what serves, and why
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("The current folder was deleted. Go to another one with cd.") from None
    if config is not None:
        # In the environment, so that programs which are started from here read the same file.
        os.environ[CONFIG_VARIABLE] = str(config)


for room in (pipeline, versions, text, operations, cloud):
    for command in room.COMMANDS:
        commands.add_command(command)


def main() -> None:
    """Entry point: whatever has a known reason is one message, without a traceback."""
    # gcsfs logs each error with a traceback before raising it.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # This is read before a command puts its own --config there.
    inherited = os.environ.get(CONFIG_VARIABLE)
    try:
        commands()
    except Exception as error:
        # What has no known reason keeps its traceback.
        reason = reason_of(error)
        if reason is None:
            raise
        click.echo(f"Error: {shown(reason)}", err=True)
        config = os.environ.get(CONFIG_VARIABLE)
        advises = re.search(r"\b(llm-assets|dagster) [a-z]", reason)
        if config and config != inherited and advises and Path(config).exists():
            # Advice in the message names a command without this one's --config.
            click.echo(say_how_found(config), err=True)
        sys.exit(1)
