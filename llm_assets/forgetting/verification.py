"""Compares what a certificate states with a store: each thing holds, does not, or is unknown."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from artifacts.program.entry import read_spec
from artifacts.program.lifetime import run_to_end
from artifacts.progress import Report
from artifacts.storage.files import sha256_of
from artifacts.storage.transfer import describe_folder
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.forgetting.certificate import (
    Forgetting,
    Replacement,
    find_doubtful,
    readings,
    search_again,
    weights_of,
)
from llm_assets.forgetting.erase import find_holders
from llm_assets.forgetting.forgotten_list import ForgottenList, read_list
from llm_assets.registry.state import RegistryState
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingSpec, command
from spark_jobs.clean.forgotten import tell_similar

Finding = tuple[bool | None, str]
"""Whether something holds, None where nobody can know; and what, in words."""


def examine(
    record: Pipeline, state: RegistryState, stated: Forgetting, report: Report
) -> Iterator[Finding]:
    """Whether each thing that was stated holds in a store, in words.

    Raises:
        DamagedArtifact: the list, or a file of signatures, cannot be read.
    """
    forgotten = read_list(record.store, record.name)
    active = {entry.id for entry in forgotten.active}
    undone = {entry.id: entry.undone for entry in forgotten.documents if entry.id not in active}
    documents = [entry for entry in stated.documents if entry.id not in undone]
    texts = {entry.text_hash for entry in documents if entry.text_hash}
    for entry in stated.documents:
        if entry.text_hash and (undo := undone.get(entry.id)):
            yield None, f"{entry.id} is wanted again since {undo}: later corpora may contain it"
    remaining = texts & set(forgotten.texts)
    text = f"{len(remaining):,} of {len(texts):,} texts are kept out of every later corpus"
    yield remaining == texts, text
    found_texts: set[str] = set()
    if documents:
        search, matches = search_again(record, state, documents, stated.erased, report)
        found_texts = set(matches["text_hash"].to_pylist())
        kept_by_person = {entry.text_hash for entry in forgotten.active if entry.similar == "keep"}
        # Documents that hold a text of another are found by that text.
        own_texts = {
            entry.text_hash for entry in documents if entry.text_hash and entry.similarity is None
        }
        remaining = own_texts - set(search.texts)
        for texts_left, reason in (
            (remaining & kept_by_person, "a person chose --similar keep"),
            (remaining - kept_by_person, "no signature of them is kept"),
        ):
            if texts_left:
                yield None, f"only exact copies of {len(texts_left):,} text(s) are found: {reason}"
        if found_texts:
            yield False, f"documents in corpora contain their text: {tell_similar(matches)}"
        elif search.texts:
            texts_sought, corpora = len(search.texts), len(search.corpora)
            scope = f"{texts_sought:,} texts were looked for in {corpora:,} corpora"
            yield True, f"{scope}: no document holds {search.similarity:.0%} of one"
    # A document that holds one of the texts has a hash of its own, by which runs have recorded it.
    yield from _of_versions(record.store, state, stated, sorted(texts | found_texts))
    for replacement in stated.replaced:
        yield _of_weights(record.store, replacement)
    if stated.erased:
        holders = find_holders(record, state, ForgottenList(documents=documents))
        names = ", ".join(
            f"{artifact.manifest.kind}/{artifact.fingerprint}" for artifact in holders
        )
        but = f", but for {names}" if holders else ""
        yield not holders, f"no snapshot, corpus, shard, exam or evaluation holds them{but}"


def _of_versions(
    store: Store, state: RegistryState, stated: Forgetting, texts: list[str]
) -> Iterator[Finding]:
    readers = {reading.version for reading in readings(store, state, texts)}
    doubtful = find_doubtful(store, state, readers)
    if serving := state.find("champion") or state.find("wanted"):
        name = f"version {serving.version}, which serves,"
        if serving.version in readers:
            yield False, f"{name} was trained on some of them"
        elif serving.version not in doubtful:
            yield True, f"{name} was trained on none of them"
    for version, unrecorded in doubtful.items():
        reason = f"there is no record of {', '.join(unrecorded)}"
        yield None, f"version {version} may have been trained on some of them: {reason}"
    by_model = {version.model_fingerprint: version for version in state.versions}
    for reading in stated.read_by:
        # A registry begun again, or another store's, gives the same numbers to other models.
        if (entry := by_model.get(reading.checkpoint)) is None:
            yield None, f"checkpoint {reading.checkpoint}, trained on them, is no version here"
            continue
        rejected = state.is_rejected(entry.weights)
        is_stored = store.exists("checkpoint", reading.checkpoint)
        weights = "its weights are still there" if is_stored else "its weights are gone"
        is_now = "is withdrawn" if rejected else "is not withdrawn"
        yield rejected, f"version {entry.version}, which was trained on them, {is_now}; {weights}"


def _of_weights(store: Store, replacement: Replacement) -> Finding:
    checkpoint = store.find_named("checkpoint", replacement.after)
    name = f"checkpoint {replacement.after}, which replaces {replacement.before},"
    if checkpoint is None:
        return False, f"{name} is no longer in {store.root}"
    weights = weights_of(checkpoint)
    if store.is_local:
        # Of the files themselves: a manifest could be written again beside other weights.
        weight_files = {path: Path(checkpoint.url, path) for path in replacement.weights_after}
        weights = {
            path: sha256_of(str(file)) for path, file in weight_files.items() if file.exists()
        }
    holds = weights == replacement.weights_after
    has = "has the weights" if holds else "has other weights than those"
    return holds, f"{name} {has} that the certificate states"


def train_again(store: Store, one: Replacement, report: Report) -> Finding:
    """Train a run from its beginning with the mask, and compare the weights.

    With one worker on the same kind of processor, and the same versions of the libraries, the
    weights agree bit for bit, as long as nothing else that the run read was forgotten. The store
    is not changed.
    """
    name, place = f"checkpoint {one.after}", f"{layout.run(one.after)}/{SPEC_NAME}"
    if not store.has_file(place):
        return None, f"{name} cannot be trained again: {place} is no longer in {store.root}"
    spec = read_spec(f"{store.root}/{place}", TrainingSpec)
    with tempfile.TemporaryDirectory() as folder:
        own_spec = spec.model_copy(
            update={"run_folder": f"{folder}/run", "export_folder": f"{folder}/{MODEL_FOLDER}"}
        )
        # In a folder of its own, so that nothing which the first run saved is continued from.
        spec_path = Path(folder, "run", SPEC_NAME)
        own_spec.write(spec_path)
        report(f"{name} is trained from its beginning, with {len(spec.masked):,} texts masked")
        result = run_to_end(command(spec_path, 1))
        if result.returncode:
            return False, f"{name} could not be trained: {result.stderr.strip()[-500:]}"
        weights = {
            f"{MODEL_FOLDER}/{file.path}": (file.sha256, file.crc32c)
            for file in describe_folder(Path(own_spec.export_folder))
        }
    # Not with the store's own files: those may have been replaced after the certificate was signed.
    expected = one.weights_after
    # A certificate has one of the two checksums per file: jobs in the cloud write CRC-32C.
    if weights.keys() != expected.keys() or any(
        expected[path] not in weights[path] for path in weights
    ):
        shards = store.find_named("tokenized_shards", spec.inputs["tokenized_shards"])
        erased = set(shards.stats.get("erased", ())) - set(spec.hidden) if shards else set()
        if erased:
            # The run may have been trained on these, or chosen its best weights by them.
            return None, (
                f"{name} does not come out again: its shards have lost {len(erased):,} text(s) "
                "that were forgotten since"
            )
        return False, (
            f"{name} does not come out again bit for bit, which is certain only on one worker, a "
            "processor of the same kind, and with the same versions of the libraries"
        )
    return True, f"{name} comes out again, bit for bit"


def is_here(record: Pipeline, stated: Forgetting) -> bool:
    """Whether the statement is about this store's pipeline."""
    return record.name == stated.pipeline and bool(read_list(record.store, record.name).documents)
