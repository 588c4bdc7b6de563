"""Commands that have webserver, daemon and metrics run as services of this machine."""

from pathlib import Path

import click

from artifacts.shown import shown
from llm_assets.services.ports import HOST, METRICS_PORT, PORT

port_option = click.option("--port", default=PORT, show_default=True, help=f"Of the UI, on {HOST}.")


@click.command()
@port_option
@click.option("--metrics-port", default=METRICS_PORT, show_default=True, help="Of the metrics.")
@click.option("--foreground", is_flag=True, help="Stay, as a container's main process does.")
def up(port: int, metrics_port: int, foreground: bool) -> None:
    """Keep the UI, the daemon and the metrics running; what dies is started again.

    They are services of systemd where this user has one, and start with the machine then.

    \b
    Example:
      llm-assets --config config/manuals.yaml up --port 3100
    """
    from llm_assets.config import config_path, load_settings
    from llm_assets.services.project import ProjectServices, bring_up, stay_up

    load_settings(config_path())
    services = ProjectServices(Path.cwd(), config_path(), port, metrics_port)
    if foreground:
        stay_up(services)
    bring_up(services, click.echo)
    click.echo(f"UI: http://{HOST}:{port}   metrics: http://{HOST}:{metrics_port}/metrics")
    click.echo(shown(f"logs: {services.state}   end them with: llm-assets down"))


@click.command()
def down() -> None:
    """End the UI, the daemon, the metrics, and the runs that they started; the endpoint goes on.

    A run that is ended so counts as failed: after `up` it is launched again where it left off.

    \b
    Example:
      llm-assets down
    """
    from llm_assets.services.project import take_down

    click.echo("Ended." if take_down(Path.cwd()) else "Nothing was running.")


@click.command()
@click.option("--port", default=METRICS_PORT, show_default=True, help=f"On {HOST}.")
def metrics(port: int) -> None:
    """Serve the graph's metrics for Prometheus; `up` does it too.

    \b
    Example:
      llm-assets metrics --port 8012
    """
    from llm_assets.cli.session import open_session, use_this_folders_history
    from llm_assets.services.metrics import serve_metrics

    use_this_folders_history()
    session = open_session()
    serve_metrics(session.settings, session.record, session.registry, port, click.echo)


SERVICES = (up, down, metrics)
