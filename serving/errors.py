"""Errors as HTTP answers, in the shape that OpenAI clients read."""

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

RETRY_SECONDS = 2
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""As OpenAI names them; any other status below 500 is an invalid request."""


class ServingError(Exception):
    """An answer other than 200."""

    def __init__(
        self, status: int, message: str, code: str, field: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": TYPES.get(status, "invalid_request_error")
                if status < 500
                else "server_error",
                "param": field,
                "code": code,
            }
        }
        self.headers = {"Retry-After": str(RETRY_SECONDS)} if retry else {}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """What a client is told of any error."""
    if isinstance(error, HTTPException):
        text = f"{request.method} {request.url.path}: {error.detail}."
        code = "method_not_allowed" if error.status_code == 405 else "no_such_route"
        headers = error.headers or {}
        error = ServingError(error.status_code, text, code)
        # Such as `Allow`, where a route has no such method.
        error.headers |= headers
    elif not isinstance(error, ServingError):
        error = ServingError(500, "An unexpected error; the endpoint's log shows it.", "fault")
    return error.response()


def invalid(message: str, field: str | None) -> ServingError:
    """400: the request is wrong."""
    return ServingError(400, message, "invalid_request", field)


def unavailable(message: str) -> ServingError:
    """503: nothing can answer now; try again."""
    return ServingError(503, message, "unavailable", retry=True)


def client_gone() -> ServingError:
    """499, as nginx has it: for the log, since nobody is left to read it."""
    return ServingError(499, "The client closed the connection.", "client_gone")


def message_of(content: bytes) -> str:
    """What an error in OpenAI's shape says; empty of anything else."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
