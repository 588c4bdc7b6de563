"""What an artifact is and what is behind it, as the registry records it."""

from artifacts.store.identity import hash_json
from artifacts.store.store import Artifact


def lineage(artifact: Artifact) -> dict[str, str]:
    """Asset to fingerprint of an artifact and of all that it was made from, newest first.

    Inputs that are no artifacts of the store, such as source files, end the walk.
    """
    found = {artifact.manifest.kind: artifact.fingerprint}
    for name, fingerprint in artifact.manifest.inputs.items():
        if artifact.store.exists(name, fingerprint):
            found |= lineage(artifact.store.load(name, fingerprint))
    return found


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
