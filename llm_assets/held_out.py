"""Keeps the held-out set that has judged once, and keeps evaluation text out of training."""

import hashlib
from pathlib import Path

from artifacts.identity import Identity
from artifacts.pipelines import Pipeline
from artifacts.store import Artifact, Store

PIN_INPUT = "held_out_pin"
"""Name of the pinning shards among a clean corpus's inputs."""


def find_pin(record: Pipeline, wanted: Identity) -> Artifact | None:
    """The shards whose held-out documents the wanted clean corpus has to keep held out.

    They are those that `eval_metrics` has judged by, from the first change of the corpus on; later
    corpora keep the same pin. None before anything was judged, for the very corpus whose held-out
    set judged, and where another `split_seed` asks for a new held-out set.

    Args:
        wanted: identity of the clean corpus about to be made, without a pin.
    """
    current = record.find_current(wanted.kind)
    if current is None or current.manifest.settings.get("split_seed") != wanted.settings.get(
        "split_seed"
    ):
        return None
    if pinned := current.manifest.inputs.get(PIN_INPUT):
        return record.store.load("tokenized_shards", pinned)
    if current.manifest.identity == wanted:
        return None
    judged = record.find_current("eval_metrics")
    if judged is None:
        return None
    return record.store.load("tokenized_shards", judged.manifest.inputs["tokenized_shards"])


def with_pin(identity: Identity, pin: Artifact | None) -> Identity:
    """The identity with the pin among its inputs."""
    if pin is None:
        return identity
    inputs = identity.inputs | {PIN_INPUT: pin.fingerprint}
    return identity.model_copy(update={"inputs": inputs})


def share_text(store: Store, path: Path) -> tuple[str, str]:
    """Put an evaluation text where jobs can read it: `(url, content hash)`."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:20]
    name = f"evaluation_texts/{digest}{path.suffix}"
    if store.read_bytes(name) is None:
        store.write_bytes(name, content)
    return f"{store.root}/{name}", digest
