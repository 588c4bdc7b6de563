"""Everything behind an artifact."""

from artifacts.store import Artifact


def lineage(artifact: Artifact) -> dict[str, str]:
    """Asset to fingerprint of an artifact and of all that it was made from, newest first.

    Inputs that are no artifacts of the store, such as source files, end the walk.
    """
    found = {artifact.manifest.kind: artifact.fingerprint}
    for name, fingerprint in artifact.manifest.inputs.items():
        if artifact.store.exists(name, fingerprint):
            found |= lineage(artifact.store.load(name, fingerprint))
    return found
