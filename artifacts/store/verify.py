"""Whether files are still what their manifest says."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from artifacts.errors import DamagedArtifact, MissingArtifact, make_command, mend_command
from artifacts.storage import files
from artifacts.storage.checksums import FileEntry, sha256_of
from artifacts.store.layout import MANIFEST_NAME
from artifacts.store.manifest import Manifest, parse_manifest

READ_AT_ONCE = 4
"""Files whose checksums are taken at the same time."""


def find_faults(url: str, entries: Sequence[FileEntry], checksums: bool = True) -> Iterator[str]:
    """What is wrong with the files of a folder: `<path> is absent`, one line a file.

    Sizes are compared first, since they cost one listing. A checksum is the one that storage keeps
    where the entry has it; otherwise the file is read, once a process as long as it is unchanged.
    """
    filesystem, folder = files.resolve(url)
    filesystem.invalidate_cache()
    present = filesystem.find(folder, detail=True)
    whole: list[FileEntry] = []
    for entry in entries:
        found = present.get(f"{folder}/{entry.path}")
        if found is None:
            yield f"{entry.path} is absent"
        elif found["size"] != entry.bytes:
            yield f"{entry.path} has {found['size']} bytes, not {entry.bytes}"
        else:
            whole.append(entry)

    def is_same(entry: FileEntry) -> bool:
        path = f"{folder}/{entry.path}"
        if entry.crc32c is not None:
            return bool(present[path]["crc32c"] == entry.crc32c)
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
    """Compare an artifact's files, or those below a folder in it, with its manifest.

    Raises:
        DamagedArtifact: naming the file, and the way out or the command that makes it again.
    """
    entries = [entry for entry in manifest.files if entry.path.startswith(below)]
    for fault in find_faults(url, entries, checksums):
        if manifest.location:
            way_out = "It was adopted from there: restore that folder, or adopt another."
        command = mend_command(f"{manifest.kind}/{manifest.fingerprint}")
        again = f"Set it aside and make it again with: {command}"
        raise DamagedArtifact(f"{url}/{fault}. {way_out or again}")


def verify_folder(url: str, way_out: str | None = None) -> None:
    """Compare a model folder, an artifact's or one directly inside it, with the manifest.

    Args:
        way_out: what to do about damage, where making the artifact again is not the answer.

    Raises:
        MissingArtifact: there is no manifest, so the artifact does not exist.
        DamagedArtifact: a file is absent, or its size or checksum differs.
    """
    url = url.rstrip("/")
    above, _, name = url.rpartition("/")
    for folder, below in ((url, ""), (above, f"{name}/")):
        content = files.find(f"{folder}/{MANIFEST_NAME}")
        if content is not None:
            manifest = parse_manifest(content, folder)
            return verify_manifest(manifest, manifest.location or folder, below, way_out=way_out)
    kind = (above if name == "model" else url).split("/")[-2]
    again = f"Make it again with: {make_command(kind)}"
    raise MissingArtifact(f"{url} is no longer there: it has no manifest. {way_out or again}")
