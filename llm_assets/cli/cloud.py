"""Commands that set a cloud project up, test it, and say what it will cost."""

from pathlib import Path

import click

from artifacts.errors import UserError
from artifacts.shown import shown

POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
def check() -> None:
    """Test what a run needs: sources, port and disk; on Google Cloud, the project.

    There, rights, APIs, quota, images and the bucket are tested.
    """
    from llm_assets.config import config_path, load_settings

    settings = load_settings(config_path())
    if settings.platform == "local":
        from llm_assets.preflight import preflight

        for note in preflight(settings):
            click.echo(shown(note))
        click.echo("Everything a run needs is there.")
        return
    from llm_assets.cloud.check import check as check_project
    from llm_assets.cloud.config import cloud_config_path, load_cloud_settings

    uses_bigquery = any(source.type == "bigquery" for source in settings.raw_corpus.sources)
    findings = check_project(load_cloud_settings(), uses_bigquery)
    for finding in findings:
        click.echo(finding.line())
    problems = sum(finding.ok is False for finding in findings)
    if problems:
        raise UserError(f"{problems} of {len(findings)} tests failed; see {cloud_config_path()}.")
    click.echo("Everything a run needs is there.")


@click.command()
@click.option("--corpus-gb", type=POSITIVE, default=1.0, help="Text to clean, in gigabytes.")
@click.option("--tokens", type=POSITIVE, default=1e9, help="Tokens to train on, repeats counted.")
@click.option("--parameters", type=POSITIVE, default=1.24e9, help="Parameters of the model.")
def estimate(corpus_gb: float, tokens: float, parameters: float) -> None:
    """Estimate time and cost of a run on Google Cloud."""
    from llm_assets.cloud.config import load_cloud_settings
    from llm_assets.cloud.estimate import PRICES_AS_OF
    from llm_assets.cloud.estimate import estimate as estimate_stages

    settings = load_cloud_settings()
    stages = estimate_stages(settings, int(corpus_gb * 1e9), int(tokens), int(parameters))
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
    """Write the cloud project's file from what Terraform made in infrastructure/.

    \b
    Example:
      terraform -chdir=infrastructure apply
      llm-assets setup
    """
    from llm_assets.cloud.config import cloud_config_path
    from llm_assets.cloud.setup import read_outputs, write_settings

    path = cloud_config_path()
    settings = write_settings(read_outputs(outputs), path)
    click.echo(f"Wrote {path} for project {settings.project}.")
    click.echo("Now build the images: images/build.sh spark, cuda and serve.")


CLOUD = (check, estimate, setup)
