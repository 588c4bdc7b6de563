"""Secrets that a job's program finds in its environment, read on the machine that runs it.

Whoever may see a job sees its description, so that names a secret alone: `SECRET_WANDB_API_KEY`
holds the full name of a version in Secret Manager, whose value the program finds as
`WANDB_API_KEY`.
"""

from collections.abc import Mapping

from artifacts.errors import UserError

PREFIX = "SECRET_"
ENDPOINT_VARIABLE = "API_ENDPOINT"
"""Where set, the address that stands for Google's own APIs."""
CALL_SECONDS = 60.0


def with_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the value of each secret that it names.

    Raises:
        UserError: one cannot be read; the job's account needs the right to.
    """
    names = {
        key.removeprefix(PREFIX): name
        for key, name in environment.items()
        if key.startswith(PREFIX) and key != PREFIX
    }
    if not names:
        return dict(environment)
    from google.api_core.exceptions import GoogleAPIError
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient

    endpoint = environment.get(ENDPOINT_VARIABLE)
    client = SecretManagerServiceClient(
        client_options={"api_endpoint": endpoint} if endpoint else None
    )
    values = {}
    for variable, name in names.items():
        try:
            reply = client.access_secret_version(name=name, timeout=CALL_SECONDS)
        except GoogleAPIError as error:
            raise UserError(
                f"The secret {name} cannot be read ({error}). Give the job's service "
                "account roles/secretmanager.secretAccessor on it."
            ) from error
        values[variable] = reply.payload.data.decode().strip()
    return {**environment, **values}
