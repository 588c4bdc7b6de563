"""What is stated about texts that were forgotten: in-toto's format, signed in a DSSE envelope.

Statements say what was done, and what a search of the corpora found afterwards. Both are held
against a store by `examine`, which searches again.

securesystemslib reads, writes and verifies the envelopes by a plain ed25519 key, as it does for TUF
and in-toto; any program that knows DSSE can check a certificate without this project.
"""

import fnmatch
import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from artifacts.errors import UserError
from artifacts.program.entry import read_spec
from artifacts.program.lifetime import run_to_end
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.storage.files import sha256_of
from artifacts.storage.transfer import describe_folder
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.erase import (
    ForgottenDocument,
    ForgottenList,
    Record,
    WithdrawnVersion,
    copy_signatures,
    find_copy,
    find_holders,
    forgotten_folder,
    keep_copy,
    made_by,
    read_list,
)
from llm_assets.registry.start import START_INPUT
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.training_text import TEXT_KINDS, lessons_of, runs_behind
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingSpec, command
from spark_jobs.clean.forgotten import (
    METHOD,
    SIMILAR_SCHEMA,
    SIMILARITY,
    ForgottenText,
    Signatures,
    find_similar,
    read_signatures,
    tell_similar,
)
from spark_jobs.clean.history import read_history

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:llm-assets:forgetting:v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
DIGEST = "llmAssetsTextHash"
"""Of a subject: the hash that a document's cleaned text is known by in corpora and shards."""
REPLACES = "replaces"
"""In the stats of a checkpoint that was made once more: the one without the mask."""


class Reading(Record):
    """A version that was trained on one of the texts."""

    version: int
    checkpoint: str
    steps: dict[str, list[int]]
    """Checkpoint of each run behind it to the steps that were trained on a text."""


class Replacement(Record):
    """A run that was made once more."""

    before: str
    after: str
    """Fingerprints of the checkpoints."""
    weights_before: dict[str, str]
    weights_after: dict[str, str]
    """File of the model to its SHA-256, or to its CRC-32C in base64 where a job wrote it to Cloud
    Storage; empty where the manifest no longer lists files."""
    masked: list[str]
    """All texts that were masked in it."""


class Search(Record):
    """What was searched for near copies of texts, also inside other text, and what was found."""

    method: str = METHOD
    similarity: float = SIMILARITY
    """The least share that counts."""
    texts: list[str]
    """Those that were looked for, by their hash; of the others exact copies alone are found."""
    corpora: list[str]
    """Fingerprints of the clean corpora, which were searched with the texts on their record."""
    found: dict[str, float]
    """Ids of the documents in them that hold a text, to the similarity."""


class Forgetting(Record):
    """The predicate of the statement."""

    pipeline: str
    at: datetime
    documents: list[ForgottenDocument]
    read_by: list[Reading]
    replaced: list[Replacement]
    """Oldest first; the last one is the version that takes the place of what served."""
    erased: bool
    """Whether the texts were taken out of what was made before; False in certificates of earlier
    versions of this program alone."""
    search: Search | None = None
    """After all else was done; None in certificates of earlier versions of this program."""
    loss: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    """Both in certificates of earlier versions of this program: what was measured of the models."""
    verified_by: str = "llm-assets verify CERTIFICATE --retrain"


def replacements(store: Store, current: Artifact | None) -> list[Replacement]:
    """The runs behind a checkpoint that were made once more, oldest first."""
    found: list[Replacement] = []
    while current and REPLACES in current.stats:
        before = store.find_named("checkpoint", current.stats[REPLACES])
        found.append(
            Replacement(
                before=current.stats[REPLACES],
                after=current.fingerprint,
                weights_before=weights_of(before) if before else {},
                weights_after=weights_of(current),
                masked=current.stats["masked"],
            )
        )
        start = current.manifest.inputs.get(START_INPUT)
        current = store.find_named("checkpoint", start) if start else None
    return found[::-1]


def weights_of(checkpoint: Artifact) -> dict[str, str]:
    """File of a checkpoint's model to its checksum, as its manifest has it."""
    return {
        entry.path: entry.sha256 or str(entry.crc32c)
        for entry in checkpoint.manifest.files
        if entry.path.startswith(f"{MODEL_FOLDER}/")
    }


def readings(store: Store, state: RegistryState, texts: Sequence[str]) -> list[Reading]:
    """The versions that were trained on one of the texts, and when."""
    found = []
    for version in state.versions:
        lessons = lessons_of(runs_behind(store, state, version), texts)
        steps: dict[str, set[int]] = {}
        for lesson in (one for of_text in lessons.values() for one in of_text):
            steps.setdefault(lesson.run.checkpoint, set()).update(lesson.steps)
        if steps:
            found.append(
                Reading(
                    version=version.version,
                    checkpoint=version.model_fingerprint,
                    steps={run: sorted(of_run) for run, of_run in steps.items()},
                )
            )
    return found


