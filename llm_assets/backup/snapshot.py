"""What a backup consists of, on the disk of the backup.

`artifacts/` holds artifacts as the store does; they never change, so all snapshots share them.
A snapshot is a folder named by its time: `records/` (what in the store is no artifact), `history/`
(Dagster's) and `settings/`. Its `backup.json` is written last; without it the snapshot does not
exist.
"""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import UserError
from artifacts.storage.checksums import FileEntry

SNAPSHOT_NAME = "backup.json"
ARTIFACTS, RECORDS, HISTORY, SETTINGS = "artifacts", "records", "history", "settings"


class Snapshot(BaseModel):
    """The content of `backup.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    pipeline: str
    """The pipeline's name."""
    config: str
    """The pipeline file, relative to the project's folder."""
    artifacts: list[tuple[str, str]]
    """Kind and fingerprint of each."""
    files: list[FileEntry]
    """Records, history and settings, relative to the snapshot's folder."""


def newest_snapshot(folder: Path) -> tuple[Path, Snapshot]:
    """The newest complete snapshot of a backup, and its folder.

    Raises:
        UserError: there is none, or it is of a newer release.
    """
    found = sorted(folder.glob(f"*/{SNAPSHOT_NAME}"))
    if not found:
        raise UserError(
            f"{folder} holds no backup (no */{SNAPSHOT_NAME}). Give the folder that `llm-assets "
            "backup` wrote to."
        )
    try:
        return found[-1].parent, Snapshot.model_validate_json(found[-1].read_bytes())
    except ValidationError as error:
        raise UserError(
            f"{found[-1]} cannot be read ({error.errors()[0]['msg']}): it is damaged, or of a "
            "newer release. Move its folder away to use the backup before it."
        ) from None
