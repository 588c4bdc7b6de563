"""`llm-assets trace`: from an answer to the text that the version which gave it was trained on."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.shown import shown_in_line
from llm_assets.cli.session import Session
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.tracing.influence import CANDIDATES
from llm_assets.tracing.trace import (
    MOST_CHARACTERS,
    Asked,
    Trace,
    Tracer,
    answer_of_text,
    answers_to_request,
)
from llm_assets.tracing.training_text import Source

STRETCHES_SHOWN = 10


def find_answers(
    session: Session,
    request: str | None,
    text: str | None,
    version: int | None,
    prompt: str | None = None,
) -> list[Asked]:
    """The answers that are meant; raises UserError where nothing is or it is not on record.

    Args:
        prompt: what they were given to, in place of what was kept of it.
    """
    state = session.registry.state()
    if request is None:
        asked = [answer_of_text(state, text or "", version)]
    else:
        folder = endpoint_folder(session.settings)
        asked = answers_to_request(state, folder, session.settings.endpoint.journal, request, text)
    return asked if prompt is None else [replace(one, prompt=prompt) for one in asked]


def read_answer(path: Path) -> str:
    """The text of a file; raises UserError where it cannot be read as text or is too long."""
    try:
        if path.stat().st_size > 4 * MOST_CHARACTERS:
            raise UserError(f"{path} is larger than what is traced at a time: give a part of it.")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}. Give a UTF-8 file.") from error


def trace_answers(
    session: Session, asked: list[Asked], influence: bool, as_json: bool, report: Report
) -> None:
    """Trace answers and tell what was found."""
    state = session.registry.state()
    quiet: Report = (lambda line: None) if as_json else report
    tracer = Tracer(session.record.store, quiet)
    for one in asked:
        found = tracer.trace(state, one.version, one.answer, one.prompt if influence else None)
        if as_json:
            report(json.dumps(asdict(found) | {"verdict": found.verdict, "share": found.share}))
            continue
        for line in told(found):
            report(line)


def told(found: Trace) -> Iterator[str]:
    """What was found, in lines for a terminal."""
    if found.verbatim:
        yield (
            f"VERBATIM: {found.share:.0%} of the answer stands word for word in text that version "
            f"{found.version} was trained on."
        )
    elif found.near:
        yield (
            f"NEAR: no {found.shortest} tokens of the answer stand word for word in text that "
            f"version {found.version} was trained on; these documents share its words."
        )
    else:
        yield f"NOTHING FOUND: version {found.version} was trained on no text like this answer."
    for stretch in found.verbatim[:STRETCHES_SHOWN]:
        text = shown_in_line(found.answer[stretch.start : stretch.end])
        places = f"{stretch.places:,} places" if stretch.places > 1 else "one place"
        yield ""
        yield f"«{text}» ({stretch.tokens} tokens, {places})"
        for source in stretch.sources:
            yield from _source(source)
    if found.near:
        yield ""
        yield "Nearest documents trained on, by BM25 (like the answer, not its words):"
        for near in found.near:
            yield f"  score {near.score:.1f}"
            yield from _source(near.source)
    if found.influential is not None:
        yield ""
        yield f"Of the {CANDIDATES} nearest, those of the most influence, by gradients (no proof):"
        for near in found.influential:
            yield f"  cosine {near.score:.3f}"
            yield from _source(near.source)
    if found.unknown:
        names = ", ".join(run.name for run in found.unknown)
        yield f"Not looked at, since its text or its record is gone: {names}."


def _source(source: Source) -> Iterator[str]:
    place = f"{source.shard}, row {source.row}"
    yield f"  {shown_in_line(source.document)} ({shown_in_line(source.source)}, {place})"
    yield f"    license {shown_in_line(source.license)}; {'; '.join(map(str, source.lessons))}"
    around = f"…{source.before}[{source.text}]{source.after}…"
    yield f"    {shown_in_line(' '.join(around.split()))}"
