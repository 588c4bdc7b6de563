"""The `llm-assets` command."""

import getpass
import os
import sys
from pathlib import Path

import click

from artifacts.errors import UserError

version_argument = click.argument("version", type=int)
name_option = click.option("--name", default=getpass.getuser, help="Who decides; you by default.")
reason_option = click.option("--reason", required=True, help="Why, for those who come after.")


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
    from llm_assets.commands.session import open_session

    session = open_session()
    ended = session.serving.stop(session.settings)
    click.echo("The endpoint has ended." if ended else "No endpoint was running.")


@commands.command()
def versions() -> None:
    """List the registered model versions."""
    from llm_assets.commands.session import open_session

    registry = open_session().registry
    names: dict[int, list[str]] = {}
    for alias in ("champion", "previous"):
        if found := registry.find(alias):
            names.setdefault(found.version, []).append(alias)
    for version in registry.versions():
        verdict = version.verdict.summary if version.verdict else "The base model."
        aliases = f" ({', '.join(names[version.version])})" if version.version in names else ""
        click.echo(f"{version.version}{aliases}: {verdict}")


@commands.command()
@version_argument
@click.option("--text", help="Say also which documents and training rows hold this text.")
def explain(version: int, text: str | None) -> None:
    """Say which text, which code and which checkpoint stand behind a version."""
    from llm_assets.commands.session import open_session
    from llm_assets.registry import explain as provenance

    session = open_session()
    found = session.registry.get(version)
    click.echo(provenance.explain(session.pipeline.store, found))
    if text:
        occurrences = provenance.find_text(session.pipeline.store, found, text)
        for place in occurrences:
            rows = ", ".join(str(row) for row in place.rows)
            click.echo(f"{place.document}: {place.split}, shard {place.shard}, rows {rows}")
        if not occurrences:
            click.echo("No document of the clean corpus holds this text.")


@commands.command()
@click.argument("identifier")
def document(identifier: str) -> None:
    """Say what a document was merged with and why, and which rows hold it."""
    from artifacts.shards import ShardStats
    from llm_assets.commands.session import open_session
    from spark_jobs.explain import explain_document

    record = open_session().pipeline.record
    clean = record.current("clean_corpus", needed_by="document")
    shards = record.find_current("tokenized_shards")
    stats = ShardStats.model_validate(shards.stats) if shards else None
    folder = str(shards.path) if shards else None
    click.echo(explain_document(clean.url, folder, stats, identifier))


@commands.command()
@version_argument
@name_option
@reason_option
def approve(version: int, name: str, reason: str) -> None:
    """Make a version champion on your word, and serve it."""
    from llm_assets.commands import promotion
    from llm_assets.commands.session import open_session

    promotion.approve(open_session(), version, name, reason, click.echo)


@commands.command()
@version_argument
@name_option
@reason_option
def reject(version: int, name: str, reason: str) -> None:
    """Say that a version shall not serve; a champion gives way to the one before."""
    from llm_assets.commands import promotion
    from llm_assets.commands.session import open_session

    promotion.reject(open_session(), version, name, reason, click.echo)


@commands.command()
@name_option
@reason_option
def rollback(name: str, reason: str) -> None:
    """Serve the version before the champion again, without an outage."""
    from llm_assets.commands import promotion
    from llm_assets.commands.session import open_session

    promotion.roll_back(open_session(), name, reason, click.echo)


@commands.command()
def check() -> None:
    """Test the Google Cloud project's rights, APIs, quota, images and bucket."""
    from llm_assets.cloud.check import check as check_project
    from llm_assets.cloud.config import cloud_config_path, load_cloud_settings

    findings = check_project(load_cloud_settings())
    for finding in findings:
        click.echo(f"{'ok     ' if finding.ok else 'PROBLEM'} {finding.key}: {finding.text}")
    problems = sum(not finding.ok for finding in findings)
    if problems:
        raise UserError(f"{problems} of {len(findings)} tests failed; see {cloud_config_path()}.")
    click.echo("Everything a run needs is there.")


@commands.command()
@click.option("--corpus-gb", type=float, default=1.0, help="Text to clean, in gigabytes.")
@click.option("--tokens", type=float, default=1e9, help="Tokens to train on, repeats counted.")
@click.option("--parameters", type=float, default=1.24e9, help="Parameters of the model.")
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
