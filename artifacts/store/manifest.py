"""The manifest: the file that makes an artifact exist, and the record of what was asked for.

`editions/<kind>/<asked>.json` says what came of one thing that was asked for. A pipeline asks for a
kind, a code version, settings and inputs; which libraries are installed may decide what comes of
it, so what they make has a fingerprint of its own. This record remembers the content of each. So
what is made again with other content gets another fingerprint, and nothing that was made from the
first seems to be made from the second. And where other libraries were found to make the same, the
artifact stays, with all that was made from it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import (
    DamagedArtifact,
    MissingArtifact,
    UserError,
    make_command,
    mend_command,
)
from artifacts.settings import first_fault
from artifacts.storage import files
from artifacts.storage.files import FileEntry, sha256_of
from artifacts.store.identity import Identity, hash_json
from artifacts.store.layout import MANIFEST_NAME

SCHEMA_VERSION = 1
CHECKSUM = "checksum"
COST = "cost_dollars"
"""In the provenance of what was made on rented machines: what they cost."""

REWRITTEN = "rewritten"
"""In the provenance: when files were written again, and why (`artifacts.store.rewrite`)."""
Record = TypeVar("Record", bound=BaseModel)


class Manifest(BaseModel):
    """Written last, so that nothing half-written is ever read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    code_version: str
    inputs: dict[str, str]
    settings: dict[str, Any]
    libraries: dict[str, str] = Field(default_factory=dict)
    remade: str = ""
    """A hash of the content, where the same libraries had made other content before; empty
    otherwise."""
    files: list[FileEntry]
    stats: dict[str, Any]
    provenance: dict[str, Any] = Field(default_factory=dict)
    """How and where it was made (versions, host, run id); never part of the fingerprint."""
    location: None = None
    """Of no use any more; manifests of earlier versions have it, as null."""

    @property
    def identity(self) -> Identity:
        """The identity whose fingerprint this manifest carries."""
        return Identity(**{name: getattr(self, name) for name in Identity.model_fields})


def dump_with_checksum(record: BaseModel) -> bytes:
    """The fields of a record as JSON, and under `checksum` a hash of them all."""
    # By way of JSON: a reader hashes the values that it parses, where times are text.
    fields = json.loads(record.model_dump_json())
    return json.dumps(fields | {CHECKSUM: hash_json(fields)}, indent=2).encode()


class OtherVersion(ValueError):
    """A record is as it was written, by a version of this program that has other fields."""

    def as_user_error(self, place: str) -> UserError:
        """What to do, which is not to make anything again."""
        return UserError(
            f"{place} was written by another version of llm-assets ({self}). Nothing of it is "
            "damaged: use the version that wrote it, or a newer one."
        )


def load_with_checksum(content: bytes, record: type[Record], needed: bool = True) -> Record:
    """What `dump_with_checksum` wrote; raises ValueError, in words, where it is anything else, as
    `OtherVersion` where only the fields are others. Unless it is `needed`, a record may have no
    checksum, as those of early releases."""
    try:
        fields = json.loads(content)
        # Taken out first: the hash is that of all other fields. It is compared before these are
        # read: only in a record that is as it was written do other fields mean another version.
        if (checksum := fields.pop(CHECKSUM, None)) is None and needed:
            raise ValueError("it has no checksum: an early release or an editor wrote it")
        if checksum not in (None, hash_json(fields)):
            raise ValueError("it was changed after it was written")
        return record.model_validate(fields)
    except ValidationError as error:
        raise OtherVersion(first_fault(error)) from None
    # JSON that is no object, or is nested without end, is no record either.
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(first_fault(error)) from None


def parse_manifest(content: bytes, folder: str) -> Manifest:
    """Read the content of `<folder>/manifest.json`, where folder ends in `<kind>/<fingerprint>`.

    Raises:
        DamagedArtifact: it is not what was written, or is another artifact's.
        UserError: another version of this program wrote it.
    """
    kind, fingerprint = folder.rstrip("/").split("/")[-2:]
    try:
        manifest = load_with_checksum(content, Manifest)
        # A manifest that was copied from another artifact has a right checksum as well.
        if (manifest.kind, manifest.fingerprint) != (kind, fingerprint):
            raise ValueError(f"it is the manifest of {manifest.kind}/{manifest.fingerprint}")
    except OtherVersion as other:
        raise other.as_user_error(f"{folder}/{MANIFEST_NAME}") from None
    except ValueError as fault:
        raise DamagedArtifact(
            f"{folder}/{MANIFEST_NAME} cannot be read ({fault}). Set the artifact aside and make "
            f"it again with: {mend_command(folder)}"
        ) from None
    return manifest


