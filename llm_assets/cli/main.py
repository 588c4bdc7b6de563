"""The `llm-assets` command."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from artifacts.program.imports import importing
from artifacts.reasons import reason_of
from artifacts.shown import shown
from llm_assets.cli.cloud import CLOUD
from llm_assets.cli.options import json_option, name_option, reason_option, version_argument
from llm_assets.cli.text.provenance import PROVENANCE
from llm_assets.cli.upkeep.maintenance import MAINTENANCE
from llm_assets.cli.upkeep.services import SERVICES
from llm_assets.config import CONFIG_VARIABLE


@click.group(context_settings={"max_content_width": 100})
@click.version_option(importlib.metadata.version("llm-assets"), prog_name="llm-assets")
@click.option("--config", type=click.Path(path_type=Path), help="The pipeline file.")
def commands(config: Path | None) -> None:
    """Keep a language model current on your own text.

    \b
    Examples:
      llm-assets init /data/manuals               write a pipeline file for a folder
      llm-assets --config config/manuals.yaml run make everything and serve the result
      llm-assets status                           what serves, and why
    """
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config)


@commands.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="The pipeline's name; the folder's by default.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the file.")
def init(folder: Path, name: str | None, output: Path | None) -> None:
    """Write a pipeline file with sensible values for a folder of text.

    In a folder that is no project yet, the files of one are written too.

    \b
    Example:
      llm-assets init /data/manuals --name manuals
    """
    from llm_assets.cli.pipeline.init import write_pipeline, write_project

    started = write_pipeline(folder, name, output)
    for note in started.notes:
        click.echo(f"  {shown(note)}")
    if output is None and (written := write_project(Path(), started.path, started.path.stem)):
        click.echo(f"Made this folder a project: {', '.join(written)}")
    click.echo(f"Wrote {started.path}. Now: llm-assets --config {started.path} run")


@commands.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--revision", help="Commit of the model on the Hugging Face Hub.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the file.")
def import_json(file: Path, revision: str | None, output: Path | None) -> None:
    """Write a pipeline file from the JSON of GoogleCloudPlatform/llm-pipeline-examples.

    \b
    Example:
      llm-assets import small1vm1gpu.json --revision COMMIT
    """
    import yaml

    from llm_assets.cli.pipeline.import_json import import_file, write_imported

    imported = import_file(file, revision)
    target = output or Path("config") / f"{file.stem}.yaml"
    write_imported(imported, target)
    for note in imported.notes:
        click.echo(f"  {shown(note)}")
    click.echo(f"Wrote {target}. In config/google_cloud.yaml it asks for:")
    click.echo(yaml.safe_dump(imported.cloud, sort_keys=False))


@commands.command()
@json_option
def status(as_json: bool) -> None:
    """Show what serves, what is wanted, what was decided and what runs.

    \b
    Examples:
      llm-assets status
      llm-assets status --json | jq .served
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.status import screen, status_of

    found = status_of(open_session())
    click.echo(json.dumps(found, indent=2) if as_json else shown("\n".join(screen(found))))


@commands.command()
@click.option("--rebuild", multiple=True, metavar="ASSET", help="Make it again, changed or not.")
def run(rebuild: tuple[str, ...]) -> None:
    """Materialize the whole graph and show what came out.

    \b
    Examples:
      llm-assets run                          what has not changed is not made again
      llm-assets run --rebuild checkpoint     a training from its first step
      V=1 llm-assets run                      with Dagster's own log
    """
    with importing():
        from llm_assets.cli.pipeline.run import run_pipeline

    sys.exit(run_pipeline(os.environ.get("V", "0") not in ("", "0"), rebuild))


