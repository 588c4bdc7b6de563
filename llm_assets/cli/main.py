"""The `llm-assets` command: every one of its commands, in the order of their use.

What a command needs is imported when it runs: Dagster alone takes longer than most commands.
"""

import getpass
import importlib.metadata
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from artifacts.errors import UserError, has_control_characters, reason_of, shown, shown_in_line
from artifacts.program.lifetime import importing
from llm_assets import services
from llm_assets.cli.session import Session, open_session, use_this_folders_history
from llm_assets.config import CONFIG_VARIABLE, DEFAULT_CONFIG, config_path, load_settings

if TYPE_CHECKING:
    from llm_assets.cloud.settings import GoogleCloudSettings
    from llm_assets.cloud.setup.rights import Finding
    from llm_assets.config import PipelineSettings, TrainingPlace

COMPLETE = "Everything a run needs is in place."
POSITIVE = click.FloatRange(min=0, min_open=True)
ENDING = {signal.SIGTERM, signal.SIGINT}
version_argument = click.argument("version", type=int)


def _check_line(_: click.Context, __: click.Parameter, given: str) -> str:
    """What is recorded with a decision; raises BadParameter unless it is a line of plain text."""
    if not given.strip():
        raise click.BadParameter("A decision needs a name and a reason: both are recorded with it.")
    if has_control_characters(given):
        raise click.BadParameter(
            f"'{shown_in_line(given)}' contains a line break or another control character. Write "
            "it on one line of plain text."
        )
    return given


name_option = click.option(
    "--name",
    default=getpass.getuser,
    callback=_check_line,
    help="Name recorded with the decision (default: your login).",
)
reason_option = click.option(
    "--reason", required=True, callback=_check_line, help="Reason, recorded with the decision."
)
generation_option = click.option(
    "--generation", type=int, hidden=True, help="Registry generation that the decision refers to."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
PORT = click.IntRange(1, 65535)
port_option = click.option(
    "--port",
    type=PORT,
    default=services.PORT,
    show_default=True,
    help=f"Port of the UI on {services.HOST}.",
)


@click.group(context_settings={"max_content_width": 100})
@click.version_option(importlib.metadata.version("llm-assets"), prog_name="llm-assets")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help=f"The pipeline file. Default: the one that {CONFIG_VARIABLE} names, else "
    f"{DEFAULT_CONFIG}, else the only one here.",
)
def commands(config: Path | None) -> None:
    """Keep a language model current on your own text.

    \b
    Examples:
      llm-assets init /data/manuals                write a pipeline file for a folder
      llm-assets --config config/manuals.yaml run  build everything and serve the result
      llm-assets status                            what serves, and why
    """
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config)


@commands.command()
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
    from llm_assets.cli.pipeline.init import write_pipeline, write_project

    started = write_pipeline(folder, name, output)
    for note in started.notes:
        click.echo(f"  {shown(note)}")
    if written := write_project(Path(), started.path, started.path.stem):
        click.echo(f"Wrote the project files: {', '.join(written)}")
    command = f"llm-assets --config {shlex.quote(str(started.path))}"
    if started.obstacle:
        click.echo(shown(started.obstacle))
        click.echo(f"Wrote {started.path}. Then: {command} check")
    else:
        click.echo(f"Wrote {started.path}. Now: {command} run")


@commands.command(name="import")
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

    imported = import_file(file, revision)
    target = output or Path("config") / f"{file.stem}.yaml"
    write_imported(imported, target)
    for note in imported.notes:
        click.echo(f"  {shown(note)}")
    click.echo(f"Wrote {target}. Add `store: gs://BUCKET/store` to it.")
    click.echo("It needs, in config/google_cloud.yaml:")
    click.echo(yaml.safe_dump(imported.cloud, sort_keys=False))


@commands.command()
@json_option
def status(as_json: bool) -> None:
    """Show which version serves, what runs, and what waits and why.

    \b
    Examples:
      llm-assets status
      llm-assets status --json | jq .served
    """
    from llm_assets.cli.versions import screen, status_of

    found = status_of(open_session())
    click.echo(json.dumps(found, indent=2) if as_json else shown("\n".join(screen(found))))


@commands.command()
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
    sys.exit(run_pipeline(is_verbose, rebuild, not unjudged))


