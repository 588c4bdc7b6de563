"""Hands the splits of the corpora that were trained on to the next one."""

import hashlib
from pathlib import Path

from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store

EARLIER_INPUT = "earlier"
"""Name of the earlier clean corpus among a clean corpus's inputs."""


def find_earlier(record: Pipeline, wanted: Identity) -> str | None:
    """Fingerprint of the clean corpus whose splits the wanted one keeps: what was last trained on.

    None before anything was trained. A corpus that was made already keeps the one it had, even
    where it has been deleted since: fingerprints tell. Where the one it had is gone too, the
    newest that is there takes its place, since each corpus hands on all splits before it.

    Args:
        wanted: identity of the clean corpus about to be made, without an earlier one.
    """
    store = record.store
    known = record.known(wanted.kind)
    trained = _last_trained(record, wanted.kind)
    for earlier in (None, *known):
        identity = with_earlier(wanted, earlier)
        was_made = identity.fingerprint in (*known[:1], trained)
        if was_made and (
            earlier is None or store.find(identity) or store.exists(wanted.kind, earlier)
        ):
            return earlier
    return trained


def _last_trained(record: Pipeline, kind: str) -> str | None:
    """The corpus behind the current checkpoint; where it is gone, the newest that is there."""
    if record.recorded("checkpoint") is None:
        return None
    checkpoint = record.find_current("checkpoint")
    shards = (
        record.store.find_named("tokenized_shards", checkpoint.manifest.inputs["tokenized_shards"])
        if checkpoint
        else record.find_current("tokenized_shards")
    )
    trained = [shards.manifest.inputs[kind]] if shards else []
    there = (name for name in (*trained, *record.known(kind)) if record.store.exists(kind, name))
    return next(there, None)


def with_earlier(identity: Identity, earlier: str | None) -> Identity:
    """The identity with the earlier corpus among its inputs."""
    if earlier is None:
        return identity
    return identity.model_copy(update={"inputs": identity.inputs | {EARLIER_INPUT: earlier}})


def share_text(store: Store, path: Path) -> tuple[str, str]:
    """Put an evaluation text where jobs can read it: `(url, content hash)`."""
    return share(store, path.read_bytes(), "evaluation_texts", path.suffix)


def share(store: Store, content: bytes, folder: str, suffix: str) -> tuple[str, str]:
    """Put a file where jobs can read it, named by its content: `(url, content hash)`."""
    digest = hashlib.sha256(content).hexdigest()[:20]
    name = f"{folder}/{digest}{suffix}"
    if store.read_bytes(name) != content:
        store.write_bytes(name, content)
    return f"{store.root}/{name}", digest
