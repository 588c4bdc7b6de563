"""What a certificate states, against what a store holds."""

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
from llm_assets.forgetting.erase import ForgottenList, find_holders, read_list
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
    listed = read_list(record.store, record.name)
    active = {one.id for one in listed.active}
    undone = {one.id: one.undone for one in listed.documents if one.id not in active}
    documents = [one for one in stated.documents if one.id not in undone]
    texts = {one.text_hash for one in documents if one.text_hash}
    for one in stated.documents:
        if one.text_hash and (wanted := undone.get(one.id)):
            yield None, f"{one.id} is wanted again since {wanted}: later corpora may contain it"
    left = texts & set(listed.texts)
    every = f"{len(left):,} of {len(texts):,} texts are kept out of every later corpus"
    yield left == texts, every
    held: set[str] = set()
    if documents:
        search, similar = search_again(record, state, documents, stated.erased, report)
        held = set(similar["text_hash"].to_pylist())
        decided = {one.text_hash for one in listed.active if one.similar == "keep"}
        # What holds a text is found by that text.
        own = {one.text_hash for one in documents if one.text_hash and one.similarity is None}
        left = own - set(search.texts)
        for texts_left, why in (
            (left & decided, "a person chose --similar keep"),
            (left - decided, "no signature of them is kept"),
        ):
            if texts_left:
                yield None, f"only exact copies of {len(texts_left):,} text(s) are found: {why}"
        if held:
            yield False, f"documents in corpora contain their text: {tell_similar(similar)}"
        elif search.texts:
            where = (
                f"{len(search.texts):,} texts were looked for in {len(search.corpora):,} corpora"
            )
            yield True, f"{where}: no document holds {search.similarity:.0%} of one"
    yield from _of_versions(record.store, state, stated, sorted(texts | held))
    for replacement in stated.replaced:
        yield _of_weights(record.store, replacement)
    if stated.erased:
        holders = find_holders(record, state, ForgottenList(documents=documents))
        named = ", ".join(f"{one.manifest.kind}/{one.fingerprint}" for one in holders)
        but = f", but for {named}" if holders else ""
        yield not holders, f"no snapshot, corpus, shard, exam or evaluation holds them{but}"


def _of_versions(
    store: Store, state: RegistryState, stated: Forgetting, texts: list[str]
) -> Iterator[Finding]:
    known = {one.version for one in readings(store, state, texts)}
    doubtful = find_doubtful(store, state, known)
    if serving := state.find("champion") or state.find("wanted"):
        name = f"version {serving.version}, which serves,"
        if serving.version in known:
            yield False, f"{name} was trained on some of them"
        elif serving.version not in doubtful:
            yield True, f"{name} was trained on none of them"
    for version, unknown in doubtful.items():
        gone = f"there is no record of {', '.join(unknown)}"
        yield None, f"version {version} may have been trained on some of them: {gone}"
    for one in stated.read_by:
        rejected = state.is_rejected(state.get(one.version).weights)
        there = store.exists("checkpoint", one.checkpoint)
        weights = "its weights are still there" if there else "its weights are gone"
        is_now = "is withdrawn" if rejected else "is not withdrawn"
        yield rejected, f"version {one.version}, which was trained on them, {is_now}; {weights}"


def _of_weights(store: Store, one: Replacement) -> Finding:
    made = store.find_named("checkpoint", one.after)
    name = f"checkpoint {one.after}, which replaces {one.before},"
    if made is None:
        return False, f"{name} is no longer in {store.root}"
    found = weights_of(made)
    if store.is_local:
        there = {path: Path(made.url, path) for path in one.weights_after}
        found = {path: sha256_of(str(file)) for path, file in there.items() if file.exists()}
    holds = found == one.weights_after
    has = "has the weights" if holds else "has other weights than those"
    return holds, f"{name} {has} that the certificate states"


def train_again(store: Store, one: Replacement, report: Report) -> Finding:
    """Train a run from its beginning with the mask, and compare the weights.

    To the bit the same come out on one worker of a processor of the same kind, with the same
    versions of the libraries, as long as nothing else that the run read was forgotten. Nothing of
    the store is changed.
    """
    name = f"checkpoint {one.after}"
    spec = read_spec(f"{store.root}/{layout.run(one.after)}/{SPEC_NAME}", TrainingSpec)
    with tempfile.TemporaryDirectory() as folder:
        ours = spec.model_copy(
            update={"run_folder": f"{folder}/run", "export_folder": f"{folder}/{MODEL_FOLDER}"}
        )
        stated = Path(folder, "run", SPEC_NAME)
        ours.write(stated)
        report(f"{name} is trained from its beginning, with {len(spec.masked):,} texts masked")
        ended = run_to_end(command(stated, 1))
        if ended.returncode:
            return False, f"{name} could not be trained: {ended.stderr.strip()[-500:]}"
        made = {
            f"{MODEL_FOLDER}/{file.path}": (file.sha256, file.crc32c)
            for file in describe_folder(Path(ours.export_folder))
        }
    wanted = one.weights_after
    # A certificate has the one or the other of each file.
    if made.keys() != wanted.keys() or any(wanted[path] not in made[path] for path in made):
        shards = store.find_named("tokenized_shards", spec.inputs["tokenized_shards"])
        erased = set(shards.stats.get("erased", ())) - set(spec.hidden) if shards else set()
        if erased:
            # What the run read, or chose its best weights by, may have been among them.
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
    """Whether this store is one that the statement can be held against."""
    return record.name == stated.pipeline and bool(read_list(record.store, record.name).documents)
