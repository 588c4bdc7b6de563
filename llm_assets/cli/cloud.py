"""Commands that set a cloud project up, test it, and say what it will cost."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from artifacts.errors import UserError, shown
from llm_assets.cli.options import json_option

if TYPE_CHECKING:
    from llm_assets.cloud.settings import GoogleCloudSettings
    from llm_assets.cloud.setup.rights import Finding

COMPLETE = "Everything a run needs is there."
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option(
    "--smoke", is_flag=True, help="On Google Cloud, also run the smallest batch and jobs."
)
@click.option(
    "--nodes", type=click.IntRange(1), default=1, help="Machines of the job that trains a step."
)
@click.option("--yes", is_flag=True, help="Do not ask before --smoke costs money.")
@click.option(
    "--all", "is_whole", is_flag=True, help="Read all text and list everything that is left out."
)
@json_option
def check(smoke: bool, nodes: int, yes: bool, is_whole: bool, as_json: bool) -> None:
    """Check everything that a run needs.

    Locally: the text (read for up to a minute), the base model, the port and the disk. On Google
    Cloud: permissions, APIs, quotas, images and the bucket.

    \b
    Examples:
      llm-assets check
      llm-assets check --all        lists every file or row that is left out, and why
      llm-assets check --json | jq .ok
      llm-assets check --smoke      on Google Cloud, with the smallest batch and jobs
      llm-assets check --smoke --nodes 2      and the network between two machines
    """
    from llm_assets.config import config_path, load_settings

    settings = load_settings(config_path())
    if settings.platform != "local":
        uses_bigquery = any(source.type == "bigquery" for source in settings.raw_corpus.sources)
        _check_project(uses_bigquery, nodes if smoke else 0, yes, as_json)
        return
    from llm_assets.preflight import LOOK_SECONDS, preflight

    if is_whole:
        found = preflight(settings, None, messages=sys.maxsize)
    else:
        found = preflight(settings, LOOK_SECONDS)
    if as_json:
        told = {"ok": True, "notes": found.notes, "text": found.text.lines()}
        click.echo(json.dumps(told, indent=2))
        return
    unread = found.text.unread.examples.items() if is_whole else ()
    named = [f"not read: {name} ({kind})" for kind, names in unread for name in names]
    left_out = [*found.text.messages, *named] if is_whole else found.text.lines()
    for line in [*left_out, *found.notes]:
        click.echo(shown(line))
    click.echo(COMPLETE)


def _check_project(uses_bigquery: bool, nodes: int, yes: bool, as_json: bool) -> None:
    """Test the cloud project; with `as_json`, what people watch goes to standard error.

    Args:
        nodes: machines of the smallest training; 0 starts nothing.
    """
    from llm_assets.cloud.settings import cloud_config_path, load_cloud_settings
    from llm_assets.cloud.setup.check import check as check_project

    cloud = load_cloud_settings()
    findings = check_project(cloud, uses_bigquery)
    for finding in findings:
        click.echo(shown(finding.line()), err=as_json)
    if nodes and all(finding.ok is not False for finding in findings):
        findings += _smoke(cloud, nodes, yes, as_json)
    problems = sum(finding.ok is False for finding in findings)
    if as_json:
        told = {"ok": not problems, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(told, indent=2))
    if problems:
        raise UserError(f"{problems} of {len(findings)} tests failed; see {cloud_config_path()}.")
    click.echo(COMPLETE, err=as_json)


def _smoke(cloud: "GoogleCloudSettings", nodes: int, yes: bool, as_json: bool) -> "list[Finding]":
    """Run the smallest batch and jobs, after their price was said; shows what each found."""
    from llm_assets.cloud.settings import cloud_config_path
    from llm_assets.cloud.spending import PRICES_AS_OF, estimate_smoke
    from llm_assets.runners.google_cloud import smoke as run_smallest

    for stage in estimate_smoke(cloud, nodes):
        click.echo(stage.line(), err=as_json)
    click.echo(f"Prices: {PRICES_AS_OF}", err=as_json)
    if not yes:
        click.confirm("Start them?", abort=True, err=as_json)
    findings = []
    for finding in run_smallest(cloud, cloud_config_path(), nodes):
        findings.append(finding)
        click.echo(shown(finding.line()), err=as_json)
    return findings


@click.command()
@click.option("--corpus-gb", type=POSITIVE, default=1.0, help="Text to clean, in gigabytes.")
@click.option("--tokens", type=POSITIVE, default=1e9, help="To train on, repeats counted.")
@click.option("--parameters", type=POSITIVE, default=1.24e9, help="Of the model.")
@json_option
def estimate(corpus_gb: float, tokens: float, parameters: float, as_json: bool) -> None:
    """Estimate time and cost on Google Cloud.

    How long a training takes on this machine, `llm-assets check` says.

    \b
    Example:
      llm-assets estimate --corpus-gb 20 --tokens 4e9 --parameters 1.24e9
    """
    from llm_assets.cloud.settings import load_cloud_settings
    from llm_assets.cloud.spending import PRICES_AS_OF
    from llm_assets.cloud.spending import estimate as estimate_stages

    settings = load_cloud_settings()
    stages = estimate_stages(settings, int(corpus_gb * 1e9), int(tokens), int(parameters))
    if as_json:
        told = {"stages": [asdict(stage) for stage in stages], "prices": PRICES_AS_OF}
        click.echo(json.dumps(told, indent=2))
        return
    for stage in stages:
        click.echo(stage.line())
    click.echo(f"Prices: {PRICES_AS_OF}")


@click.command()
@click.option(
    "--outputs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with what `terraform output -json` printed.",
)
def setup(outputs: Path | None) -> None:
    """Write the cloud project's file from Terraform.

    It reads what Terraform made in infrastructure/.

    \b
    Example:
      terraform -chdir=infrastructure apply
      llm-assets setup
    """
    from llm_assets.cloud.settings import cloud_config_path
    from llm_assets.cloud.setup.terraform import read_outputs, write_settings

    path = cloud_config_path()
    settings = write_settings(read_outputs(outputs), path)
    click.echo(f"Wrote {path} for project {settings.project}.")
    click.echo("Now build the images: images/build.sh spark, cuda and serve.")


@click.command()
@click.option("--end", "is_ending", is_flag=True, help="End what is listed.")
@json_option
def machines(is_ending: bool, as_json: bool) -> None:
    """List jobs on Google Cloud that cost money now.

    Of all services, with their machines, since when, and what they cost so far. Runs end their jobs
    themselves; --end is for what is left where Dagster is gone.

    \b
    Examples:
      llm-assets machines
      llm-assets machines --end
    """
    from llm_assets.cloud.settings import load_cloud_settings
    from llm_assets.cloud.spending import active_jobs

    listed = list(active_jobs(load_cloud_settings()))
    for job in listed:
        click.echo(shown(job.line()), err=as_json)
        if is_ending:
            job.end(lambda line: click.echo(shown(line), err=True))
    if as_json:
        told = [job.as_json() | {"ended": is_ending} for job in listed]
        click.echo(json.dumps(told, indent=2))
    elif not listed:
        click.echo("No job of this project's runs goes on.")
    elif is_ending:
        click.echo(f"Ended: {len(listed)}.")
    else:
        click.echo("End them with: llm-assets machines --end")


CLOUD = (check, estimate, machines, setup)
