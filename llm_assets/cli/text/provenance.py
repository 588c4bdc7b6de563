"""The commands about text: where a version and an answer come from, and what is to be forgotten."""

import sys
from pathlib import Path

import click

from artifacts.errors import UserError
from llm_assets.cli.options import json_option, name_option, reason_option, version_argument


@click.command()
@version_argument
@click.option("--text", help="Say instead what it was trained on of the documents that hold this.")
@json_option
def explain(version: int, text: str | None, as_json: bool) -> None:
    """Say which text, which code and which checkpoint stand behind a version.

    \b
    Examples:
      llm-assets explain 1
      llm-assets explain 1 --text "Return the eigenvalues"
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.explain import tell_version

    tell_version(open_session(), version, text, as_json, click.echo)


@click.command()
@click.argument("identifier")
@json_option
def document(identifier: str, as_json: bool) -> None:
    """Say what a document was merged with and why, and which versions were trained on it.

    \b
    Example:
      llm-assets document manuals/pumps/p-101.md
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.explain import tell_document

    tell_document(open_session(), identifier, as_json, click.echo)


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path), metavar="PAGE")
@click.option(
    "--copies", type=click.IntRange(0, 1_000), default=50, help="Most near-copies; 50 by default."
)
def dropped(path: Path, copies: int) -> None:
    """Write an HTML page of what cleaning dropped, copies beside what they are copies of.

    It holds text of the corpus.

    \b
    Example:
      llm-assets dropped dropped.html
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.text.dropped import write_page

    write_page(open_session(), path, copies, click.echo)


@click.command()
@click.argument("identifiers", nargs=-1, metavar="[ID]...")
@click.option("--file", "path", type=click.Path(path_type=Path), help="A file, an id on each line.")
@click.option("--source", help="All documents of a source.")
@name_option
@reason_option
@click.option("--yes", is_flag=True, help="Forget what is listed.")
def forget(
    identifiers: tuple[str, ...],
    path: Path | None,
    source: str | None,
    name: str,
    reason: str,
    yes: bool,
) -> None:
    """List documents with their copies and what was trained on them; forget them with --yes.

    They are in no later corpus, what serves is trained once more without them from where it first
    met one, and every version that was trained on them is withdrawn.

    \b
    Examples:
      llm-assets forget manuals/pumps/p-101.md --reason "its author asked"
      llm-assets forget --source tickets --reason "the contract ended" --yes
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.text import forget as forgetting

    session = open_session()
    documents = forgetting.find_documents(session, identifiers, path, source)
    forgetting.forget(session, documents, name, reason, yes, click.echo)


@click.command()
@click.option("--request", help="The request's id, the X-Request-Id of the answer.")
@click.option("--text", help="The answer.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="A file with the answer.")
@click.option("--version", type=int, help="Which version answered; the serving one by default.")
@click.option("--influence", is_flag=True, help="Rank the nearest by influence; takes minutes.")
@click.option("--prompt", help="What the answer was given to, for --influence.")
@click.option("--page", is_flag=True, help="Ask in the browser instead.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8011, help="Of the page.")
@json_option
def trace(
    request: str | None,
    text: str | None,
    path: Path | None,
    version: int | None,
    influence: bool,
    prompt: str | None,
    page: bool,
    port: int,
    as_json: bool,
) -> None:
    """Show the text that a version was trained on and that stands in an answer, or is near it.

    \b
    Examples:
      llm-assets trace --request 5f0c2b       an answer that the endpoint gave
      llm-assets trace --text "The valve ..." any text, as if the serving version had said it
      llm-assets trace --page                 the same in the browser
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.text.trace import find_answers, read_answer, trace_answers
    from llm_assets.cli.text.trace_page import serve_page

    if page:
        serve_page(open_session(), port, click.echo)
        return
    if request is None and text is None and path is None:
        raise UserError("Name what to trace: --request ID, --text TEXT, --file PATH or --page.")
    answer = read_answer(path) if path else text
    session = open_session()
    asked = find_answers(session, request, answer, version, prompt)
    trace_answers(session, asked, influence, as_json, click.echo)


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="CERTIFICATE|FOLDER")
@click.option("--key", type=click.Path(path_type=Path), help="The issuer's public key, in PEM.")
@click.option("--retrain", is_flag=True, help="Train the runs once more and compare the weights.")
def verify(path: Path, key: Path | None, retrain: bool) -> None:
    """Check a certificate of `forget`, or the signature of a folder that `export` wrote.

    Of a certificate, what it states is held against the store as well.

    \b
    Examples:
      llm-assets verify forgotten-0f3a.json --key issuer.pub
      llm-assets verify forgotten-0f3a.json --retrain   on another machine, with the store
      llm-assets verify manuals-3-safetensors --key release.pub
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.verify import verify_certificate, verify_export

    if path.is_dir():
        verify_export(path, key, click.echo)
    elif not verify_certificate(open_session, path, key, retrain, click.echo):
        sys.exit(1)


@click.command()
@version_argument
@click.argument("folder", type=click.Path(path_type=Path))
def lineage(version: int, folder: Path) -> None:
    """Write a version's lineage for other tools: CycloneDX, OpenLineage and Croissant.

    \b
    Example:
      llm-assets lineage 2 exported/  bom.cdx.json, openlineage.jsonl and croissant.json in there
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.versions.lineage import write_lineage

    write_lineage(open_session(), version, folder, click.echo)


PROVENANCE = (explain, document, dropped, forget, trace, verify, lineage)
