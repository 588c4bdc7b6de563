"""What is stated about texts that were forgotten, in in-toto's format.

Statements say what was done, and what a search of the corpora found afterwards. `verification`
compares both with a store, and searches again.

They are signed as DSSE envelopes with an ed25519 key. securesystemslib reads, writes and verifies
these, as it does for TUF and in-toto; any program that knows DSSE can check a certificate without
this project.
"""

import fnmatch
import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from pydantic import ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.settings import first_fault
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.erase import made_by
from llm_assets.forgetting.forgotten_list import (
    ForgottenDocument,
    Record,
    WithdrawnVersion,
    copy_signatures,
    find_copy,
    forgotten_folder,
    keep_copy,
    read_list,
)
from llm_assets.registry.start import START_INPUT
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.training_text import TEXT_KINDS, lessons_of, runs_behind
from recipes.spec import MODEL_FOLDER
from serving.state import own_key
from spark_jobs.clean.forgotten import (
    METHOD,
    SIMILAR_SCHEMA,
    SIMILARITY,
    find_similar,
    read_signatures,
)
from spark_jobs.clean.history import read_history
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import JobRun

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:llm-assets:forgetting:v1"
DIGEST = "llmAssetsTextHash"
"""Digest of a subject: the hash that identifies a document's cleaned text in corpora and shards."""
REPLACES = "replaces"
"""Key in the stats of a repeated checkpoint: the one that was trained without the mask."""


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
    """Hashes of the texts searched for; of all others, only exact copies are found."""
    corpora: list[str]
    """Fingerprints of the clean corpora; texts on their record were searched, too."""
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
    """The repeated runs behind a checkpoint, oldest first."""
    runs: list[Replacement] = []
    while current and REPLACES in current.stats:
        replaced = store.find_named("checkpoint", current.stats[REPLACES])
        runs.append(
            Replacement(
                before=current.stats[REPLACES],
                after=current.fingerprint,
                weights_before=weights_of(replaced) if replaced else {},
                weights_after=weights_of(current),
                masked=current.stats["masked"],
            )
        )
        # A repeated run starts from the repetition of the run before it, if that was affected, too.
        start = current.manifest.inputs.get(START_INPUT)
        current = store.find_named("checkpoint", start) if start else None
    return runs[::-1]


def weights_of(checkpoint: Artifact) -> dict[str, str]:
    """File of a checkpoint's model to its checksum, as its manifest has it."""
    return {
        entry.path: entry.sha256 or str(entry.crc32c)
        for entry in checkpoint.manifest.files
        if entry.path.startswith(f"{MODEL_FOLDER}/")
    }


def readings(store: Store, state: RegistryState, texts: Sequence[str]) -> list[Reading]:
    """The versions that were trained on one of the texts, and when."""
    results = []
    for version in state.versions:
        lessons = lessons_of(runs_behind(store, state, version), texts)
        steps: dict[str, set[int]] = {}
        for lesson in (one for of_text in lessons.values() for one in of_text):
            steps.setdefault(lesson.run.checkpoint, set()).update(lesson.steps)
        if steps:
            results.append(
                Reading(
                    version=version.version,
                    checkpoint=version.model_fingerprint,
                    steps={run: sorted(of_run) for run, of_run in steps.items()},
                )
            )
    return results


def find_doubtful(
    store: Store, state: RegistryState, known: Collection[int]
) -> dict[int, list[str]]:
    """Versions that may have been trained on a text: number to the runs without a record.

    Without those that are withdrawn or whose weights are gone, except the one that serves.

    Args:
        known: versions that were trained on it, which are left out, too.
    """
    # What serves answers people whatever the registry says of it, so it is asked about even if it
    # is rejected or its files are gone.
    serving = state.find("champion") or state.find("wanted")
    doubtful = {}
    for version in state.versions:
        is_there = store.exists("checkpoint", version.model_fingerprint)
        may_serve = is_there and not state.is_rejected(version.weights)
        if version.version in known or not (may_serve or version == serving):
            continue
        runs = runs_behind(store, state, version)
        if unrecorded := [run.name for run in runs if run.record is None]:
            doubtful[version.version] = unrecorded
    return doubtful


