"""The commands about text: where a version and an answer come from, and what is to be forgotten."""

import json
import sys
from pathlib import Path
from typing import Literal

import click

from artifacts.errors import UserError, shown
from llm_assets.cli.options import json_option, name_option, reason_option, version_argument


@click.command()
@version_argument
@click.option("--text", help="Say instead what it was trained on of the documents that hold this.")
@json_option
def explain(version: int, text: str | None, as_json: bool) -> None:
    """Show a version's text, code and checkpoint.

    \b
    Examples:
      llm-assets explain 1
      llm-assets explain 1 --text "Return the eigenvalues"
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.text.trace import tell_version

    tell_version(open_session(), version, text, as_json, click.echo)


@click.command()
@click.argument("identifier")
@json_option
def document(identifier: str, as_json: bool) -> None:
    """Show what became of a document.

    What it was merged with and why, and which versions were trained on it.

    \b
    Example:
      llm-assets document manuals/pumps/p-101.md
    """
    from llm_assets.cli.session import open_session
    from llm_assets.forgetting.document import find_document

    session = open_session()
    found = find_document(session.record, session.registry.state(), identifier)
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else shown(str(found)))


@click.command()
@click.argument("identifiers", nargs=-1, metavar="[ID]...")
@click.option("--file", "path", type=click.Path(path_type=Path), help="A file, an id on each line.")
@click.option("--source", help="All documents of a source.")
@name_option
@reason_option
@click.option(
    "--similar",
    type=click.Choice(["drop", "keep"]),
    help="What becomes of documents that hold the text of a short or a common one.",
)
@click.option("--undo", "is_undone", is_flag=True, help="Let forgotten documents come back.")
@click.option("--yes", is_flag=True, help="Do it with what is listed.")
def forget(
    identifiers: tuple[str, ...],
    path: Path | None,
    source: str | None,
    name: str,
    reason: str,
    similar: Literal["drop", "keep"] | None,
    is_undone: bool,
    yes: bool,
) -> None:
    """Forget documents, and what was trained on them.

    Lists the documents, what holds their text and what was trained on it; --yes forgets them.
    They are in no later corpus, nor is what holds their text: with words changed, something added,
    or inside another document. What serves is trained once more without them from where it first
    met one, and every version that was trained on them is withdrawn.

    \b
    Examples:
      llm-assets forget manuals/pumps/p-101.md --reason "its author asked"
      llm-assets forget --source tickets --reason "the contract ended" --yes
      llm-assets forget LICENSE --similar keep --reason "asked to" --yes   exact copies alone
      llm-assets forget manuals/pumps/p-101.md --undo --reason "the author agreed" --yes
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.text import forget as forgetting

    session, decision = open_session(), forgetting.ForgetDecision(by=name, reason=reason)
    documents = forgetting.find_documents(session, identifiers, path, source)
    if is_undone:
        forgetting.undo(session, documents, decision, yes, click.echo)
    else:
        forgetting.forget(session, documents, decision, similar, yes, click.echo)


@click.command()
@click.option("--request", help="The request's id, the X-Request-Id of the answer.")
@click.option("--text", help="The answer.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="A file with the answer.")
@click.option("--version", type=int, help="Which version answered; the serving one by default.")
@json_option
def trace(
    request: str | None,
    text: str | None,
    path: Path | None,
    version: int | None,
    as_json: bool,
) -> None:
    """Find the training text behind an answer.

    Text that the version was trained on and that stands in the answer, or is near it. The board
    (`llm-assets board`) shows the same in the browser.

    \b
    Examples:
      llm-assets trace --request 5f0c2b       an answer that the endpoint gave
      llm-assets trace --text "The valve ..." any text, as if the serving version had said it
    """
    from llm_assets.cli.session import open_session
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


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="CERTIFICATE")
@click.option("--key", type=click.Path(path_type=Path), help="The issuer's public key, in PEM.")
@click.option("--retrain", is_flag=True, help="Train the runs once more and compare the weights.")
def verify(path: Path, key: Path | None, retrain: bool) -> None:
    """Check a certificate that `forget` wrote.

    Its signature, and what it states against the store.

    \b
    Examples:
      llm-assets verify forgotten-0f3a.json --key issuer.pub
      llm-assets verify forgotten-0f3a.json --retrain   on another machine, with the store
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.text import forget as forgetting

    if not forgetting.verify(open_session, path, key, retrain, click.echo):
        sys.exit(1)


PROVENANCE = (explain, document, forget, trace, verify)
