"""What an artifact is and what is behind it, as the registry records it."""

from collections.abc import Mapping
from typing import Any

from artifacts.store.identity import hash_json
from artifacts.store.manifest import COST
from artifacts.store.store import Artifact

CHOSEN = "chosen"
"""Of a checkpoint's `stats`: its settings before a budget was worked out from the text."""


def lineage(artifact: Artifact) -> dict[str, str]:
    """Asset to fingerprint of an artifact and of all that it was made from, newest first.

    Inputs that are no artifacts of the store, such as source files, end the walk.
    """
    found = {artifact.manifest.kind: artifact.fingerprint}
    for name, fingerprint in artifact.manifest.inputs.items():
        if artifact.store.exists(name, fingerprint):
            found |= lineage(artifact.store.load(name, fingerprint))
    return found


def dollars_of(artifact: Artifact) -> float | None:
    """What the machines cost that made an artifact and all behind it.

    An artifact counts for each of those that were made from it. None where no cost is on record, as
    of one's own machines.
    """
    manifests = (artifact.store.load(*one).manifest for one in lineage(artifact).items())
    costs = [one.provenance[COST] for one in manifests if COST in one.provenance]
    return sum(costs) if costs else None


def procedure(candidate: Artifact, judged_by: Mapping[str, Any]) -> str:
    """Fingerprint of what people chose for making a candidate and for judging it.

    These are the settings of every stage. The text is not among them, since it arrives, nor the
    code, which nobody chooses by one pipeline's scores, nor a budget that follows from the text.

    Args:
        judged_by: settings of evaluation and gate.
    """
    chosen: dict[str, Any] = {"judged_by": judged_by}
    for kind, fingerprint in lineage(candidate).items():
        manifest = candidate.store.load(kind, fingerprint).manifest
        chosen[kind] = manifest.stats.get(CHOSEN, manifest.settings)
    return hash_json(chosen)


def weights_fingerprint(artifact: Artifact, folder: str = "") -> str:
    """A hash of the checksums of a model's files: two artifacts with one model have one hash.

    Args:
        folder: the model's folder in the artifact, with a slash at its end.
    """
    files = {
        entry.path.removeprefix(folder): entry.sha256 or entry.crc32c
        for entry in artifact.manifest.files
        if entry.path.startswith(folder)
    }
    return hash_json(files)[:20]
