"""`llm-assets trace`: from an answer to the text behind it."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from artifacts.errors import shown_in_line
from artifacts.progress import Report, counted
from llm_assets.cli.session import Session
from llm_assets.tracing.trace import AnswerToTrace, Trace, Tracer
from llm_assets.tracing.training_text import Source

STRETCHES_SHOWN = 10


def trace_answers(
    session: Session, asked: list[AnswerToTrace], as_json: bool, report: Report
) -> None:
    state = session.registry.state()
    quiet: Report = (lambda line: None) if as_json else report
    tracer = Tracer(session.record.store, quiet)
    for answer in asked:
        trace = tracer.trace(state, answer.version, answer.answer, answer.question)
        if as_json:
            # A line for each answer, of which a request may have several.
            report(json.dumps(asdict(trace) | {"verdict": trace.verdict, "share": trace.share}))
            continue
        for line in told(trace):
            report(line)


def told(found: Trace) -> Iterator[str]:
    """What was found, in lines for a terminal."""
    training_text = f"text that version {found.version} was trained on"
    if found.verbatim:
        yield f"VERBATIM: {found.percent} of the answer occurs word for word in {training_text}."
    elif found.is_whole:
        yield f"VERBATIM: the whole answer occurs in {training_text}."
    elif found.near:
        yield (
            f"NEAR: no {found.shortest} consecutive tokens of the answer occur word for word in "
            f"{training_text}; the documents below share distinctive words with it or its question."
        )
    else:
        yield f"NOTHING FOUND: nothing like this answer was found in {training_text}."
    if not found.verbatim and 0 < found.tokens < found.shortest:
        yield (
            f"The answer has {counted(found.tokens, 'token')}, fewer than the minimum of "
            f"{found.shortest}, so it was searched for as a whole."
        )
    if found.documents:
        yield ""
        yield f"Documents that contain all of it: {len(found.documents):,}"
        yield from (f"  {document}" for document in found.documents[:STRETCHES_SHOWN])
    for stretch in found.verbatim[:STRETCHES_SHOWN]:
        text = shown_in_line(found.answer[stretch.start : stretch.end])
        yield ""
        yield f"«{text}» ({counted(stretch.tokens, 'token')}, {counted(stretch.places, 'place')})"
        for source in stretch.sources:
            yield from _source(source)
    if found.near:
        yield ""
        yield "Nearest training documents, by BM25 (similar words, not the same text):"
        for match in found.near:
            yield f"  score {match.score:.1f}"
            yield from _source(match.source)
    yield from (f"Not searched: {missing}." for missing in found.missing)


def _source(source: Source) -> Iterator[str]:
    place = f"{source.shard}, row {source.row}"
    yield f"  {shown_in_line(source.document)} ({shown_in_line(source.source)}, {place})"
    yield f"    license {shown_in_line(source.license)}; {'; '.join(map(str, source.lessons))}"
    around = f"…{source.before}[{source.text}]{source.after}…"
    yield f"    {shown_in_line(' '.join(around.split()))}"
