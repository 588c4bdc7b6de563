"""Commands that keep a project going: its store, its services, its documentation."""

import importlib.metadata
import importlib.util
import json
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from artifacts.errors import UserError, shown
from artifacts.settings import read_yaml
from llm_assets import services
from llm_assets.cli.commands.options import json_option
from llm_assets.cli.session import open_session, use_this_folders_history
from llm_assets.config import command, config_path, load_settings
from llm_assets.settings_file import did_you_mean
from serving.settings import bearer_token

ENDING = {signal.SIGTERM, signal.SIGINT}
PORT = click.IntRange(1, 65535)


@click.command()
@click.option("--yes", is_flag=True, help="Delete what is listed.")
@json_option
def clean(yes: bool, as_json: bool) -> None:
    """List, and with --yes delete, what `retention` no longer keeps.

    Also deletes the weights of withdrawn versions once `forgetting.grace_days` have passed. Without
    --yes, only lists what would be deleted.

    \b
    Examples:
      llm-assets clean          lists what would be deleted, and why
      llm-assets clean --yes
    """
    from llm_assets.maintenance.cleaning import clean as clean_store

    session = open_session()
    cleaning = clean_store(
        session.record,
        session.registry,
        session.settings,
        yes,
        (lambda line: None) if as_json else click.echo,
    )
    if as_json:
        click.echo(json.dumps(cleaning.as_json() | {"removed": yes}, indent=2))
    elif cleaning.removals and not yes:
        click.echo(f"Nothing has been deleted. To delete all of this: {command()} clean --yes")


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
    from llm_assets.endpoint.folder import endpoint_folder
    from llm_assets.maintenance.doctor import examine

    session = open_session()
    endpoint = endpoint_folder(session.settings)
    report = partial(click.echo, err=True)
    examination = examine(session.record, session.registry, endpoint, artifacts, report)
    if not as_json:
        for line in examination.lines(repair):
            click.echo(shown(line))
    faults = examination.faults
    remaining = examination.repair(report) if repair else faults
    if as_json:
        click.echo(json.dumps(examination.as_json(remaining), indent=2))
    elif repair and faults:
        click.echo(f"{len(faults) - len(remaining)} of {len(faults)} faults repaired.")
    if remaining:
        sys.exit(1)


@click.command()
@click.option(
    "--port",
    type=PORT,
    default=services.PORT,
    show_default=True,
    help=f"Port of the UI on {services.HOST}.",
)
@click.option(
    "--board-port",
    type=PORT,
    default=services.BOARD_PORT,
    show_default=True,
    help="Port of the board.",
)
@click.option("--wait", is_flag=True, help="Stay in the foreground; SIGTERM or Ctrl-C stops them.")
def up(port: int, board_port: int, wait: bool) -> None:
    """Start the board, the UI and the daemon.

    Each of them is restarted if it exits.

    \b
    Examples:
      llm-assets --config config/manuals.yaml up --port 3100
      llm-assets up --wait      as the main program of a container
    """
    # Before anything is started: services would fail again and again on faulty settings, and the
    # daemon would find out only when it has something to send that its secrets are not there.
    settings = load_settings(config_path())
    use_this_folders_history()
    # Services that run have what they were started with.
    if services.read_states(services.STATE_FOLDER) is None:
        bearer_token(settings.endpoint)
        for line in settings.notifications.unset():
            click.echo(shown(line), err=True)
        for name, section in (read_yaml(Path("dagster.yaml")) or {}).items():
            module = section.get("module") if isinstance(section, dict) else None
            # Dagster would notice only when a run is to start, and tell only the daemon's log.
            with suppress(ModuleNotFoundError):
                if module is None or importlib.util.find_spec(module):
                    continue
            raise UserError(
                f"dagster.yaml: `{name}` names {module}, which is not installed here, so no run "
                "could start. If an earlier version of llm-assets had it, take that section out."
            )
    services.bring_up(
        Path.cwd(), config_path(), port, board_port, lambda line: click.echo(shown(line))
    )
    click.echo(
        shown(f"logs: {Path.cwd() / services.STATE_FOLDER}   stop them with: llm-assets down")
    )
    if wait:
        # Blocked only now: the services would inherit the mask and never hear a signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        services.wait_for_end(Path.cwd() / services.STATE_FOLDER, ENDING)


@click.command()
def down() -> None:
    """Stop the board, the UI, the daemon and their runs.

    The endpoint keeps serving. Runs that are stopped count as failed. After the next `up` they are
    launched again, at most twice, and training resumes from its newest checkpoint.

    \b
    Example:
      llm-assets down
    """
    click.echo(
        "Stopped." if services.stop(Path.cwd() / services.STATE_FOLDER) else "Nothing was running."
    )


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=services.BOARD_PORT,
    show_default=True,
    help=f"Port on {services.HOST}; 0 for any free port.",
)
def board(port: int) -> None:
    """Start the board, the web interface for the models.

    Shows what the model has learned, its versions and the text behind an answer, and lets you
    approve, reject, roll back and forget. Prometheus can scrape the graph's metrics at /metrics.
    `up` starts the board, too.

    \b
    Example:
      llm-assets board --port 8013
    """
    from llm_assets.board.server import open_board, serve_board
    from llm_assets.cli.status import status_of

    session = open_session()
    # The board also shows a registry and a store that have no history of runs.
    if Path("dagster.yaml").exists():
        use_this_folders_history()
    # Decisions are calls of this program; the path makes them about the pipeline that is shown.
    program = [sys.argv[0], "--config", str(session.path.absolute())]
    opened = open_board(
        session.settings, session.record, session.registry, lambda: status_of(session), program
    )
    serve_board(opened, port, click.echo)


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Read this version's documentation offline.

    Without PAGE, lists the pages.

    \b
    Examples:
      llm-assets docs
      llm-assets docs settings
    """
    # In a checkout the pages are in docs/; an installation has them among its own files.
    in_checkout = list((Path(__file__).parents[3] / "docs").glob("*.md"))
    installed = importlib.metadata.files("llm-assets") or []
    paths = in_checkout or [
        Path(str(f.locate())) for f in installed if f.match("llm-assets/docs/*.md")
    ]
    pages = {path.stem: path for path in sorted(paths)}
    if page is None:
        for name, path in pages.items():
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            click.echo(f"{name:25}{title}")
    elif page.removesuffix(".md") in pages:
        click.echo_via_pager(pages[page.removesuffix(".md")].read_text(encoding="utf-8"))
    else:
        raise UserError(
            f"There is no page {page!r}; {did_you_mean(page, list(pages))}The pages are: "
            f"{', '.join(pages)}."
        )


COMMANDS = (clean, doctor, up, down, board, docs)
