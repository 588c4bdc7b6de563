"""Commands that look after the store, and those that keep webserver, daemon and board running."""

import json
import signal
import sys
from functools import partial
from pathlib import Path

import click

from artifacts.errors import shown
from llm_assets.cli.options import json_option
from llm_assets.services import (
    BOARD_PORT,
    HOST,
    PORT,
    STATE_FOLDER,
    bring_up,
    stop,
)


@click.command()
@click.option("--yes", is_flag=True, help="Delete what is listed.")
@json_option
def clean(yes: bool, as_json: bool) -> None:
    """Delete what `retention` no longer keeps.

    Lists it first. --yes deletes it.

    \b
    Examples:
      llm-assets clean          lists what would be deleted, and why
      llm-assets clean --yes
    """
    from llm_assets.cli.session import open_session
    from llm_assets.maintenance.cleaning import clean as clean_store

    session = open_session()
    settings = session.settings
    cleaning = clean_store(
        session.pipeline.record,
        session.registry,
        settings.retention,
        settings.forgetting,
        yes,
        (lambda line: None) if as_json else click.echo,
    )
    if as_json:
        click.echo(json.dumps(cleaning.as_json() | {"removed": yes}, indent=2))
    elif cleaning.removals and not yes:
        click.echo("Nothing was removed. Remove it with: llm-assets clean --yes")


@click.command()
@click.argument("artifacts", nargs=-1)
@click.option("--repair", is_flag=True, help="Repair what can be repaired.")
@json_option
def doctor(artifacts: tuple[str, ...], repair: bool, as_json: bool) -> None:
    """Verify the store byte by byte.

    Checks the whole store, or only ARTIFACTS given as kind/fingerprint.

    \b
    Examples:
      llm-assets doctor
      llm-assets doctor --repair
      llm-assets doctor checkpoint/0123456789abcdef0123
    """
    from llm_assets.cli.session import open_session
    from llm_assets.endpoint.folder import endpoint_folder
    from llm_assets.maintenance.doctor import examine

    session = open_session()
    endpoint = endpoint_folder(session.settings)
    examination = examine(session.record, session.registry, endpoint, artifacts)
    if not as_json:
        for line in examination.lines(repair):
            click.echo(shown(line))
    faults = examination.faults
    left = examination.repair(partial(click.echo, err=True)) if repair else faults
    if as_json:
        click.echo(json.dumps(examination.as_json(left), indent=2))
    elif repair:
        click.echo(f"{len(faults) - len(left)} of {len(faults)} faults mended.")
    if left:
        sys.exit(1)


MAINTENANCE = (clean, doctor)


ENDING = {signal.SIGTERM, signal.SIGINT}
port_option = click.option(
    "--port", default=PORT, show_default=True, help=f"Port of the UI on {HOST}."
)


@click.command()
@port_option
@click.option("--board-port", default=BOARD_PORT, show_default=True, help="Port of the board.")
@click.option("--wait", is_flag=True, help="Stay until a signal, then stop them; for containers.")
def up(port: int, board_port: int, wait: bool) -> None:
    """Start the board, the UI and the daemon.

    Any of them that dies is restarted.

    \b
    Examples:
      llm-assets --config config/manuals.yaml up --port 3100
      llm-assets up --wait      the main program of a container
    """
    from llm_assets.config import config_path, load_settings

    load_settings(config_path())
    bring_up(Path.cwd(), config_path(), port, board_port, click.echo)
    click.echo(f"board: http://{HOST}:{board_port}   UI: http://{HOST}:{port}")
    click.echo(shown(f"logs: {Path.cwd() / STATE_FOLDER}   end them with: llm-assets down"))
    if wait:
        # Not before: those that were started would never hear a signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        signal.sigwait(ENDING)
        stop(Path.cwd() / STATE_FOLDER)


@click.command()
def down() -> None:
    """Stop what `up` started, and its runs.

    The endpoint keeps serving. Stopped runs count as failed; the next `up` launches them again, and
    they resume where they stopped.

    \b
    Example:
      llm-assets down
    """
    click.echo("Stopped." if stop(Path.cwd() / STATE_FOLDER) else "Nothing was running.")


@click.command()
@click.option(
    "--port", default=BOARD_PORT, show_default=True, help=f"Port on {HOST}; 0 for any free port."
)
def board(port: int) -> None:
    """Ask, compare, trace and decide in the browser.

    Shows what the model has learned, its versions, the text behind an answer, and decisions.
    Prometheus can scrape the graph's metrics at /metrics. `up` starts it, too.

    \b
    Example:
      llm-assets board --port 8013
    """
    from llm_assets.board.server import open_board, serve_board
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions import status_of

    session = open_session()
    command = [sys.argv[0], "--config", str(session.path.absolute())]
    opened = open_board(
        session.settings,
        session.record,
        session.registry,
        lambda: status_of(session),
        command,
    )
    serve_board(opened, port, click.echo)


SERVICES = (up, down, board)