READ_AT_ONCE = 4
"""Files whose checksums are taken at the same time."""


def find_faults(url: str, entries: Sequence[FileEntry], checksums: bool = True) -> Iterator[str]:
    """What is wrong with the files of a folder: `<path> is absent`, one line a file.

    Sizes are compared first, since they cost one listing. A checksum is the one that storage keeps
    where the entry has it; otherwise the file is read, once a process as long as it is unchanged.
    """
    present = files.describe(url)
    whole: list[FileEntry] = []
    for entry in entries:
        details = present.get(entry.path)
        if details is None:
            yield f"{entry.path} is absent"
        elif details["size"] != entry.bytes:
            yield f"{entry.path} has {details['size']} bytes, not {entry.bytes}"
        else:
            whole.append(entry)

    def is_same(entry: FileEntry) -> bool:
        if entry.crc32c is not None:
            return bool(present[entry.path]["crc32c"] == entry.crc32c)
        return sha256_of(f"{url}/{entry.path}") == entry.sha256

    if checksums:
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            for entry, same in zip(whole, pool.map(is_same, whole), strict=True):
                if not same:
                    yield f"{entry.path} has another checksum than its manifest"


def verify_manifest(
    manifest: Manifest,
    url: str,
    below: str = "",
    checksums: bool = True,
    way_out: str | None = None,
) -> None:
    """Compare an artifact's files, or those below a folder in it, with its manifest; raises
    DamagedArtifact, which names the file and the way out or the command that makes it again."""
    entries = [entry for entry in manifest.files if entry.path.startswith(below)]
    for fault in find_faults(url, entries, checksums):
        command = mend_command(f"{manifest.kind}/{manifest.fingerprint}")
        advice = f"Set it aside and make it again with: {command}"
        raise DamagedArtifact(f"{url}/{fault}. {way_out or advice}")


def verify_folder(url: str, way_out: str | None = None) -> None:
    """Compare a model folder, an artifact's or one directly inside it, with the manifest; raises
    MissingArtifact where there is none, and else as `verify_manifest`.

    The way out is what to do about damage where making the artifact again is not the answer.
    """
    url = url.rstrip("/")
    above, _, name = url.rpartition("/")
    for folder, below in ((url, ""), (above, f"{name}/")):
        content = files.find(f"{folder}/{MANIFEST_NAME}")
        if content is not None:
            manifest = parse_manifest(content, folder)
            return verify_manifest(manifest, folder, below, way_out=way_out)
    kind = (above if name == "model" else url).split("/")[-2]
    advice = f"Make it again with: {make_command(kind)}"
    raise MissingArtifact(f"{url} is no longer there: it has no manifest. {way_out or advice}")


TIMED = frozenset(
    {"metrics.jsonl", "program.log", "result.json", "samples.json", "spec.json", "verdict.json"}
)
"""Files that say when or how fast something was made, or that nothing is made from."""


class Edition(BaseModel):
    """What some libraries make of what was asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    libraries: dict[str, str]
    fingerprint: str
    """Of the artifact."""
    remade: str = ""
    content: str
    """Of `content_of`; empty where it is not known any more."""
    compared: str = ""
    """What was compared and found to be as other libraries had made it, such as `200 documents`."""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Editions(BaseModel):
    """All editions of one thing that was asked for, oldest first; the first one with a fingerprint
    says which libraries made it."""

    model_config = ConfigDict(extra="forbid")

    editions: list[Edition] = []

    def settle(self, identity: Identity, content: str) -> Identity:
        """The identity under which new content is committed: that of an earlier edition with the
        same content, or a new one where the same libraries made other content before."""
        for edition in self.editions:
            if edition.content == content:
                return identity.model_copy(
                    update={"libraries": edition.libraries, "remade": edition.remade}
                )
        # An edition that was only compared says nothing about what these libraries make themselves.
        if any(
            edition.content and edition.libraries == identity.libraries and not edition.compared
            for edition in self.editions
        ):
            return identity.model_copy(update={"remade": content})
        return identity


def content_of(entries: Iterable[FileEntry]) -> str:
    """A hash of an artifact's files, without those that differ each time they are made."""
    lasting = (entry for entry in entries if entry.path.rpartition("/")[2] not in TIMED)
    # Every file in the cloud has a CRC-32C, whoever wrote it; in a local store none has one.
    return hash_json({entry.path: entry.crc32c or entry.sha256 for entry in lasting})
