"""Writes `config/google_cloud.yaml` from what Terraform made."""

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import UserError
from artifacts.settings import read_yaml
from artifacts.storage import files
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.rights import REPOSITORY
from llm_assets.settings_file import check_settings

INFRASTRUCTURE = Path("infrastructure")
HEADER = (
    "# The cloud project that pipelines with `platform: google_cloud` run in; what Terraform made\n"
    "# was written by `llm-assets setup`, the rest is yours to change: docs/google_cloud.md.\n"
)
IMAGES = ("spark", "cuda", "serve")
BUILT = re.compile(rf"^[\w-]+-docker\.pkg\.dev/[^/]+/{REPOSITORY}/")
"""What `images/build.sh` pushes begins so, in whichever project; an image from elsewhere stays."""


class Outputs(BaseModel):
    """What `terraform output -json` says of infrastructure/."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    settings: dict[str, Any]
    repository: str = Field(min_length=1)
    secret: str = Field(min_length=1)


def read_outputs(path: Path | None) -> Outputs:
    """The outputs in a file, or those that `terraform output -json` prints.

    Raises:
        UserError: there is no Terraform, nothing was applied yet, or the file is another one.
    """
    # Bytes: what a PowerShell has written is UTF-16, which `json` recognizes.
    text = path.read_bytes() if path else _ask_terraform()
    origin = str(path or f"the output of Terraform in {INFRASTRUCTURE}/")
    try:
        values = {name: output["value"] for name, output in json.loads(text).items()}
        return Outputs.model_validate(values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        lacking = "settings, repository and secret"
        if isinstance(error, ValidationError):
            lacking = ", ".join(str(fault["loc"][0]) for fault in error.errors())
        raise UserError(
            f"{origin} lacks {lacking}. Run `terraform -chdir={INFRASTRUCTURE} apply` to its end "
            "first; a file must contain what `terraform output -json` prints."
        ) from error


def write_settings(outputs: Outputs, path: Path) -> GoogleCloudSettings:
    """Update a cloud project's file with what Terraform made; other keys and comments stay.

    Raises:
        UserError: the file is no YAML mapping, or the result would not be valid.
    """
    current = read_yaml(path) if path.exists() else {}
    if not isinstance(current, dict):
        raise UserError(f"{path} is not a mapping of settings. Remove it, or correct it by hand.")
    repository = f"{outputs.repository}/"
    # Names under which nothing was pushed yet: without images, the settings are not valid.
    names = current.get("images") or {kind: f"{repository}{kind}:latest" for kind in IMAGES}
    secrets = current.get("secrets") or {}
    content = current | outputs.settings | {"images": names, "secrets": secrets}
    source = f"{path} was not changed: Terraform's outputs, together with what the file says,"
    # Before names are replaced in sections that may be none.
    check_settings(content, GoogleCloudSettings, source)
    content["images"] = {
        kind: image and BUILT.sub(repository, image) for kind, image in names.items()
    }
    if secrets.get("hugging_face_token"):
        content["secrets"] = secrets | {"hugging_face_token": outputs.secret}
    settings = check_settings(content, GoogleCloudSettings, source)
    files.write(path, _edited(path.read_text() if path.exists() else HEADER, content).encode())
    return settings


def _edited(text: str, content: dict[str, Any]) -> str:
    """YAML with other values; comments stay beside their keys."""
    from ruamel.yaml import YAML

    writer = YAML()
    writer.preserve_quotes = True
    # Otherwise ruamel breaks long values into lines.
    writer.width = 10_000
    document, edited = writer.load(text), io.StringIO()
    # A file of comments alone holds no document that ruamel could keep them in.
    if document is None:
        document = {}
        edited.write(text)
    # Value by value: a whole section that is assigned again loses its comments and quotes.
    _set_values(document, content)
    writer.dump(document, edited)
    return edited.getvalue()


def _set_values(mapping: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(mapping.get(key), dict):
            _set_values(mapping[key], value)
        elif key not in mapping or mapping[key] != value:
            mapping[key] = value


def _ask_terraform() -> str:
    if not INFRASTRUCTURE.is_dir():
        raise UserError(
            f"There is no folder {INFRASTRUCTURE}/ here: run this in the checkout, or give the "
            "file with what `terraform output -json` printed: --outputs FILE."
        )
    command = ["terraform", f"-chdir={INFRASTRUCTURE}", "output", "-json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            f"`{' '.join(command)}` is not installed. Make it work, or give a file with its "
            "output: --outputs FILE."
        ) from error
    if done.returncode:
        raise UserError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
