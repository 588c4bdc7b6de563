"""Values from Secret Manager: read when needed, kept nowhere."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from artifacts.errors import UserError
from llm_assets.cloud.settings import GoogleCloudSettings

CALL_SECONDS = 30.0
HUB_VARIABLE = "HF_TOKEN"


def read_secret(settings: GoogleCloudSettings, name: str) -> str:
    """The newest value of a secret; raises what Google raises (NotFound, PermissionDenied)."""
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient

    options = {"api_endpoint": settings.api_endpoint} if settings.api_endpoint else None
    client = SecretManagerServiceClient(client_options=options)
    reply = client.access_secret_version(
        name=f"projects/{settings.project}/secrets/{name}/versions/latest", timeout=CALL_SECONDS
    )
    return str(reply.payload.data.decode().strip())


@contextmanager
def hub_access(settings: GoogleCloudSettings) -> Iterator[None]:
    """Give this process the Hugging Face token while the block runs, and no longer.

    A token that the environment holds already is left alone.

    Raises:
        UserError: the secret cannot be read.
    """
    from google.api_core.exceptions import GoogleAPICallError

    name = settings.secrets.hugging_face_token
    if name is None or HUB_VARIABLE in os.environ:
        yield
        return
    try:
        os.environ[HUB_VARIABLE] = read_secret(settings, name)
    except GoogleAPICallError as error:
        raise UserError(
            f"The secret {name} of project {settings.project} cannot be read ({error.message}). It "
            "is named by `secrets.hugging_face_token`; `llm-assets check` says what is missing."
        ) from error
    try:
        yield
    finally:
        os.environ.pop(HUB_VARIABLE, None)
