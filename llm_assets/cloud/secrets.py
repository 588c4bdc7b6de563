"""Values from Secret Manager: read when needed, kept nowhere."""

from llm_assets.cloud.settings import GoogleCloudSettings

CALL_SECONDS = 30.0


def read_secret(settings: GoogleCloudSettings, name: str) -> str:
    """The newest value of a secret; raises what Google raises (NotFound, PermissionDenied)."""
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient

    options = {"api_endpoint": settings.api_endpoint} if settings.api_endpoint else None
    client = SecretManagerServiceClient(client_options=options)
    reply = client.access_secret_version(
        name=f"projects/{settings.project}/secrets/{name}/versions/latest", timeout=CALL_SECONDS
    )
    return str(reply.payload.data.decode().strip())
