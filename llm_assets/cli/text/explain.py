"""Where a version comes from."""

import json
from dataclasses import asdict
from typing import Any

from artifacts.errors import shown
from artifacts.progress import Report
from llm_assets.cli.session import Session
from llm_assets.tracing import explain as provenance
from llm_assets.tracing.passages import find_passages
from llm_assets.tracing.training_text import KEEP

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
