"""Looks whether everything in a store is what its records say, and mends what can be mended.

Mending removes nothing: what is damaged is moved to `damaged/`, and so no longer exists as an
artifact. Whoever needs it makes it again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from artifacts.errors import DamagedArtifact, UserError
from artifacts.store import layout
from artifacts.store.store import Artifact, Store
from artifacts.store.verify import find_faults
from llm_assets.registry.retired import retire


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    place: str
    """Path relative to the store's root."""
    fault: str
    remedy: str
    """What `repair` does; where that is None, what a person can do."""
    repair: Callable[[], None] | None = None
    is_fault: bool = True
    """False for what is only worth knowing: something was deleted, and is made when asked for."""


def check_artifacts(store: Store, names: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Manifests, sizes and checksums of artifacts, given by kind and fingerprint.

    A folder without a manifest is no artifact, and no fault.
    """
    for kind, fingerprint in names:
        place = f"{kind}/{fingerprint}"
        artifact = None
        try:
            artifact = store.find_named(kind, fingerprint)
            faults = list(_faults(artifact)) if artifact else []
        except DamagedArtifact as error:
            faults = [str(error).split(". ")[0]]
        if faults:
            more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            yield Finding(
                place,
                faults[0] + more,
                f"moved to {layout.damaged(place)}; it is made again when it is needed",
                partial(_repair, store, artifact, place),
            )


def _repair(store: Store, artifact: Artifact | None, place: str) -> None:
    """Set an artifact aside; its manifest, where it is sound, still explains versions."""
    if artifact:
        retire(store, artifact.manifest)
    store.set_aside(place)


def parse_name(text: str) -> tuple[str, str]:
    """`kind/fingerprint` in its two parts; raises UserError where it is something else."""
    kind, slash, fingerprint = text.strip("/").partition("/")
    if not (kind and slash and fingerprint) or "/" in fingerprint:
        raise UserError(
            f"`{text}` names no artifact. Give kind and fingerprint, such as "
            "checkpoint/0123456789abcdef0123, or nothing for the whole store."
        )
    return kind, fingerprint


def _faults(artifact: Artifact) -> Iterator[str]:
    manifest = artifact.manifest
    if manifest.identity.fingerprint != manifest.fingerprint:
        yield "its settings and inputs give another fingerprint"
    yield from find_faults(artifact.url, manifest.files)