@commands.command()
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
    from llm_assets.experiments.job import parse_changes

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

    On Google Cloud, the endpoint is deleted. It is started again when `endpoint` is materialized,
    and by `approve`, `reject` and `rollback`.

    \b
    Example:
      llm-assets stop
    """
    session = open_session()
    ended = session.serving.stop(session.settings)
    click.echo("The endpoint has stopped." if ended else "No endpoint was running.")


@commands.command()
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

    session = open_session()
    if as_json:
        click.echo(json.dumps(versions_as_json(session), indent=2))
        return
    compared = compare_figures(session.registry.state().versions)
    for line in (compared if table else list_versions(session)) or [
        "Nothing has been measured yet."
    ]:
        click.echo(shown(line))


@commands.command()
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


@commands.command()
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
    from llm_assets.forgetting.erase import read_list

    session = open_session()
    # One that was trained on what was forgotten is never served again.
    read_list(session.record.store, session.settings.name).refuse_withdrawn(version)
    session.registry.approve(version, name, reason, generation)
    _serve_decision(session, name, lambda wanted: wanted == version)


@commands.command()
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


@commands.command()
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
    told = f"{word}. {' '.join(reason.text for reason in verdict.reasons)}"
    click.echo(verdict.model_dump_json(indent=2) if as_json else shown(told))
    sys.exit(0 if verdict.promoted else 3)


@commands.command()
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


@commands.command()
@version_argument
@click.option(
    "--text", help="Show the documents that contain this text, and whether they were trained on."
)
@json_option
def explain(version: int, text: str | None, as_json: bool) -> None:
    """Show what a version was built from.

    \b
    Examples:
      llm-assets explain 1
      llm-assets explain 1 --text "Return the eigenvalues"
    """
    from llm_assets.cli.text.trace import tell_version

    tell_version(open_session(), version, text, as_json, click.echo)


@commands.command()
@click.argument("identifier")
@json_option
def document(identifier: str, as_json: bool) -> None:
    """Show what happened to a document.

    Shows its duplicates, why they match, and which versions were trained on it.

    \b
    Example:
      llm-assets document manuals/pumps/p-101.md
    """
    from llm_assets.forgetting.document import find_document

    session = open_session()
    found = find_document(session.record, session.registry.state(), identifier)
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else shown(str(found)))


@commands.command()
@click.argument("identifiers", nargs=-1, metavar="[ID]...")
@click.option("--file", "path", type=click.Path(path_type=Path), help="File with one id per line.")
@click.option(
    "--source",
    help="All documents of a source, also those that have left it or that cleaning dropped.",
)
@name_option
@reason_option
@click.option(
    "--similar",
    type=click.Choice(["drop", "keep"]),
    help="drop: forget other documents with the text, too. keep: of other documents, forget only "
    "exact copies. Needed only for text that is short or common; otherwise, the default is drop.",
)
@click.option(
    "--undo", "is_undone", is_flag=True, help="Let forgotten documents return in the next corpus."
)
@click.option("--yes", is_flag=True, help="Carry out what is listed.")
@click.option("--plan", hidden=True, help="The name of a listed plan; --yes carries out no other.")
def forget(
    identifiers: tuple[str, ...],
    path: Path | None,
    source: str | None,
    name: str,
    reason: str,
    similar: Literal["drop", "keep"] | None,
    is_undone: bool,
    yes: bool,
    plan: str | None,
) -> None:
    """Forget documents, and withdraw versions trained on them.

    Lists the documents, other documents that contain their text, and what was trained on them;
    --yes forgets them. No later corpus contains them or, unless you choose --similar keep,
    documents with at least half of their text. If the wanted version was trained on them, its
    training is repeated without them, from the last saved checkpoint that had not read any, or else
    from the beginning. Every version that was trained on them is withdrawn.

    \b
    Examples:
      llm-assets forget manuals/pumps/p-101.md --reason "its author asked"
      llm-assets forget --source tickets --reason "the contract ended" --yes
      llm-assets forget LICENSE --similar keep --reason "on request" --yes   only exact copies
      llm-assets forget manuals/pumps/p-101.md --undo --reason "the author agreed" --yes
    """
    from llm_assets.cli.text import forget as forgetting

    session, decision = open_session(), forgetting.ForgetDecision(by=name, reason=reason)
    documents = forgetting.find_documents(session, identifiers, path, source)
    if is_undone:
        forgetting.undo(session, documents, decision, yes, click.echo)
    else:
        forgetting.forget(session, documents, decision, similar, yes, click.echo, plan)


@commands.command()
@click.option("--request", help="X-Request-Id, or id, of an answer from the local endpoint.")
@click.option("--text", help="The answer.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="A file with the answer.")
@click.option(
    "--version",
    type=int,
    help="Version that gave the answer in --text or --file. Default: the serving one.",
)
@json_option
def trace(
    request: str | None,
    text: str | None,
    path: Path | None,
    version: int | None,
    as_json: bool,
) -> None:
    """Find the training text behind an answer.

    Shows training text that the answer repeats or resembles.
    The board (`llm-assets board`) shows the same in the browser.

    \b
    Examples:
      llm-assets trace --request REQUEST_ID    an answer from the endpoint
      llm-assets trace --text "The valve ..."  any text, as an answer of the serving version
    """
    from llm_assets.cli.text.trace import read_answer, trace_answers
    from llm_assets.endpoint.folder import endpoint_folder
    from llm_assets.tracing.trace import find_answers

    if request is None and text is None and path is None:
        raise UserError("Name what to trace: --request ID, --text TEXT or --file PATH.")
    answer = read_answer(path) if path else text
    session = open_session()
    folder, kept = endpoint_folder(session.settings), session.settings.endpoint.journal
    asked = find_answers(session.registry.state(), folder, kept, request, answer, version)
    trace_answers(session, asked, as_json, click.echo)


@commands.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="CERTIFICATE")
@click.option("--key", type=click.Path(path_type=Path), help="The issuer's public key, in PEM.")
@click.option(
    "--retrain",
    is_flag=True,
    help="Also repeat the training without the text, and compare the weights.",
)
def verify(path: Path, key: Path | None, retrain: bool) -> None:
    """Check a certificate that `forget` wrote.

    Checks its signature, and compares its statements with the store.

    \b
    Examples:
      llm-assets verify forgotten-0f3a.json --key issuer.pub
      llm-assets verify forgotten-0f3a.json --retrain
    """
    from llm_assets.cli.text import forget as forgetting

    if not forgetting.verify(open_session, path, key, retrain, click.echo):
        sys.exit(1)


@commands.command()
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
    settings = session.settings
    cleaning = clean_store(
        session.pipeline.record,
        session.registry,
        settings.retention,
        settings.forgetting,
        yes,
        (lambda line: None) if as_json else click.echo,
    )
    if as_json:
        click.echo(json.dumps(cleaning.as_json() | {"removed": yes}, indent=2))
    elif cleaning.removals and not yes:
        click.echo("Nothing has been deleted. To delete all of this: llm-assets clean --yes")


@commands.command()
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
    examination = examine(session.record, session.registry, endpoint, artifacts)
    if not as_json:
        for line in examination.lines(repair):
            click.echo(shown(line))
    faults = examination.faults
    left = examination.repair(partial(click.echo, err=True)) if repair else faults
    if as_json:
        click.echo(json.dumps(examination.as_json(left), indent=2))
    elif repair:
        click.echo(f"{len(faults) - len(left)} of {len(faults)} faults repaired.")
    if left:
        sys.exit(1)


@commands.command()
@port_option
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
    load_settings(config_path())
    services.bring_up(Path.cwd(), config_path(), port, board_port, click.echo)
    click.echo(f"board: http://{services.HOST}:{board_port}   UI: http://{services.HOST}:{port}")
    click.echo(
        shown(f"logs: {Path.cwd() / services.STATE_FOLDER}   stop them with: llm-assets down")
    )
    if wait:
        # Not before: those that were started would never hear a signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        signal.sigwait(ENDING)
        services.stop(Path.cwd() / services.STATE_FOLDER)


@commands.command()
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


@commands.command()
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
    from llm_assets.cli.versions import status_of

    session = open_session()
    # A registry and a store are shown without a history of runs, too.
    if Path("dagster.yaml").exists():
        use_this_folders_history()
    command = [sys.argv[0], "--config", str(session.path.absolute())]
    opened = open_board(
        session.settings,
        session.record,
        session.registry,
        lambda: status_of(session),
        command,
    )
    serve_board(opened, port, click.echo)


@commands.command()
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
    help="Locally, read all text, and list what is set aside or unread.",
)
@json_option
def check(smoke: bool, nodes: int, yes: bool, is_whole: bool, as_json: bool) -> None:
    """Check everything that a run needs.

    With `platform: local`: the text (read for up to a minute), the base model, the port and the
    disk. With `platform: google_cloud`: permissions, APIs, billing, quotas, images, secrets and the
    bucket.

    \b
    Examples:
      llm-assets check
      llm-assets check --all        lists every file or row that is set aside, and why
      llm-assets check --json | jq .ok
      llm-assets check --smoke      on Google Cloud, also runs minimal jobs
      llm-assets check --smoke --nodes 2      also tests the network between two machines
    """
    settings = load_settings(config_path())
    if settings.platform != "local":
        _check_project(settings, nodes if smoke else 0, yes, as_json)
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


def _check_project(settings: "PipelineSettings", nodes: int, yes: bool, as_json: bool) -> None:
    """Test the cloud project; with `as_json`, what people watch goes to standard error.

    Args:
        nodes: machines of the smallest training; 0 starts nothing.
    """
    from llm_assets.cloud.settings import cloud_config_path, load_cloud_settings
    from llm_assets.cloud.setup.check import check as check_project

    cloud = load_cloud_settings()
    runner: TrainingPlace = settings.training.runner or settings.platform
    findings = check_project(
        cloud,
        any(source.type == "bigquery" for source in settings.raw_corpus.sources),
        runner,
        settings.checkpoint.logging.weights_and_biases is not None,
    )
    for finding in findings:
        click.echo(shown(finding.line()), err=as_json)
    if nodes and all(finding.ok is not False for finding in findings):
        findings += _smoke(cloud, nodes, yes, as_json, runner)
    problems = sum(finding.ok is False for finding in findings)
    if as_json:
        told = {"ok": not problems, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(told, indent=2))
    if problems:
        raise UserError(
            f"{problems} of {len(findings)} checks failed. Fix each PROBLEM listed above; the keys "
            f"are those of {cloud_config_path()}."
        )
    unknown = sum(finding.ok is None for finding in findings)
    doubtful = f"No problems found. Read the lines marked unknown first: {unknown}."
    click.echo(doubtful if unknown else COMPLETE, err=as_json)


def _smoke(
    cloud: "GoogleCloudSettings", nodes: int, yes: bool, as_json: bool, runner: "TrainingPlace"
) -> "list[Finding]":
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
    for finding in run_smallest(cloud, cloud_config_path(), nodes, runner):
        findings.append(finding)
        click.echo(shown(finding.line()), err=as_json)
    return findings


@commands.command()
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
        told = {"stages": [asdict(stage) for stage in stages], "prices": PRICES_AS_OF}
        click.echo(json.dumps(told, indent=2))
        return
    for stage in stages:
        click.echo(stage.line())
    click.echo(f"Prices: {PRICES_AS_OF}")


@commands.command()
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


@commands.command()
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

    listed, faults = active_jobs(load_cloud_settings())
    for job in listed:
        click.echo(shown(job.line()), err=as_json)
    ended, refused = end_jobs(listed if is_ending else [], report)
    if as_json:
        told = [job.as_json() | {"ended": job in ended} for job in listed]
        click.echo(json.dumps(told, indent=2))
    elif is_ending and listed:
        click.echo(f"Ended: {len(ended)}.")
    elif listed:
        click.echo("End them with: llm-assets machines --end")
    elif not faults:
        click.echo("No job of this project's runs is active.")
    if faults := [*faults, *refused]:
        raise UserError("\n".join(faults))


@commands.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Read this version's documentation offline.

    Without PAGE, lists the pages.

    \b
    Examples:
      llm-assets docs
      llm-assets docs settings
    """
    # A checkout has them where they are written; an installation, among its own files.
    written = list((Path(__file__).parents[2] / "docs").glob("*.md"))
    installed = importlib.metadata.files("llm-assets") or []
    found = written or [Path(str(f.locate())) for f in installed if f.match("llm-assets/docs/*.md")]
    pages = {path.stem: path for path in sorted(found)}
    if page is None:
        for name, path in pages.items():
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            click.echo(f"{name:25}{title}")
    elif page.removesuffix(".md") in pages:
        click.echo_via_pager(pages[page.removesuffix(".md")].read_text(encoding="utf-8"))
    else:
        raise UserError(f"There is no page {page!r}. The pages are: {', '.join(pages)}.")


def main() -> None:
    """Entry point: whatever has a known reason is one message, without a traceback."""
    # It logs each error with a traceback before raising it.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    try:
        commands()
    except Exception as error:
        # What has no known reason keeps its traceback.
        reason = reason_of(error)
        if reason is None:
            raise
        click.echo(f"Error: {shown(reason)}", err=True)
        sys.exit(1)
