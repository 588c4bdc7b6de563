"""`llm-assets explain` and `llm-assets document`: where a version and a document come from."""

import json
from dataclasses import asdict
from typing import Any

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from artifacts.shown import shown, shown_in_line
from llm_assets.cli.session import Session
from llm_assets.forgetting.listed import ForgottenDocument, read_list
from llm_assets.tracing import explain as provenance
from llm_assets.tracing.lessons import all_runs, lessons_of
from spark_jobs.explain import explain_document

DOCUMENTS_SHOWN = 20


def tell_version(
    session: Session, number: int, text: str | None, as_json: bool, report: Report
) -> None:
    """Say what stands behind a version, and what it was trained on of a piece of text."""
    store, state = session.pipeline.store, session.registry.state()
    version = state.get(number)
    found = provenance.find_text(store, state, version, text) if text is not None else []
    if as_json:
        told: dict[str, Any] = provenance.explain_as_json(store, state, version)
        report(json.dumps(told | {"documents": [asdict(one) for one in found]}, indent=2))
        return
    if text is None:
        report(shown(provenance.explain(store, state, version)))
        return
    taught = sum(bool(one.lessons) for one in found)
    if not found:
        report("No document of the clean corpus holds this text.")
        return
    report(
        f"{len(found):,} document(s) of the corpus of version {number} hold this text; it was "
        f"trained on {taught:,} of them."
    )
    for one in found[:DOCUMENTS_SHOWN]:
        report(f"  {one}")
    if len(found) > DOCUMENTS_SHOWN:
        report(f"  and {len(found) - DOCUMENTS_SHOWN:,} more, which --json lists")


def tell_document(session: Session, identifier: str, as_json: bool, report: Report) -> None:
    """Say what a document was merged with and why, and which versions were trained on it."""
    record, store = session.pipeline.record, session.pipeline.store
    listed = read_list(store, session.settings.name).documents
    clean = record.current("clean_corpus", needed_by="document")
    shards = record.find_current("tokenized_shards")
    stats = ShardStats.model_validate(shards.stats) if shards else None
    folder = str(shards.path) if shards else None
    try:
        story = explain_document(clean.url, folder, stats, identifier)
    except UserError:
        entry = next((one for one in listed if one.id == identifier), None)
        if entry is None:
            raise
        _tell_forgotten(session, entry, as_json, report)
        return
    kept = {"id": story.survivor} | {name: getattr(story, name) for name in _KEPT}
    (exposure,) = provenance.exposures(all_runs(store, session.registry.state()), [kept])
    if as_json:
        report(json.dumps(asdict(story) | {"exposure": asdict(exposure)}, indent=2))
        return
    report(shown(str(story)))
    report(f"  {exposure}")
    for one in listed:
        if story.survivor == one.id or story.text_hash == one.text_hash:
            report(f"  {_how_forgotten(one)}: in no later corpus")


def _tell_forgotten(
    session: Session, entry: ForgottenDocument, as_json: bool, report: Report
) -> None:
    """Say of a document that is in no corpus any more what its pipeline has on record."""
    runs = all_runs(session.pipeline.store, session.registry.state())
    lessons = lessons_of(runs, [entry.text_hash])[entry.text_hash] if entry.text_hash else []
    if as_json:
        told = {"forgotten": entry.model_dump(mode="json"), "lessons": [asdict(x) for x in lessons]}
        report(json.dumps(told, indent=2))
        return
    report(f"{shown_in_line(entry.id)}: {_how_forgotten(entry)}, and in no corpus any more")
    for lesson in lessons:
        report(f"  before, it was trained on by {lesson}")


def _how_forgotten(entry: ForgottenDocument) -> str:
    return (
        f"forgotten {entry.at:%Y-%m-%d} by {shown_in_line(entry.by)} "
        f"({shown_in_line(entry.reason)})"
    )


_KEPT = ("source", "split", "text_hash")
