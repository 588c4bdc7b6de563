"""Where a version comes from, and what became of a document."""

import json
from dataclasses import asdict
from typing import Any

from artifacts.errors import UserError, shown
from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from llm_assets.cli.session import Session
from llm_assets.forgetting.erase import ForgottenDocument, read_list
from llm_assets.tracing import explain as provenance
from llm_assets.tracing.passages import exposures, find_passages
from llm_assets.tracing.training_text import KEEP, all_runs, lessons_of
from spark_jobs.explain import explain_document

DOCUMENTS_SHOWN = 20


def tell_version(
    session: Session, number: int, text: str | None, as_json: bool, report: Report
) -> None:
    """Say what stands behind a version, and what it was trained on of a piece of text."""
    store, state = session.record.store, session.registry.state()
    version = state.get(number)
    found = find_passages(store, state, version, text) if text is not None else None
    if as_json:
        told: dict[str, Any] = provenance.explain_as_json(store, state, version)
        report(json.dumps(told | (asdict(found) if found else {"documents": []}), indent=2))
        return
    if found is None:
        report(shown(provenance.explain(store, state, version)))
        return
    taught = sum(document.is_trained for document in found.documents)
    if found.documents:
        report(
            f"{len(found.documents):,} document(s) of the corpora behind version {number} hold "
            f"this text; it was trained on {taught:,} of them."
        )
    elif found.searched:
        report(f"No document of the corpora behind version {number} holds this text.")
    for document in found.documents[:DOCUMENTS_SHOWN]:
        report(f"  {document}")
    if len(found.documents) > DOCUMENTS_SHOWN:
        report(f"  and {len(found.documents) - DOCUMENTS_SHOWN:,} more, which --json lists")
    for gone in found.missing:
        report(f"Not looked at: {gone}.")
    if found.missing:
        report(KEEP)


def tell_document(session: Session, identifier: str, as_json: bool, report: Report) -> None:
    """Say what a document was merged with and why, and which versions were trained on it."""
    record, store = session.record, session.record.store
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
    (exposure,) = exposures(all_runs(store, session.registry.state()), [kept])
    if as_json:
        report(json.dumps(asdict(story) | {"exposure": asdict(exposure)}, indent=2))
        return
    report(shown(str(story)))
    report(f"  {exposure}")
    for one in listed:
        if story.survivor == one.id or story.text_hash == one.text_hash:
            report(f"  {one}")


def _tell_forgotten(
    session: Session, entry: ForgottenDocument, as_json: bool, report: Report
) -> None:
    """Say of a document that is in no corpus any more what its pipeline has on record."""
    runs = all_runs(session.record.store, session.registry.state())
    lessons = lessons_of(runs, [entry.text_hash])[entry.text_hash] if entry.text_hash else []
    if as_json:
        told = {"forgotten": entry.model_dump(mode="json"), "lessons": [asdict(x) for x in lessons]}
        report(json.dumps(told, indent=2))
        return
    report(f"{entry}; it is in no corpus any more")
    for lesson in lessons:
        report(f"  before, it was trained on by {lesson}")


_KEPT = ("source", "split", "text_hash")
