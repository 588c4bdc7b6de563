"""Where the endpoint listens, and who may ask it."""

import os
import socket

from artifacts.errors import UserError
from serving.settings import EndpointSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises UserError where the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host} port {port} ({error.strerror}). Another program may be using "
            "it: choose another `endpoint.port` in the pipeline file, or end that program."
        ) from error


def bearer_token(settings: EndpointSettings) -> str | None:
    """The token to ask for; raises UserError where one is needed and there is none."""
    if settings.token_variable:
        token = os.environ.get(settings.token_variable, "")
        if not token:
            raise UserError(
                f"`endpoint.token_variable` names {settings.token_variable}, which is not set. Put "
                "the bearer token into it."
            )
        return token
    if settings.host not in LOOPBACK:
        raise UserError(
            f"`endpoint.host` is {settings.host}, which others can reach: set "
            "`endpoint.token_variable` to the name of a variable that holds a bearer token."
        )
    return None
