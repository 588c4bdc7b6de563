"""Committing and finding training checkpoints: `<run>/step-N/`, manifest last.

A checkpoint without a manifest does not exist. What the files hold is the training program's
affair; this module knows names, sizes and checksums.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from artifacts.errors import DamagedArtifact, UserError, make_command
from artifacts.settings import first_fault
from artifacts.storage import files
from artifacts.storage.files import FileEntry, list_files
from artifacts.store.identity import Identity, differences
from artifacts.store.layout import MANIFEST_NAME
from artifacts.store.manifest import dump_with_checksum, find_faults, load_with_checksum

STEP_FOLDER = re.compile(r"step-(\d+)")


class CheckpointManifest(BaseModel):
    """What makes a checkpoint exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    step: int
    content: dict[str, Any]
    """What must agree for a run to go on from here: `settings` and `inputs`."""
    state: dict[str, Any]
    """The training program's small state: samples seen, counters."""
    permanent: bool = False
    """Never removed by rotation."""
    files: list[FileEntry]


class Checkpoint(BaseModel):
    """A committed checkpoint and where it lies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    manifest: CheckpointManifest


def step_url(run_url: str, step: int) -> str:
    """The folder of one step's checkpoint."""
    return f"{run_url.rstrip('/')}/step-{step}"


def clear_step(run_url: str, step: int) -> str:
    """An empty folder for one step's checkpoint, rid of what an interrupted save left in it."""
    url = step_url(run_url, step)
    _remove(url)
    files.make_folder(url)
    return url


def commit(
    run_url: str,
    step: int,
    content: dict[str, Any],
    state: dict[str, Any],
    permanent: bool = False,
) -> Checkpoint:
    """Make the files in a step's folder a checkpoint by writing its manifest."""
    url = step_url(run_url, step)
    # A manifest that is there already is of an attempt whose answer was lost.
    entries = [entry for entry in list_files(url) if entry.path != MANIFEST_NAME]
    if files.is_local(url):
        # Before the manifest: after a loss of power it must not name files that are empty.
        files.flush_folder(Path(url), [entry.path for entry in entries])
    manifest = CheckpointManifest(
        step=step, content=content, state=state, permanent=permanent, files=entries
    )
    files.write(f"{url}/{MANIFEST_NAME}", dump_with_checksum(manifest))
    return Checkpoint(url=url, manifest=manifest)


def verify(checkpoint: Checkpoint, rank: int = 0, count: int = 1, checksums: bool = True) -> None:
    """Compare sizes, and checksums unless told not to, with the manifest; raises DamagedArtifact
    naming the file. Of several workers each compares its part of the files, the large ones dealt
    out first."""
    largest_first = sorted(checkpoint.manifest.files, key=lambda entry: (-entry.bytes, entry.path))
    for fault in find_faults(checkpoint.url, largest_first[rank::count], checksums):
        raise DamagedArtifact(f"{checkpoint.url}/{fault}.")


def find_newest(
    run_url: str,
    content: dict[str, Any],
    report: Callable[[str], None],
    check: Callable[[Checkpoint], None] = verify,
) -> Checkpoint | None:
    """The newest checkpoint of a run whose files pass the check, or None where it has none.

    A damaged one is named through `report` and skipped; one without a manifest was never finished.
    Raises UserError where the run was made with other settings or inputs, and DamagedArtifact where
    there are finished ones, and every one is damaged.
    """
    damages: list[DamagedArtifact] = []
    for step, url in reversed(_step_folders(run_url)):
        try:
            checkpoint = _read(url)
            if checkpoint is None:
                report(f"The checkpoint of step {step} was not finished and is left out ({url}).")
                continue
            # Before the files are read, which takes long: those of another run are of no use, whole
            # or not.
            _refuse_other_content(checkpoint, content)
            check(checkpoint)
        except DamagedArtifact as damage:
            report(f"The checkpoint of step {step} is damaged and is left out: {damage}")
            damages.append(damage)
            continue
        return checkpoint
    if damages:
        raise DamagedArtifact(
            f"Every checkpoint of {run_url} is damaged: {damages[0]} Training would begin again "
            "from its first step. Bring one back from a backup, or have them set aside and begin "
            f"again with: llm-assets doctor --repair && {make_command('checkpoint')}"
        )
    return None


def newest_step(run_url: str) -> int | None:
    """The step of the newest finished checkpoint, whose files are not looked at; None without."""
    folders = reversed(_step_folders(run_url))
    return next((step for step, url in folders if files.find(f"{url}/{MANIFEST_NAME}")), None)


