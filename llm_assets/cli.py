"""The `llm-assets` command."""

import os
import sys
from pathlib import Path

import click

from artifacts.errors import UserError


@click.group()
def commands() -> None:
    """Keep a language model current on your own text."""


@commands.command()
def run() -> None:
    """Materialize the whole graph and show what came out."""
    from llm_assets.terminal.run import run_pipeline

    sys.exit(run_pipeline(verbose=os.environ.get("V", "0") not in ("", "0")))


@commands.command()
def stop() -> None:
    """End the endpoint."""
    from llm_assets.config import config_path, load_settings
    from llm_assets.resources.serving import stop_endpoint

    ended = stop_endpoint(load_settings(config_path()))
    click.echo("The endpoint has ended." if ended else "No endpoint was running.")


@commands.command()
def docs() -> None:
    """Write docs/settings.md and docs/benchmarks.md from the code and the results."""
    from llm_assets.reference import write_reference

    for path in write_reference(Path("docs")):
        click.echo(f"wrote {path}")


def main() -> None:
    """Entry point: a user's mistake is one message, without a traceback."""
    try:
        commands()
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
