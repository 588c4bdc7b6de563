"""Commands that make, run and compare a pipeline."""

import json
import os
import shlex
import sys
from pathlib import Path

import click

from artifacts.errors import shown
from artifacts.program.lifetime import importing
from llm_assets.cli.commands.options import json_option
from llm_assets.cli.session import open_session, tell_of_other_home
from llm_assets.config import say_how_found


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="Name of the pipeline. Default: made from the folder's name.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write. Default: NAME.yaml, in config/ if that folder exists.",
)
def init(folder: Path, name: str | None, output: Path | None) -> None:
    """Write a pipeline file for a folder of text.

    Reads text of the folder for at most a minute, and chooses settings that fit. Also writes the
    project files if the current folder is not a project yet.

    \b
    Example:
      llm-assets init /data/manuals --name manuals
    """
    from llm_assets.cli.pipeline.init import refuse_project_in_text, write_pipeline, write_project

    refuse_project_in_text(Path(), folder)
    result = write_pipeline(folder, name, output)
    for note in result.notes:
        click.echo(f"  {shown(note)}")
    if names := write_project(Path(), result.path, result.path.stem):
        click.echo(f"Wrote the project files: {', '.join(names)}")
    command = f"llm-assets --config {shlex.quote(str(result.path))}"
    if result.obstacle:
        click.echo(shown(result.obstacle))
        if "`llm-assets " in result.obstacle:
            click.echo(say_how_found(result.path))
        # Not `run`, which would be refused for the obstacle.
        click.echo(f"Wrote {result.path}. Then: {command} check")
    else:
        click.echo(f"Wrote {result.path}. Now: {command} run")


@click.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--revision", help="Commit of the model on the Hugging Face Hub; a local folder needs none."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write. Default: in config/, named like FILE.",
)
def import_json(file: Path, revision: str | None, output: Path | None) -> None:
    """Convert an llm-pipeline-examples config.

    Turns a JSON config of GoogleCloudPlatform/llm-pipeline-examples into a pipeline file.

    \b
    Example:
      llm-assets import small1vm1gpu.json --revision COMMIT
    """
    import yaml

    from llm_assets.cli.pipeline.import_json import import_file, write_imported

    result = import_file(file, revision)
    target = output or Path("config") / f"{file.stem}.yaml"
    write_imported(result, target)
    for note in result.notes:
        click.echo(f"  {shown(note)}")
    click.echo(f"Wrote {target}. Put your bucket into its `store`.")
    click.echo("It needs, in config/google_cloud.yaml:")
    click.echo(yaml.safe_dump(result.cloud, sort_keys=False))


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show which version serves, what runs, and what waits and why.

    \b
    Examples:
      llm-assets status
      llm-assets status --json | jq .served
    """
    from llm_assets.cli.status import screen, status_of

    tell_of_other_home()
    state = status_of(open_session())
    click.echo(json.dumps(state, indent=2) if as_json else shown("\n".join(screen(state))))


@click.command()
@click.option(
    "--rebuild",
    multiple=True,
    metavar="ASSET",
    help="Rebuild this asset even if nothing changed. Can be repeated.",
)
@click.option("--unjudged", is_flag=True, help="Run even if there is too little text for the gate.")
def run(rebuild: tuple[str, ...], unjudged: bool) -> None:
    """Materialize the whole graph and show the results.

    \b
    Examples:
      llm-assets run                          skips what has not changed
      llm-assets run --rebuild checkpoint     trains again from the first step
      V=1 llm-assets run                      with Dagster's own log
    """
    with importing():
        from llm_assets.cli.pipeline.run import run_pipeline

    is_verbose = os.environ.get("V", "0") not in ("", "0")
    code = run_pipeline(is_verbose, rebuild, not unjudged)
    # The commands that were advised above do not find a file that only --config names.
    if given := click.get_current_context().find_root().params.get("config"):
        click.echo(say_how_found(given))
    sys.exit(code)


@click.command()
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=A,B,C",
    help="Values to try for a key of the pipeline file. Can be repeated.",
)
@json_option
def experiment(assignments: tuple[str, ...], as_json: bool) -> None:
    """Compare training runs with different settings.

    Tries all combinations of the values given by --set. Work that several combinations have in
    common is done once. Nothing is promoted or served.

    \b
    Example:
      llm-assets experiment --set checkpoint.optimizer.learning_rate=3e-5,1e-4
    """
    from rich.console import Console

    from llm_assets.cli.pipeline.run import print_results, run_experiment
    from llm_assets.experiments import parse_changes

    results = run_experiment(parse_changes(assignments), quiet=as_json)
    if as_json:
        click.echo(json.dumps([result.model_dump(mode="json") for result in results], indent=2))
    else:
        print_results(Console(emoji=False), results)
    # For scripts: the table is printed in any case, since the other trials have results.
    if any(result.verdict == "failed" for result in results):
        sys.exit(1)


@click.command()
def stop() -> None:
    """Stop the endpoint.

    On Google Cloud, the endpoint is deleted. It is started again when `endpoint` is materialized,
    and by `approve`, `reject` and `rollback`.

    \b
    Example:
      llm-assets stop
    """
    session = open_session()
    was_running = session.serving.stop(session.settings)
    click.echo("The endpoint has stopped." if was_running else "No endpoint was running.")


COMMANDS = (init, import_json, status, run, experiment, stop)
