"""Commands that check what a run needs, here or on Google Cloud, and what it costs there."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from artifacts.errors import UserError, shown
from llm_assets.cli.commands.options import json_option
from llm_assets.config import command, config_path, load_settings

if TYPE_CHECKING:
    from llm_assets.cloud.settings import GoogleCloudSettings
    from llm_assets.cloud.setup.rights import Finding
    from llm_assets.config import PipelineSettings, TrainingPlace

COMPLETE = "Everything a run needs is in place."
OUTSIDE = (
    "But `llm-assets run` is refused in this folder, which has no dagster.yaml: run it in the "
    "project's folder, or make this folder one with: llm-assets init FOLDER_OF_TEXT"
)


class _Amount(click.FloatRange):
    """A number within a range; refuses `nan`, which Click takes to be within any."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        amount: float = super().convert(value, parameter, context)
        if math.isnan(amount):
            self.fail(f"{value!r} is not a number.", parameter, context)
        return amount


POSITIVE = _Amount(min=0, min_open=True, max=1e18)


@click.command()
@click.option("--smoke", is_flag=True, help="On Google Cloud, also run minimal jobs.")
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    help="Number of machines for the training job of --smoke.",
)
@click.option("--yes", is_flag=True, help="Run --smoke without asking you to confirm the price.")
@click.option(
    "--all",
    "is_whole",
    is_flag=True,
    help="Locally, read all text, and list what is set aside, unread or decoded.",
)
@json_option
def check(smoke: bool, nodes: int, yes: bool, is_whole: bool, as_json: bool) -> None:
    """Check everything that a run needs.

    With `platform: local`: the text (read for up to a minute), the base model, the port and the
    disk. Where anything runs on Google Cloud: permissions, APIs, billing, quotas, images, secrets,
    the bucket and the columns of BigQuery sources.

    \b
    Examples:
      llm-assets check
      llm-assets check --all        lists every file or row that is set aside, and why
      llm-assets check --json | jq .ok
      llm-assets check --smoke      on Google Cloud, also runs minimal jobs
      llm-assets check --smoke --nodes 2      also tests the network between two machines
    """
    settings = load_settings(config_path())
    if not smoke and (nodes > 1 or yes):
        raise click.UsageError("--nodes and --yes say how --smoke runs its jobs: add --smoke.")
    if smoke and not settings.uses_cloud:
        raise click.UsageError(
            "--smoke runs jobs on Google Cloud, and nothing of this pipeline runs there: leave it "
            "out."
        )
    if is_whole and settings.platform != "local":
        raise click.UsageError(
            "--all reads text on this machine, and with `platform: google_cloud` none is read "
            "here: leave it out."
        )
    output: dict[str, Any] = {}
    faults: list[UserError] = []
    # What runs here is checked first, since that costs nothing.
    if settings.platform == "local":
        with _kept(faults):
            _check_here(settings, is_whole, as_json, output)
    if settings.uses_cloud:
        with _kept(faults):
            _check_project(settings, nodes if smoke and not faults else 0, yes, as_json, output)
    # What is checked needs no project, as where pipeline files are kept apart from it.
    outside = [] if Path("dagster.yaml").exists() else [OUTSIDE]
    if outside:
        output["notes"] = output.get("notes", []) + outside
    if as_json:
        click.echo(json.dumps({"ok": not faults, **output}, indent=2))
    if faults:
        raise faults[0] if len(faults) == 1 else UserError("\n".join(map(str, faults)))
    unknown = sum(finding["ok"] is None for finding in output.get("findings", ()))
    reminder = f"No problems found. Read the lines marked unknown first: {unknown}."
    for line in (reminder if unknown else COMPLETE, *outside):
        click.echo(line, err=as_json)


@contextmanager
def _kept(faults: list[UserError]) -> Iterator[None]:
    """Collect a fault, so that everything else is checked before it is raised."""
    try:
        yield
    except UserError as error:
        faults.append(error)


def _check_here(
    settings: "PipelineSettings", is_whole: bool, as_json: bool, output: dict[str, Any]
) -> None:
    """Look at the text (all of it with `is_whole`, which also lists what is set aside), the base
    model, the port and the disk; adds what is found to `output`."""
    from llm_assets.preflight.check import LOOK_SECONDS, find_needs, foresee
    from llm_assets.preflight.text import look_at, merge_places
    from spark_jobs.read.document import EXAMPLES

    lines: list[str] = output.setdefault("text", [])
    try:
        base = find_needs(settings)
        seconds, messages = (None, sys.maxsize) if is_whole else (LOOK_SECONDS, EXAMPLES)
        text = look_at(settings, seconds, messages)
        if as_json or not is_whole:
            lines += text.lines(command())
        else:
            lines += merge_places(text.messages)
            for what, files in (("not read", text.unread), ("decoded", text.decoded)):
                for kind, names in files.examples.items():
                    lines += [f"{what}: {name} ({kind})" for name in names]
        # Printed at once: what was not read may be why `foresee` finds too little text.
        for line in () if as_json else lines:
            click.echo(shown(line))
        output["notes"] = foresee(settings, base, text)
    except UserError as error:
        output["notes"] = [str(error)]
        raise
    for note in () if as_json else output["notes"]:
        click.echo(shown(note))