def adopt(run_url: str, target_url: str, before: int, content: dict[str, Any]) -> int | None:
    """Copy a run's newest valid checkpoint before a step to another run that takes the same steps.

    Returns the step from which the other run goes on: that of the copy, or of its own newest
    checkpoint where it has begun already, for example before a kill; None where the first run has
    no checkpoint that early.
    """
    own_step = newest_step(target_url)
    if own_step is not None:
        return own_step
    for step, url in reversed(_step_folders(run_url)):
        try:
            checkpoint = _read(url) if step < before else None
            if checkpoint is None:
                continue
            verify(checkpoint)
        except DamagedArtifact:
            continue
        manifest = checkpoint.manifest
        folder = clear_step(target_url, step)
        for entry in manifest.files:
            files.make_folder(f"{folder}/{entry.path}".rpartition("/")[0])
            files.copy(f"{url}/{entry.path}", f"{folder}/{entry.path}")
        # Last, so that a copy which was broken off does not exist as a checkpoint.
        commit(target_url, step, content, manifest.state, manifest.permanent)
        return step
    return None


def find_damaged(run_url: str) -> list[tuple[int, str]]:
    """Steps whose committed checkpoint is not what its manifest says, each with its fault."""
    faults = []
    for step, url in _step_folders(run_url):
        try:
            checkpoint = _read(url)
            if checkpoint:
                verify(checkpoint)
        except DamagedArtifact as damage:
            faults.append((step, str(damage).removesuffix(".")))
    return faults


def rotate(run_url: str, keep: int) -> list[int]:
    """Remove what `find_superfluous` finds; returns its steps."""
    steps = find_superfluous(run_url, keep)
    for step in steps:
        _remove(step_url(run_url, step))
    return steps


def find_superfluous(
    run_url: str, keep: int, check: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> list[int]:
    """Steps of all but the permanent checkpoints and the newest `keep` that pass the check.

    Folders without a manifest that are older than the newest checkpoint count too.
    """
    superfluous: list[int] = []
    kept_count = 0
    folders = _step_folders(run_url)
    # Beside a single one nothing is superfluous, so that its files need not be read.
    for step, url in reversed(folders if len(folders) > 1 else []):
        try:
            checkpoint = _read(url)
            if checkpoint and checkpoint.manifest.permanent:
                continue
            if checkpoint and kept_count < keep:
                check(checkpoint)
                kept_count += 1
                continue
        except DamagedArtifact:
            pass
        # A damaged checkpoint was not counted, so it never takes the place of a whole one. Folders
        # newer than the newest whole checkpoint stay: one of them may be a save under way.
        if kept_count:
            superfluous.append(step)
    return superfluous


def remove_all(run_url: str) -> int:
    """Remove all checkpoints of a run; returns how many there were."""
    folders = _step_folders(run_url)
    for _, url in folders:
        _remove(url)
    return len(folders)


def _step_folders(run_url: str) -> list[tuple[int, str]]:
    names = filter(None, map(STEP_FOLDER.fullmatch, files.list_names(run_url)))
    # As numbers: by their names, step 10 would come before step 9.
    steps = sorted(int(name[1]) for name in names)
    return [(step, step_url(run_url, step)) for step in steps]


def _read(url: str) -> Checkpoint | None:
    content = files.find(f"{url}/{MANIFEST_NAME}")
    if content is None:
        return None
    try:
        manifest = load_with_checksum(content, CheckpointManifest)
        # Content of another form is damage as well.
        _identity(manifest.content)
    except ValueError as error:
        fault = first_fault(error)
        raise DamagedArtifact(f"{url}/{MANIFEST_NAME} cannot be read ({fault}).") from None
    return Checkpoint(url=url, manifest=manifest)


def _identity(content: dict[str, Any]) -> Identity:
    """A run's content in the form in which it is compared; raises ValidationError."""
    return Identity.model_validate({"kind": "checkpoint", "code_version": ""} | content)


def _refuse_other_content(checkpoint: Checkpoint, content: dict[str, Any]) -> None:
    if changes := differences(_identity(checkpoint.manifest.content), _identity(content)):
        raise UserError(
            f"{checkpoint.url} was made by another run: {'; '.join(changes)}. Continue with the "
            "settings it was made with, or use another run folder."
        )


def _remove(url: str) -> None:
    """Remove a checkpoint, manifest first, so that half a removal leaves nothing that exists."""
    files.remove(f"{url}/{MANIFEST_NAME}")
    files.remove(url)
