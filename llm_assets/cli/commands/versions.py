"""Commands about versions: what became of them, and what a person decides."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

from artifacts.errors import shown
from llm_assets.cli.commands.options import (
    UTF8,
    generation_option,
    json_option,
    name_option,
    reason_option,
    refuse_together,
    version_argument,
)
from llm_assets.cli.session import Session, open_session


@click.command()
@json_option
@click.option(
    "--table", is_flag=True, help="Print a Markdown table of the metrics of all evaluated versions."
)
def versions(as_json: bool, table: bool) -> None:
    """List all versions, each with what happened to it last.

    \b
    Examples:
      llm-assets versions
      llm-assets versions --table > figures.md
      llm-assets versions --json | jq '.[-1].verdicts'
    """
    from llm_assets.cli.versions import list_versions, versions_as_json
    from llm_assets.registry.card import compare_figures

    refuse_together(json=as_json, table=table)
    session = open_session()
    if as_json:
        click.echo(json.dumps(versions_as_json(session), indent=2))
        return
    told = compare_figures(session.registry.state().versions) if table else list_versions(session)
    for line in told or ["Nothing has been measured yet."]:
        click.echo(shown(line))


@click.command()
@version_argument
@click.argument("repository")
@click.option(
    "--public",
    is_flag=True,
    help="Create a public repository, or allow uploading to an existing public one.",
)
def publish(version: int, repository: str, public: bool) -> None:
    """Upload a version to the Hugging Face Hub.

    REPOSITORY is OWNER/NAME. If it does not exist, it is created, private unless --public is given.
    Uploads the model, a model card, and metrics and training settings as JSON. Reads the token from
    HF_TOKEN.

    \b
    Example:
      llm-assets publish 2 my-team/manuals
    """
    from llm_assets.cli.publication import publish_version

    click.echo(shown(publish_version(open_session(), version, repository, public, click.echo)))


@click.command()
@version_argument
@name_option
@reason_option
@generation_option
def approve(version: int, name: str, reason: str, generation: int | None) -> None:
    """Approve a version by hand.

    The version is served regardless of the gate's verdict, unless `forget` has withdrawn it.

    \b
    Example:
      llm-assets approve 2 --reason "reads better"
    """
    from llm_assets.forgetting.forgotten_list import read_list

    session = open_session()
    # A version that was trained on forgotten text is never served again.
    read_list(session.record.store, session.settings.name).refuse_withdrawn(version)
    session.registry.approve(version, name, reason, generation)
    _serve_decision(session, name, lambda wanted: wanted == version)


@click.command()
@version_argument
@name_option
@reason_option
@generation_option
def reject(version: int, name: str, reason: str, generation: int | None) -> None:
    """Reject a version.

    If it is serving, the previous version takes over.

    \b
    Example:
      llm-assets reject 4 --reason "wrong dosages"
    """
    session = open_session()
    session.registry.reject(version, name, reason, generation)
    _serve_decision(session, name, lambda wanted: wanted != version)


@click.command()
@click.argument("candidate", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("incumbent", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--metric", help="Metric to compare. Default: the first in the files.")
@click.option(
    "--filter",
    "chosen_filter",
    help="lm-eval filter whose answers to compare; required if the files have several.",
)
@click.option(
    "--lower-is-better",
    is_flag=True,
    help="Lower values of the metric are better, as for error rates.",
)
@click.option(
    "--look",
    type=click.IntRange(1),
    default=1,
    help="1 plus the number of earlier comparisons in this series without a gain.",
)
@click.option(
    "--smallest-effect",
    type=click.FloatRange(0),
    default=0.005,
    show_default=True,
    help="Smallest gain that counts, in the unit of the metric.",
)
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
    is shown to be better, 3 if it is not, and 1 if the files cannot be compared.

    \b
    Examples:
      llm-assets gate new/samples_arc_easy_*.jsonl old/samples_arc_easy_*.jsonl
      llm-assets gate new.jsonl old.jsonl --metric acc_norm --look 4    after 3 without a gain
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
    sentence = f"{word}. {' '.join(reason.text for reason in verdict.reasons)}"
    click.echo(verdict.model_dump_json(indent=2) if as_json else shown(sentence))
    # Not 1, which says that the files cannot be compared: a script has to tell the two apart.
    sys.exit(0 if verdict.promoted else 3)


@click.command()
@name_option
@reason_option
@generation_option
def rollback(name: str, reason: str, generation: int | None) -> None:
    """Go back to the previous version, without downtime.

    \b
    Example:
      llm-assets rollback --reason "users complain"
    """
    session = open_session()
    target = session.registry.roll_back(name, reason, generation).version
    _serve_decision(session, name, lambda wanted: wanted == target)


def _serve_decision(session: Session, name: str, holds: Callable[[int], bool]) -> None:
    """Have what a person decided served; see `serve_decision`."""
    from llm_assets.endpoint.follow import serve_decision

    serve_decision(
        session.registry,
        session.serving,
        session.settings,
        session.record,
        lambda line: click.echo(shown(line)),
        name,
        holds,
    )


@click.command()
@version_argument
@click.option(
    "--text",
    type=UTF8,
    help="Show the documents that contain this text, and whether they were trained on.",
)
@json_option
def explain(version: int, text: str | None, as_json: bool) -> None:
    """Show what a version was built from.

    \b
    Examples:
      llm-assets explain 1
      llm-assets explain 1 --text "Return the eigenvalues"
    """
    from llm_assets.cli.versions import tell_version

    tell_version(open_session(), version, text, as_json, click.echo)


COMMANDS = (versions, publish, approve, reject, gate, rollback, explain)