@commands.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "assignments", multiple=True, metavar="KEY=A,B,C", help="Values to try.")
@json_option
def experiment(file: Path | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Train with other settings side by side, and show which is better.

    All combinations of the values that --set and FILE (a YAML mapping of keys to lists) name are
    tried. What is equal is made once; nothing is promoted or served.

    \b
    Example:
      llm-assets experiment --set checkpoint.optimizer.learning_rate=3e-5,1e-4
    """
    from rich.console import Console

    from llm_assets.cli.pipeline.experiment import print_results, run_experiment
    from llm_assets.experiments.trials import parse_changes, read_changes

    changes = (read_changes(file) if file else {}) | parse_changes(assignments)
    results = run_experiment(changes, quiet=as_json)
    if as_json:
        click.echo(json.dumps([one.model_dump(mode="json") for one in results], indent=2))
    else:
        print_results(Console(), results)
    if any(one.verdict == "failed" for one in results):
        sys.exit(1)


@commands.command()
def stop() -> None:
    """End the endpoint; it answers again once `endpoint` is materialized.

    \b
    Example:
      llm-assets stop
    """
    from llm_assets.cli.session import open_session

    session = open_session()
    ended = session.serving.stop(session.settings)
    click.echo("The endpoint has ended." if ended else "No endpoint was running.")


@commands.command()
@json_option
def versions(as_json: bool) -> None:
    """List the model versions: what is wanted, what serves, who decided and why.

    \b
    Examples:
      llm-assets versions
      llm-assets versions --json | jq '.[-1].verdicts'
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.versions import list_versions, versions_as_json

    session = open_session()
    if as_json:
        click.echo(json.dumps(versions_as_json(session), indent=2))
        return
    for line in list_versions(session):
        click.echo(shown(line))


@commands.command()
@version_argument
@click.option("--to", "form", required=True, type=click.Choice(["gguf", "openvino", "safetensors"]))
@click.option("--output", type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--sign", "key", type=click.Path(path_type=Path), help="Sign it with this key.")
def export(version: int, form: Any, output: Path | None, key: Path | None) -> None:
    """Write a version's model for llama.cpp, Ollama and LM Studio, or for OpenVINO.

    What was written is read back, and predicts a shipped text as the model does.

    \b
    Examples:
      llm-assets export 3 --to gguf
      llm-assets export 3 --to safetensors --sign release.pem   a key that is absent is made
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.export import export_version

    click.echo(shown(export_version(open_session(), version, form, output, key)))


@commands.command()
@version_argument
@name_option
@reason_option
def approve(version: int, name: str, reason: str) -> None:
    """Have a version served on your word.

    \b
    Example:
      llm-assets approve 2 --reason "reads better"
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions import promotion

    promotion.approve(open_session(), version, name, reason, click.echo)


@commands.command()
@version_argument
@name_option
@reason_option
def reject(version: int, name: str, reason: str) -> None:
    """Say that a version shall not serve; where it does, the one before takes over.

    \b
    Example:
      llm-assets reject 4 --reason "wrong dosages"
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions import promotion

    promotion.reject(open_session(), version, name, reason, click.echo)


@commands.command()
@name_option
@reason_option
def rollback(name: str, reason: str) -> None:
    """Serve the version before the one that serves, without an outage.

    \b
    Example:
      llm-assets rollback --reason "users complain"
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions import promotion

    promotion.roll_back(open_session(), name, reason, click.echo)


@commands.command()
def docs() -> None:
    """Write docs/settings.md and docs/benchmarks.md from the code and the results.

    \b
    Example:
      llm-assets docs     in a checkout
    """
    from llm_assets.cli.reference import write_reference

    for path in write_reference(Path("docs")):
        click.echo(f"wrote {path}")


for command in (*CLOUD, *MAINTENANCE, *PROVENANCE, *SERVICES):
    commands.add_command(command)


def main() -> None:
    """Entry point: whatever has a known reason is one message, without a traceback."""
    try:
        commands()
    except Exception as error:
        # What has no known reason keeps its traceback.
        reason = reason_of(error)
        if reason is None:
            raise
        click.echo(f"Error: {shown(reason)}", err=True)
        sys.exit(1)
