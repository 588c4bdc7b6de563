"""`llm-assets versions` and `explain`: which versions there are, and what one was made from."""

import json
from dataclasses import asdict
from typing import Any

from artifacts.errors import shown
from artifacts.progress import Report, counted
from llm_assets.cli.session import Session
from llm_assets.endpoint.folder import why_unable
from llm_assets.registry.card import describe_cost, describe_coverage, tell_story


def list_versions(session: Session) -> list[str]:
    """Two lines a version, and one that says what is wanted and what serves."""
    state = session.registry.state()
    wanted, champion = state.find("wanted"), state.find("champion")
    if wanted is None:
        return ["Nothing is registered yet."]
    lines = []
    for version in state.versions:
        aliases = state.aliases_of(version.version)
        label = f"{version.version} ({', '.join(aliases)})" if aliases else str(version.version)
        story = tell_story(state, version)
        lines.append(f"{label}: {story[-1] if story else 'the base model'}")
        cost = "" if version.dollars is None else f"; {describe_cost(version)}"
        lines.append(f"    trained on {describe_coverage(version)}{cost}")
    # Whatever is wanted became so by a move.
    move = [move for move in state.history if move.alias == "wanted"][-1]
    lines.append(f"wanted: version {wanted.version}, by {move.by} ({move.reason})")
    served = f"version {champion.version}, the last that was served" if champion else "none"
    pending = "; to serve the wanted one, materialize `endpoint`" if champion != wanted else ""
    why = why_unable(session.settings, session.record, wanted)
    lines.append(f"champion: {served}{f'. {why}' if why else pending}")
    return lines


def versions_as_json(session: Session) -> list[dict[str, Any]]:
    """The versions with their aliases, and the verdicts and decisions on their models."""
    state = session.registry.state()
    return [
        version.model_dump(mode="json")
        | {
            "aliases": state.aliases_of(version.version),
            "verdicts": [v.model_dump(mode="json") for v in state.verdicts_of(version.weights)],
            "decisions": [d.model_dump(mode="json") for d in state.decisions_of(version.weights)],
        }
        for version in state.versions
    ]


DOCUMENTS_SHOWN = 20


def tell_version(
    session: Session, number: int, text: str | None, as_json: bool, report: Report
) -> None:
    """Say what stands behind a version, and what it was trained on of a piece of text."""
    # Only here, since they load numpy and pyarrow, for which `versions` would have to wait.
    from llm_assets.tracing import explain as provenance
    from llm_assets.tracing.training_text import KEEP

    store, state = session.record.store, session.registry.state()
    version = state.get(number)
    hits = provenance.find_passages(store, state, version, text) if text is not None else None
    if as_json:
        explanation: dict[str, Any] = provenance.explain_as_json(store, state, version)
        report(json.dumps(explanation | (asdict(hits) if hits else {"documents": []}), indent=2))
        return
    if hits is None:
        report(shown(provenance.explain(store, state, version)))
        return
    taught = sum(document.is_trained for document in hits.documents)
    if hits.documents:
        report(
            f"{counted(len(hits.documents), 'document')} with this text in the corpora behind "
            f"version {number}; the version was trained on {taught:,} of them."
        )
    elif hits.searched:
        report(f"No document in the corpora behind version {number} contains this text.")
    for document in hits.documents[:DOCUMENTS_SHOWN]:
        report(f"  {document}")
    if len(hits.documents) > DOCUMENTS_SHOWN:
        report(f"  and {len(hits.documents) - DOCUMENTS_SHOWN:,} more, which --json lists")
    for missing in hits.missing:
        report(f"Not searched: {missing}.")
    if hits.missing:
        report(KEEP)
