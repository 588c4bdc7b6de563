"""Commands about text: where it is, what it taught, and how it is forgotten."""

import json
import sys
from pathlib import Path
from typing import Literal

import click

from artifacts.errors import UserError, shown
from llm_assets.cli.commands.options import (
    UTF8,
    json_option,
    name_option,
    read_text,
    reason_option,
    refuse_together,
)
from llm_assets.cli.session import open_session


@click.command()
@click.argument("identifier", type=UTF8)
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
    history = find_document(session.record, session.registry.state(), identifier)
    click.echo(json.dumps(history.as_json(), indent=2) if as_json else shown(str(history)))


@click.command()
@click.argument("identifiers", type=UTF8, nargs=-1, metavar="[ID]...")
@click.option("--file", "path", type=click.Path(path_type=Path), help="File with one id per line.")
@click.option(
    "--source",
    type=UTF8,
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
# The board gives it, so that the command carries out only the plan that the board has shown.
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
    documents with at least half of their text; wording that many documents share does not count. If
    the wanted version was trained on them, its training is repeated without them, from the last
    saved checkpoint that had not read any, or else from the beginning. Every version that was
    trained on them is withdrawn.

    \b
    Examples:
      llm-assets forget manuals/pumps/p-101.md --reason "its author asked"
      llm-assets forget --source tickets --reason "the contract ended" --yes
      llm-assets forget LICENSE --similar keep --reason "on request" --yes   only exact copies
      llm-assets forget manuals/pumps/p-101.md --undo --reason "the author agreed" --yes
    """
    from llm_assets.cli.text import forget as forgetting
    from llm_assets.cli.text.forget_plan import find_documents

    refuse_together(undo=is_undone, similar=similar)
    session, decision = open_session(), forgetting.ForgetDecision(by=name, reason=reason)
    lines = read_text(path).splitlines() if path else []
    documents = find_documents(session, [*identifiers, *lines], source)
    if is_undone:
        forgetting.undo(session, documents, decision, yes, click.echo)
    else:
        forgetting.forget(session, documents, decision, similar, yes, click.echo, plan)


@click.command()
@click.option("--request", help="X-Request-Id, or id, of an answer from the local endpoint.")
@click.option("--text", type=UTF8, help="The answer.")
@click.option(
    "--file", "path", type=click.Path(path_type=Path), help="A file with the answer, not --text."
)
@click.option(
    "--version",
    type=int,
    help="Version that gave the answer in --text or --file. Default: the serving one.",
)
@json_option
def trace(
    request: str | None, text: str | None, path: Path | None, version: int | None, as_json: bool
) -> None:
    """Find the training text behind an answer.

    Shows training text that the answer repeats or resembles.
    The board (`llm-assets board`) shows the same in the browser.

    \b
    Examples:
      llm-assets trace --request REQUEST_ID    an answer from the endpoint
      llm-assets trace --text "The valve ..."  any text, as an answer of the serving version
    """
    from llm_assets.cli.text.trace import trace_answers
    from llm_assets.endpoint.folder import endpoint_folder
    from llm_assets.tracing.trace import find_answers

    if request is None and text is None and path is None:
        raise UserError("Name what to trace: --request ID, --text TEXT or --file PATH.")
    refuse_together(text=text, file=path)
    # The answer on record names its version.
    refuse_together(request=request, version=version)
    answer = read_text(path) if path else text
    session = open_session()
    folder, journal = endpoint_folder(session.settings), session.settings.endpoint.journal
    answers = find_answers(session.registry.state(), folder, journal, request, answer, version)
    trace_answers(session, answers, as_json, click.echo)


@click.command()
@click.argument("place", metavar="CERTIFICATE")
@click.option("--key", type=click.Path(path_type=Path), help="The issuer's public key, in PEM.")
@click.option(
    "--retrain",
    is_flag=True,
    help="Also repeat the training without the text, and compare the weights.",
)
def verify(place: str, key: Path | None, retrain: bool) -> None:
    """Check a certificate that `forget` wrote.

    Checks its signature, and compares its statements with the store.

    \b
    Examples:
      llm-assets verify forgotten-0f3a.json --key issuer.pub
      llm-assets verify forgotten-0f3a.json --retrain
    """
    from llm_assets.cli.text import forget as forgetting

    if not forgetting.verify(open_session, place, key, retrain, click.echo):
        sys.exit(1)


COMMANDS = (document, forget, trace, verify)