def find_doubtful(
    store: Store, state: RegistryState, known: Collection[int]
) -> dict[int, list[str]]:
    """Versions that may have been trained on a text: the names of the runs behind each of which
    there is no record.

    Those that are withdrawn, or whose weights are gone, are left out; the one that serves is not.

    Args:
        known: versions that were trained on it, which are left out, too.
    """
    serving = state.find("champion") or state.find("wanted")
    doubtful = {}
    for version in state.versions:
        is_there = store.exists("checkpoint", version.model_fingerprint)
        may_serve = is_there and not state.is_rejected(version.weights)
        if version.version in known or not (may_serve or version == serving):
            continue
        runs = runs_behind(store, state, version)
        if unknown := [run.name for run in runs if run.record is None]:
            doubtful[version.version] = unknown
    return doubtful


def search_corpora(
    store: Store,
    corpora: Sequence[Artifact],
    texts: Sequence[ForgottenText],
    signatures: Signatures,
    report: Report,
) -> pa.Table:
    """The documents, and texts on record, that hold one: rows of `forgotten.SIMILAR_SCHEMA`."""
    from spark_jobs.runtime.session import end_local_session, local_session

    parts = [part for one in corpora if (read := read_history(one.url)) for part in read.parts]
    if not texts or not parts:
        return SIMILAR_SCHEMA.empty_table()
    if store.is_local:
        # Spark's tasks would say it many times over.
        files.need_writable(Path(store.cache))
    spark = local_session()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = find_similar(spark, parts, texts, signatures, scratch, store.cache, report)
    finally:
        end_local_session()
    # What lies in several corpora is one document.
    return found.group_by(SIMILAR_SCHEMA.names).aggregate([]).sort_by("id")


def search_again(
    record: Pipeline,
    state: RegistryState,
    documents: Sequence[ForgottenDocument],
    erased: bool,
    report: Report,
) -> tuple[Search, pa.Table]:
    """Look for documents of the list in the corpora that may no longer hold their text.

    Args:
        erased: whether that is all of them; otherwise those that were made since.

    Returns:
        What was done, and rows of `forgotten.SIMILAR_SCHEMA`.
    """
    folder = forgotten_folder(record.store, record.name)
    cleaning = read_list(record.store, record.name).for_cleaning(folder)
    texts = {one.text_hash for one in documents}
    searched = [text for text in cleaning.searched if text.text_hash in texts]
    since = min(document.at for document in documents)
    corpora = [
        corpus
        for kind in TEXT_KINDS
        for corpus in made_by(record, state, kind)
        if erased or corpus.manifest.created_at > since
    ]
    signatures = read_signatures(cleaning.signatures) if searched else {}
    found = search_corpora(record.store, corpora, searched, signatures, report)
    search = Search(
        texts=[text.text_hash for text in searched],
        corpora=[corpus.fingerprint for corpus in corpora],
        found=dict(zip(found["id"].to_pylist(), found["similarity"].to_pylist(), strict=True)),
    )
    return search, found


def issue(
    record: Pipeline,
    state: RegistryState,
    documents: Sequence[ForgottenDocument],
    search: Search,
    key: Path,
) -> str:
    """Sign the statement on some documents of the list, whose texts are its subjects, with the key
    of a file; gives the certificate's place in the store."""
    texts = sorted({one.text_hash for one in documents if one.text_hash})
    read_by = readings(record.store, state, texts)
    replaced = replacements(record.store, record.find_current("checkpoint")) if read_by else []
    predicate = Forgetting(
        pipeline=record.name,
        at=datetime.now(UTC),
        documents=list(documents),
        read_by=read_by,
        replaced=[one for one in replaced if set(texts) <= set(one.masked)],
        erased=True,
        search=search,
    )
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "document", "digest": {DIGEST: text}} for text in texts],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate.model_dump(mode="json"),
    }
    content = sign(statement, open_signer(key))
    name = f"{hashlib.sha256(content).hexdigest()[:12]}.json"
    place = f"{layout.certificates(record.name)}/{name}"
    record.store.write_bytes(place, content)
    return place


def read_statement(statement: Mapping[str, Any], where: object) -> Forgetting:
    """What a statement says; raises UserError where it is about something else."""
    if (kind := statement.get("predicateType")) != PREDICATE_TYPE:
        raise UserError(f"{where} contains a statement of type {kind}, not {PREDICATE_TYPE}.")
    return Forgetting.model_validate(statement["predicate"])


def read_certificates(store: Store, pipeline: str) -> list[Forgetting]:
    """What all certificates in a store state, oldest first; raises UserError where one cannot be
    read."""
    folder = layout.certificates(pipeline)
    names = fnmatch.filter(store.list_folder(folder), "*.json")
    paths = [f"{store.root}/{folder}/{name}" for name in names]
    stated = [read_statement(read_signed(path)[0], path) for path in paths]
    return sorted(stated, key=lambda one: one.at)


