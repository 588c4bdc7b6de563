"""What a job's environment says: where Cloud Storage is, until when it may run, its secrets."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from artifacts.errors import UserError, first_line
from artifacts.program.entry import read_spec_file
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
"""The variable that a program reads to the one that the job sets. CHKPTS_FOLDER and JOBLOGS_FOLDER
are the names of gkcng/vertex-deepspeed."""


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
    """Copy a JSON spec to a local file, its `gs://` values turned into mounted paths; raises
    UserError where it cannot be read."""
    content = read_spec_file(url)
    try:
        spec = json.loads(content)
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
    """Make the output folders, so that a program can write into them at once; raises UserError
    where one cannot be made."""
    for folder in output_folders(environment).values():
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"The output folder {folder} cannot be made ({first_line(error)}). Mount Cloud "
                f"Storage at {DEFAULT_MOUNT}, or name in {MOUNT_VARIABLE} where it is mounted."
            ) from error


# Whoever follows a job renews its lease, so machines end by themselves where Dagster is gone.
LEASE_VARIABLE = "JOB_LEASE"
SECONDS_VARIABLE = "JOB_LEASE_SECONDS"
LONGEST_POLL_SECONDS = 60.0


def watch_lease(environment: Mapping[str, str]) -> None:
    """Send this process SIGTERM once the lease that the environment names, if any, has run out.

    A lease runs from its last change by this machine's own clock, also while it cannot be read.
    """
    if url := environment.get(LEASE_VARIABLE):
        seconds = float(environment[SECONDS_VARIABLE])
        threading.Thread(target=_watch, args=(url, seconds), daemon=True).start()


def _watch(url: str, seconds: float) -> None:
    content, changed = None, time.monotonic()
    while time.monotonic() - changed < seconds:
        time.sleep(min(LONGEST_POLL_SECONDS, seconds / 4))
        # Whatever keeps the store from being read, the next look may find it.
        with suppress(Exception):
            if (current := files.find(url)) != content:
                content, changed = current, time.monotonic()
    print(
        f"No run has renewed {url} for {seconds:,.0f} s: this job saves its state and ends. "
        "Materialize the asset again: it goes on from its newest checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)


# Whoever may see a job sees its description, so that names a secret alone: `SECRET_WANDB_API_KEY`
# holds the full name of a version in Secret Manager, whose value the program finds as
# `WANDB_API_KEY`.
PREFIX = "SECRET_"
ENDPOINT_VARIABLE = "API_ENDPOINT"
"""Where set, the address that stands for Google's own APIs."""
CALL_SECONDS = 60.0


def with_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the value of each secret that it names; raises UserError where one
    cannot be read."""
    names = {
        key.removeprefix(PREFIX): name
        for key, name in environment.items()
        if key.startswith(PREFIX) and key != PREFIX
    }
    if not names:
        return dict(environment)
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    values = {}
    for variable, name in names.items():
        try:
            values[variable] = read_secret(name, environment.get(ENDPOINT_VARIABLE))
        except (GoogleAPIError, GoogleAuthError) as error:
            raise UserError(
                f"The secret {name} cannot be read ({error}). Give the job's service "
                "account roles/secretmanager.secretAccessor on it."
            ) from error
    # The names stay beside the values: by them `recipes.smoke` knows which values to look for.
    return {**environment, **values}


def read_secret(version: str, endpoint: str | None) -> str:
    """The value of a secret's version, by its full name; raises what Google raises."""
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient

    options = {"api_endpoint": endpoint} if endpoint else None
    client = SecretManagerServiceClient(client_options=options)
    reply = client.access_secret_version(name=version, timeout=CALL_SECONDS)
    return str(reply.payload.data.decode().strip())
