"""What a certificate states, against what a store holds."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from artifacts.progress import Report
from artifacts.storage import files
from artifacts.storage.checksums import sha256_of
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.forgetting.certificate import Forgetting, Replacement, readings, weights_of
from llm_assets.forgetting.erase import find_holders
from llm_assets.forgetting.listed import ForgottenList, read_list
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.lessons import all_runs
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingSpec, command

Finding = tuple[bool, str]


def examine(record: Pipeline, state: RegistryState, stated: Forgetting) -> Iterator[Finding]:
    """Whether each thing that was stated holds in a store, in words."""
    listed = {one.text_hash for one in read_list(record.store, record.name).documents}
    texts = {one.text_hash for one in stated.documents if one.text_hash}
    missing = len(texts - listed)
    yield not missing, f"{len(texts) - missing:,} of {len(texts):,} texts are in no later corpus"
    yield from _of_versions(record.store, state, stated, sorted(texts))
    for one in stated.replaced:
        yield _of_weights(record.store, one)
    if stated.erased:
        list_of = ForgottenList(documents=stated.documents)
        holders = find_holders(record, state, list_of)
        yield (
            not holders,
            "no snapshot, corpus or shard holds the texts"
            + (f", but for {', '.join(holders)}" if holders else ""),
        )


def _of_versions(
    store: Store, state: RegistryState, stated: Forgetting, texts: list[str]
) -> Iterator[Finding]:
    serving = state.find("champion") or state.find("wanted")
    read_by = {one.version for one in readings(store, state, texts)}
    unknown = [run.name for run in all_runs(store, state) if run.record is None]
    if serving:
        gone = f" (no record of {', '.join(unknown)})" if unknown else ""
        yield (
            serving.version not in read_by,
            f"version {serving.version}, which serves, was trained on none of them{gone}",
        )
    for one in stated.read_by:
        rejected = state.is_rejected(state.get(one.version).weights)
        there = store.exists("checkpoint", one.checkpoint)
        weights = "its weights are still there" if there else "its weights are gone"
        yield rejected, f"version {one.version}, which was, is withdrawn; {weights}"


def _of_weights(store: Store, one: Replacement) -> Finding:
    made = store.find_named("checkpoint", one.after)
    name = f"checkpoint {one.after}, made once more for {one.before},"
    if made is None:
        return False, f"{name} is no longer in {store.root}"
    if not store.is_local:
        return weights_of(made) == one.weights_after, f"{name} has the weights that are stated"
    there = {path: Path(made.url, path) for path in one.weights_after}
    found = {path: sha256_of(str(file)) for path, file in there.items() if file.exists()}
    return found == one.weights_after, f"{name} has the weights that are stated"


def train_again(store: Store, one: Replacement, report: Report) -> Finding:
    """Train a run from its beginning with the mask, and compare the weights.

    To the bit the same come out on one worker of a processor of the same kind, with the same
    versions of the libraries. Nothing of the store is changed.
    """
    name = f"checkpoint {one.after}"
    spec = TrainingSpec.model_validate_json(
        store.read_bytes(f"{layout.run(one.after)}/{SPEC_NAME}") or b"{}"
    )
    with tempfile.TemporaryDirectory() as folder:
        ours = spec.model_copy(
            update={"run_folder": f"{folder}/run", "export_folder": f"{folder}/model"}
        )
        stated = Path(folder, "run", SPEC_NAME)
        ours.write(stated)
        report(f"{name} is trained from its beginning, with {len(spec.masked):,} texts masked")
        ended = subprocess.run(command(stated, 1), capture_output=True, text=True)
        if ended.returncode:
            return False, f"{name} could not be trained: {ended.stderr.strip()[-500:]}"
        found = {
            f"{MODEL_FOLDER}/{path}": sha256_of(f"{folder}/model/{path}")
            for path in files.list_sizes(f"{folder}/model")
        }
    return found == one.weights_after, f"{name} comes out again, bit for bit"


def is_here(record: Pipeline, stated: Forgetting) -> bool:
    """Whether this store is one that the statement can be held against."""
    return record.name == stated.pipeline and bool(read_list(record.store, record.name).documents)
