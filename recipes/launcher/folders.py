"""Where a program finds Cloud Storage: the mounted bucket, and the job's three output folders."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifacts.errors import UserError
from artifacts.storage import files

MOUNT_VARIABLE = "GCS_MOUNT"
DEFAULT_MOUNT = "/gcs"
"""Where Vertex AI mounts every bucket that the job's service account may see."""

OUTPUT_FOLDERS = {
    "OUTPUT_FOLDER": "AIP_MODEL_DIR",
    "CHECKPOINT_FOLDER": "AIP_CHECKPOINT_DIR",
    "CHKPTS_FOLDER": "AIP_CHECKPOINT_DIR",
    "LOG_FOLDER": "AIP_TENSORBOARD_LOG_DIR",
    "JOBLOGS_FOLDER": "AIP_TENSORBOARD_LOG_DIR",
}
"""What a program reads, its second names those of gkcng/vertex-deepspeed, to what the job says."""


def mounted(url: str, environment: Mapping[str, str]) -> str:
    """`gs://bucket/path` as a path under the mount; anything else as it is."""
    if not url.startswith("gs://"):
        return url
    root = environment.get(MOUNT_VARIABLE, DEFAULT_MOUNT)
    return f"{root}/{url.removeprefix('gs://')}".rstrip("/")


def output_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """OUTPUT_FOLDER, CHECKPOINT_FOLDER and so on as mounted paths, where the job has them."""
    return {
        ours: mounted(environment[theirs], environment)
        for ours, theirs in OUTPUT_FOLDERS.items()
        if environment.get(theirs)
    }


def localize_spec(url: str, target: Path, environment: Mapping[str, str]) -> Path:
    """Copy a JSON spec to a local file, its `gs://` values turned into mounted paths.

    Raises:
        UserError: there is no such spec, or it is not JSON.
    """
    try:
        spec = json.loads(files.read(url))
    except FileNotFoundError as error:
        raise UserError(f"There is no spec at {url}.") from error
    except ValueError as error:
        raise UserError(f"The spec {url} is not JSON: {error}") from error
    target.write_text(json.dumps(_localize(spec, environment), indent=2))
    return target


def _localize(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _localize(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [_localize(item, environment) for item in value]
    return mounted(value, environment) if isinstance(value, str) else value


def make_folders(environment: Mapping[str, str]) -> None:
    """Make the output folders, so that a program can write into them at once."""
    for folder in output_folders(environment).values():
        os.makedirs(folder, exist_ok=True)