def restore_list(store: Store, pipeline: str) -> None:
    """Write a list that cannot be read, or is an older one, again: from its second copy, and from
    the certificates beside it.

    What is in neither, since `llm-assets forget` was interrupted, is not on it; where the copy is
    lost as well, what was wanted again since is forgotten.
    """
    place, certificates = layout.forgotten(pipeline), read_certificates(store, pipeline)
    copy = find_copy(store, pipeline)
    listed = copy.model_copy(deep=True)
    known = {(one.id, one.text_hash) for one in listed.documents}
    certified = {(d.id, d.text_hash): d for one in certificates for d in one.documents}
    listed.documents += [one for key, one in certified.items() if key not in known]
    gone = {one.checkpoint for one in listed.withdrawn}
    listed.withdrawn += [
        WithdrawnVersion(version=one.version, checkpoint=one.checkpoint, at=stated.at)
        for stated in certificates
        for one in stated.read_by
        if one.checkpoint not in gone
    ]
    if listed != copy:
        listed.changes += 1
    # At no moment is there no list, which would say that nothing was forgotten.
    store.write_bytes(layout.damaged(place), store.read_bytes(place) or b"")
    store.write_bytes(place, listed.model_dump_json(indent=2).encode())
    kept, copies = layout.certificates(pipeline), layout.forgotten_copies(pipeline)
    copy_signatures(store, listed, copies, kept)
    keep_copy(store, pipeline)


def open_signer(path: Path) -> CryptoSigner:
    """The key of a file, which is made where there is none; beside it lies the public one.

    Raises:
        UserError: the file holds no ed25519 key.
    """
    if path.exists():
        try:
            return CryptoSigner(load_pem_private_key(path.read_bytes(), None))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} is no private key in PEM without a password: {error}. Give one with "
                "`forgetting.signing_key`, or move this file away: a new key is then created."
            ) from None
    signer = CryptoSigner.generate_ed25519()
    path.parent.mkdir(parents=True, exist_ok=True)
    # For its owner's eyes alone before there is anything in it.
    path.touch(0o600, exist_ok=False)
    path.write_bytes(signer.private_bytes)
    path.with_suffix(".pub").write_bytes(_public_key(signer))
    return signer


def sign(statement: dict[str, Any], signer: CryptoSigner) -> bytes:
    """The envelope as JSON; under `publicKey` the key that verifies it, in PEM."""
    envelope = Envelope(json.dumps(statement, sort_keys=True).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    public = _public_key(signer).decode()
    return json.dumps(envelope.to_dict() | {"publicKey": public}, indent=2).encode()


def _public_key(signer: CryptoSigner) -> bytes:
    """In PEM, as other programs read it; securesystemslib itself writes bare hexadecimal."""
    public = load_pem_private_key(signer.private_bytes, None).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_signed(path: Path | str, trusted: Path | None = None) -> tuple[dict[str, Any], str]:
    """The statement of an envelope, and the id of the key that signed it.

    Args:
        path: of the file, or its URL.
        trusted: a public key in PEM; without one, the envelope's own is taken, which shows that
            nothing was changed, and not who signed.

    Raises:
        UserError: it cannot be read, was changed, or another key signed it.
    """
    try:
        content = json.loads(files.read(path))
        pem = trusted.read_bytes() if trusted else str(content["publicKey"]).encode()
        envelope = Envelope.from_dict(content)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, SigningError) as error:
        raise UserError(f"{path} is no certificate, or was changed: {error}.") from None
    try:
        key = SSlibKey.from_crypto(load_pem_public_key(pem))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{trusted or path} has no public key in PEM: {error}.") from None
    try:
        envelope.verify([key], threshold=1)
    except VerificationError:
        signed_by = ", ".join(envelope.signatures) or "nobody"
        raise UserError(
            f"{path} was changed after it was signed, or is not signed with the key {key.keyid} "
            f"(by {signed_by}). Do not rely on it: ask its issuer for it again."
        ) from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UserError(f"{path} is a signed {envelope.payload_type}, not a {PAYLOAD_TYPE}.")
    statement: dict[str, Any] = json.loads(envelope.payload)
    return statement, key.keyid


# What a certificate states, held against a store: each thing that holds, does not, or is not known.
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
            texts_sought, corpora = len(search.texts), len(search.corpora)
            where = f"{texts_sought:,} texts were looked for in {corpora:,} corpora"
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
    name, place = f"checkpoint {one.after}", f"{layout.run(one.after)}/{SPEC_NAME}"
    if not store.has_file(place):
        return None, f"{name} cannot be trained again: {place} is no longer in {store.root}"
    spec = read_spec(f"{store.root}/{place}", TrainingSpec)
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
