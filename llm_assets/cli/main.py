"""The `llm-assets` command."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import click

from artifacts.errors import reason_of, shown
from artifacts.program.lifetime import importing
from llm_assets.cli.cloud import CLOUD
from llm_assets.cli.options import json_option, name_option, reason_option, version_argument
from llm_assets.cli.text.provenance import PROVENANCE
from llm_assets.cli.upkeep import MAINTENANCE, SERVICES
from llm_assets.config import CONFIG_VARIABLE


@click.group(context_settings={"max_content_width": 100})
@click.version_option(importlib.metadata.version("llm-assets"), prog_name="llm-assets")
@click.option("--config", type=click.Path(path_type=Path), help="The pipeline file.")
def commands(config: Path | None) -> None:
    """Keep a language model current on your own text.

    \b
    Examples:
      llm-assets init /data/manuals               write a pipeline file for a folder
      llm-assets --config config/manuals.yaml run build everything and serve the result
      llm-assets status                           what serves, and why
    """
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config)


@commands.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="Name of the pipeline. Default: the folder's name.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write.")
def init(folder: Path, name: str | None, output: Path | None) -> None:
    """Write a pipeline file for a folder of text.

    Reads the folder for up to a minute and chooses settings that fit the text. If the current
    folder is not a project yet, also writes the project files.

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
    command = f"llm-assets --config {started.path}"
    if started.obstacle:
        click.echo(shown(started.obstacle))
        click.echo(f"Wrote {started.path}. With more text there: {command} check")
    else:
        click.echo(f"Wrote {started.path}. Now: {command} run")


@commands.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--revision", help="Commit of the model on the Hugging Face Hub.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write.")
def import_json(file: Path, revision: str | None, output: Path | None) -> None:
    """Convert a config of llm-pipeline-examples.

    Turns a JSON config of GoogleCloudPlatform/llm-pipeline-examples into a pipeline file.

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
    """Show what is serving, running and waiting.

    \b
    Examples:
      llm-assets status
      llm-assets status --json | jq .served
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions import screen, status_of

    found = status_of(open_session())
    click.echo(json.dumps(found, indent=2) if as_json else shown("\n".join(screen(found))))


@commands.command()
@click.option(
    "--rebuild", multiple=True, metavar="ASSET", help="Rebuild this asset even if nothing changed."
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
    sys.exit(run_pipeline(is_verbose, rebuild, not unjudged))


@commands.command()
@click.option("--set", "assignments", multiple=True, metavar="KEY=A,B,C", help="Values to try.")
@json_option
def experiment(assignments: tuple[str, ...], as_json: bool) -> None:
    """Compare training runs with different settings.

    Tries all combinations of the values given by --set. Work that combinations share is done once.
    Nothing is promoted or served.

    \b
    Example:
      llm-assets experiment --set checkpoint.optimizer.learning_rate=3e-5,1e-4
    """
    from rich.console import Console

    from llm_assets.cli.pipeline.run import print_results, run_experiment
    from llm_assets.experiments.trials import parse_changes

    results = run_experiment(parse_changes(assignments), quiet=as_json)
    if as_json:
        click.echo(json.dumps([one.model_dump(mode="json") for one in results], indent=2))
    else:
        print_results(Console(), results)
    if any(one.verdict == "failed" for one in results):
        sys.exit(1)


@commands.command()
def stop() -> None:
    """Stop the endpoint.

    It starts again when `endpoint` is materialized.

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
    """List all versions and the decisions about them.

    \b
    Examples:
      llm-assets versions
      llm-assets versions --json | jq '.[-1].verdicts'
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions import list_versions, versions_as_json

    session = open_session()
    if as_json:
        click.echo(json.dumps(versions_as_json(session), indent=2))
        return
    for line in list_versions(session):
        click.echo(shown(line))


@commands.command()
@version_argument
@click.argument("repository")
@click.option("--public", is_flag=True, help="Make the repository public. Default: private.")
def publish(version: int, repository: str, public: bool) -> None:
    """Upload a version to the Hugging Face Hub.

    REPOSITORY is OWNER/NAME and is created if it does not exist. Uploads the model, a model card,
    and metrics and settings as JSON. Reads the token from HF_TOKEN.

    \b
    Example:
      llm-assets publish 2 my-team/manuals
    """
    from llm_assets.cli.publication import publish_version
    from llm_assets.cli.session import open_session

    click.echo(shown(publish_version(open_session(), version, repository, public, click.echo)))


@commands.command()
@version_argument
@name_option
@reason_option
def approve(version: int, name: str, reason: str) -> None:
    """Approve a version by hand.

    The version is served whatever the gate decided.

    \b
    Example:
      llm-assets approve 2 --reason "reads better"
    """
    from llm_assets.cli import promotion
    from llm_assets.cli.session import open_session

    promotion.approve(open_session(), version, name, reason, click.echo)


@commands.command()
@version_argument
@name_option
@reason_option
def reject(version: int, name: str, reason: str) -> None:
    """Reject a version.

    If it is serving, the previous one takes over.

    \b
    Example:
      llm-assets reject 4 --reason "wrong dosages"
    """
    from llm_assets.cli import promotion
    from llm_assets.cli.session import open_session

    promotion.reject(open_session(), version, name, reason, click.echo)


@commands.command()
@click.argument("candidate", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("incumbent", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--metric", help="Metric in the files. Default: the first.")
@click.option("--filter", "chosen_filter", help="lm-eval filter, if the task has several.")
@click.option("--lower-is-better", is_flag=True, help="For example, a word error rate.")
@click.option(
    "--look", type=click.IntRange(1), default=1, help="Number of this comparison in a series."
)
@click.option("--smallest-effect", type=click.FloatRange(0), default=0.005, show_default=True)
@json_option
def gate(
    candidate: Path,
    incumbent: Path,
    metric: str | None,
    chosen_filter: str | None,
    lower_is_better: bool,
    look: int,
    smallest_effect: float,
    as_json: bool,
) -> None:
    """Compare two files of lm-eval samples.

    CANDIDATE and INCUMBENT are files that `lm_eval --log_samples` wrote for two models and one
    task. No pipeline is needed. Answers are paired by question. The exit code is 0 if the candidate
    is significantly better, 3 if it is not, and 1 if the files cannot be compared.

    \b
    Examples:
      llm-assets gate new/samples_arc_easy_*.jsonl old/samples_arc_easy_*.jsonl
      llm-assets gate new.jsonl old.jsonl --metric acc_norm --look 4    the fourth one tried
    """
    from llm_assets.gate.samples import judge_samples
    from llm_assets.gate.verdict import GateSettings

    verdict = judge_samples(
        candidate,
        incumbent,
        GateSettings(smallest_effect=smallest_effect),
        look=look,
        metric=metric,
        chosen_filter=chosen_filter,
        lower_is_better=lower_is_better,
    )
    word = "better" if verdict.promoted else "not shown to be better"
    told = f"{word}. {' '.join(reason.text for reason in verdict.reasons)}"
    click.echo(verdict.model_dump_json(indent=2) if as_json else shown(told))
    sys.exit(0 if verdict.promoted else 3)


@commands.command()
@name_option
@reason_option
def rollback(name: str, reason: str) -> None:
    """Go back to the previous version, without downtime.

    \b
    Example:
      llm-assets rollback --reason "users complain"
    """
    from llm_assets.cli import promotion
    from llm_assets.cli.session import open_session

    promotion.roll_back(open_session(), name, reason, click.echo)


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