@contextmanager
def searching(
    store: Store, corpora: Sequence[Artifact], report: Report
) -> Iterator[tuple[JobRun, list[Part]]]:
    """A run of Spark on this machine, and the parts of corpora with the texts on record."""
    from spark_jobs.runtime.session import end_local_session, local_session

    parts = [
        part for corpus in corpora if (read := read_history(corpus.url)) for part in read.parts
    ]
    if store.is_local:
        # Checked here once: each of Spark's tasks would report the same fault.
        files.need_writable(Path(store.cache))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield JobRun(local_session(), report, scratch, store.cache), parts
    finally:
        end_local_session()


def search_again(
    record: Pipeline,
    state: RegistryState,
    documents: Sequence[ForgottenDocument],
    erased: bool,
    report: Report,
) -> tuple[Search, pa.Table]:
    """Look for documents of the list in the corpora that may no longer hold their text.

    Args:
        erased: whether none of the corpora may hold the text; otherwise only those made since.

    Returns:
        What was done, and rows of `forgotten.SIMILAR_SCHEMA`.
    """
    folder = forgotten_folder(record.store, record.name)
    cleaning = read_list(record.store, record.name).for_cleaning(folder)
    texts = {entry.text_hash for entry in documents}
    searched_texts = [text for text in cleaning.searched if text.text_hash in texts]
    since = min(document.at for document in documents)
    corpora = [
        corpus
        for kind in TEXT_KINDS
        for corpus in made_by(record, state, kind)
        if erased or corpus.manifest.created_at > since
    ]
    matches = SIMILAR_SCHEMA.empty_table()
    if searched_texts and corpora:
        signatures = read_signatures(cleaning.signatures)
        with searching(record.store, corpora, report) as (run, parts):
            matches = find_similar(run, parts, searched_texts, signatures)
    # The same document may be in several corpora.
    matches = matches.group_by(SIMILAR_SCHEMA.names).aggregate([]).sort_by("id")
    search = Search(
        texts=[text.text_hash for text in searched_texts],
        corpora=[corpus.fingerprint for corpus in corpora],
        found=dict(zip(matches["id"].to_pylist(), matches["similarity"].to_pylist(), strict=True)),
    )
    return search, matches