def _check_project(
    settings: "PipelineSettings", nodes: int, yes: bool, as_json: bool, output: dict[str, Any]
) -> None:
    """Test the cloud project, with the smallest training on so many nodes unless there are 0, and
    add what is found to `output`. With `as_json`, what people watch goes to standard error."""
    from llm_assets.cloud.settings import cloud_config_path, load_cloud_settings
    from llm_assets.cloud.setup.check import Uses
    from llm_assets.cloud.setup.check import check as check_project

    cloud = load_cloud_settings()
    runner = settings.training_place
    is_mounted = settings.store.removeprefix("gs://").split("/")[0] == cloud.bucket
    if runner in ("google_batch", "tpu_vm") and not is_mounted:
        raise UserError(
            f"`store` is {settings.store}, and machines of `training.runner: {runner}` mount "
            f"`bucket: {cloud.bucket}` of {cloud_config_path()}: name one bucket in both."
        )
    # The smallest runs (`--smoke`) use every image, wherever the pipeline serves and cleans.
    uses = Uses(
        runner,
        serves=settings.platform == "google_cloud" or nodes > 0,
        batches=(settings.spark.runner or settings.platform) == "google_cloud" or nodes > 0,
        bigquery=any(source.type == "bigquery" for source in settings.raw_corpus.sources),
        tracking=settings.checkpoint.logging.weights_and_biases is not None,
    )
    findings = check_project(cloud, uses)
    for finding in findings:
        click.echo(shown(finding.line()), err=as_json)
    # Jobs cost money, and would fail for what is known already.
    if nodes and all(finding.ok is not False for finding in findings):
        findings += _smoke(cloud, nodes, yes, as_json, runner)
    output["findings"] = [asdict(finding) for finding in findings]
    problems = sum(finding.ok is False for finding in findings)
    if problems:
        raise UserError(
            f"{problems} of {len(findings)} checks failed. Fix each PROBLEM listed above; the keys "
            f"are those of {cloud_config_path()}."
        )
    # With the rights that were asked for above; where this machine reads, it was done already.
    if settings.platform != "local":
        # Imported late, since it needs more than what was checked above.
        from llm_assets.preflight.check import find_sources

        find_sources(settings.raw_corpus)


def _smoke(
    cloud: "GoogleCloudSettings", nodes: int, yes: bool, as_json: bool, runner: "TrainingPlace"
) -> "list[Finding]":
    """Run the smallest batch and jobs, after their price was said; shows what each found."""
    from llm_assets.cloud.settings import cloud_config_path
    from llm_assets.cloud.spending import PRICES_AS_OF, estimate_smoke
    from llm_assets.runners.smoke import smoke as run_smallest

    for stage in estimate_smoke(cloud, nodes):
        click.echo(stage.line(), err=as_json)
    click.echo(f"Prices: {PRICES_AS_OF}", err=as_json)
    # It costs money.
    if not yes:
        click.confirm("Start them?", abort=True, err=as_json)
    findings = []
    for finding in run_smallest(cloud, cloud_config_path(), nodes, runner):
        findings.append(finding)
        click.echo(shown(finding.line()), err=as_json)
    return findings


@click.command()
@click.option(
    "--corpus-gb",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Text to clean, in gigabytes.",
)
@click.option(
    "--tokens",
    type=POSITIVE,
    default=1e9,
    show_default="1e9",
    help="Tokens to train on, repeats included.",
)
@click.option(
    "--parameters",
    type=POSITIVE,
    default=1.24e9,
    show_default="1.24e9",
    help="Parameters of the model.",
)
@json_option
def estimate(corpus_gb: float, tokens: float, parameters: float, as_json: bool) -> None:
    """Estimate time and cost on Google Cloud.

    Training and evaluation are estimated as Vertex AI jobs. Once a local pipeline has trained,
    `llm-assets check` shows how long training takes here.

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
        output = {"stages": [asdict(stage) for stage in stages], "prices": PRICES_AS_OF}
        click.echo(json.dumps(output, indent=2))
        return
    for stage in stages:
        click.echo(stage.line())
    click.echo(f"Prices: {PRICES_AS_OF}")


@click.command()
@click.option(
    "--outputs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the output of `terraform output -json`.",
)
def setup(outputs: Path | None) -> None:
    """Write the cloud settings from Terraform outputs.

    Reads the outputs of the Terraform configuration in infrastructure/.

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
@click.option("--end", "is_ending", is_flag=True, help="End all listed jobs, without asking.")
@json_option
def machines(is_ending: bool, as_json: bool) -> None:
    """List jobs on Google Cloud that have not ended.

    Lists the jobs that runs have submitted, on all services, with machines, submission times
    and costs so far. Runs end their own jobs; --end is for jobs that were left behind, but ends
    those of active runs too.

    \b
    Examples:
      llm-assets machines
      llm-assets machines --end
    """
    from llm_assets.cloud.settings import load_cloud_settings
    from llm_assets.cloud.spending import active_jobs, end_jobs

    def report(line: str) -> None:
        click.echo(shown(line), err=True)

    jobs, faults = active_jobs(load_cloud_settings())
    for job in jobs:
        click.echo(shown(job.line()), err=as_json)
    ended, refused = end_jobs(jobs if is_ending else [], report)
    if as_json:
        rows = [job.as_json() | {"ended": job in ended} for job in jobs]
        click.echo(json.dumps(rows, indent=2))
    elif is_ending and jobs:
        click.echo(f"Ended: {len(ended)}.")
    elif jobs:
        click.echo("End them with: llm-assets machines --end")
    elif not faults:
        click.echo("No job of this project's runs is active.")
    # This is raised last, so that all that could be listed and ended has been told before.
    if faults := [*faults, *refused]:
        raise UserError("\n".join(faults))


COMMANDS = (check, estimate, setup, machines)