def issue(
    record: Pipeline,
    state: RegistryState,
    documents: Sequence[ForgottenDocument],
    search: Search,
    key: Path,
) -> str:
    """Sign a statement about documents of the list, whose texts are its subjects, with the key in a
    file; returns the certificate's place in the store."""
    texts = sorted({document.text_hash for document in documents if document.text_hash})
    read_by = readings(record.store, state, texts)
    replaced = replacements(record.store, record.find_current("checkpoint")) if read_by else []
    predicate = Forgetting(
        pipeline=record.name,
        at=datetime.now(UTC),
        documents=list(documents),
        read_by=read_by,
        # Runs that were repeated for another request were trained on these texts all the same.
        replaced=[replacement for replacement in replaced if set(texts) <= set(replacement.masked)],
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
    # By its content, so that no certificate ever takes the place of another.
    name = f"{hashlib.sha256(content).hexdigest()[:12]}.json"
    place = f"{layout.certificates(record.name)}/{name}"
    record.store.write_bytes(place, content)
    return place


def read_certificate(place: str, trusted: Path | None = None) -> tuple[Forgetting, str]:
    """What a certificate states, and the id of the key that signed it.

    Args:
        place: path or URL of the certificate.
        trusted: see `read_signed`.

    Raises:
        UserError: see `read_signed`; or it is about something else, or of another version of this
            program.
    """
    statement, signed_by = read_signed(place, trusted)
    if (kind := statement.get("predicateType")) != PREDICATE_TYPE:
        raise UserError(f"{place} contains a statement of type {kind}, not {PREDICATE_TYPE}.")
    try:
        return Forgetting.model_validate(statement.get("predicate")), signed_by
    except ValidationError as error:
        raise UserError(
            f"{place} states what this version of llm-assets does not know "
            f"({first_fault(error)}). Verify it with the version that issued it, or a newer one."
        ) from None


def restore_list(store: Store, pipeline: str) -> None:
    """Rewrite a list that cannot be read or is outdated from its second copy and the certificates.

    Entries that are in neither, because `llm-assets forget` was interrupted, are missing. If the
    copy is lost as well, documents that were wanted again since count as forgotten.

    Raises:
        UserError: a certificate cannot be read.
    """
    place, folder = layout.forgotten(pipeline), layout.certificates(pipeline)
    names = fnmatch.filter(store.list_folder(folder), "*.json")
    statements = [read_certificate(f"{store.root}/{folder}/{name}")[0] for name in names]
    certificates = sorted(statements, key=lambda statement: statement.at)
    copy = find_copy(store, pipeline)
    restored = copy.model_copy(deep=True)
    known_keys = {(document.id, document.text_hash) for document in restored.documents}
    certified = {
        (d.id, d.text_hash): d for certificate in certificates for d in certificate.documents
    }
    restored.documents += [document for key, document in certified.items() if key not in known_keys]
    checkpoints = {version.checkpoint for version in restored.withdrawn}
    restored.withdrawn += [
        WithdrawnVersion(version=reading.version, checkpoint=reading.checkpoint, at=statement.at)
        for statement in certificates
        for reading in statement.read_by
        if reading.checkpoint not in checkpoints
    ]
    if restored != copy:
        # One more than in the copy, so that this list counts as the newest.
        restored.changes += 1
    # The damaged list is copied, not moved: without a list, nothing would count as forgotten.
    store.write_bytes(layout.damaged(place), store.read_bytes(place) or b"")
    store.write_bytes(place, restored.model_dump_json(indent=2).encode())
    copy_signatures(store, restored, layout.forgotten_copies(pipeline), folder)
    keep_copy(store, pipeline)


PAYLOAD_TYPE = "application/vnd.in-toto+json"


def open_signer(path: Path) -> CryptoSigner:
    """The key in a file, which is created with the public key beside it if there is none.

    Raises:
        UserError: the file holds no ed25519 key.
    """
    private = own_key(path, lambda: CryptoSigner.generate_ed25519().private_bytes)
    try:
        signer = CryptoSigner(load_pem_private_key(private, None))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is no private key in PEM without a password: {error}. Give one with "
            "`forgetting.signing_key`, or move this file away: a new key is then created."
        ) from None
    # A key of your own may have another format beside it, or lie where nothing can be written.
    with suppress(OSError):
        if not (public := path.with_suffix(".pub")).exists():
            files.write(public, _public_key(signer))
    return signer


def sign(statement: dict[str, Any], signer: CryptoSigner) -> bytes:
    """The envelope as JSON; under `publicKey` the key that verifies it, in PEM."""
    # DSSE signs these bytes as they are, and the envelope carries them, so no canonical form of
    # JSON is needed.
    envelope = Envelope(json.dumps(statement, sort_keys=True).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    public = _public_key(signer).decode()
    return json.dumps(envelope.to_dict() | {"publicKey": public}, indent=2).encode()


def _public_key(signer: CryptoSigner) -> bytes:
    """In PEM, which other programs read; securesystemslib itself writes bare hexadecimal."""
    public = load_pem_private_key(signer.private_bytes, None).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_signed(path: Path | str, trusted: Path | None = None) -> tuple[dict[str, Any], str]:
    """The statement of an envelope, and the id of the key that signed it.

    Args:
        path: of the file, or its URL.
        trusted: a public key in PEM; without one, the envelope's own is used, which shows that
            nothing was changed, but not who signed.

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
    # Only now: nothing that is not signed is read as a statement.
    statement: dict[str, Any] = json.loads(envelope.payload)
    return statement, key.keyid
