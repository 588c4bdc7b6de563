"""A request's body, within limits of size and time."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from serving.api.errors import ServingError, client_gone, invalid


async def read_json(
    request: Request, limit: int, seconds: float, parse_float: Callable[[str], Any] = float
) -> Any:
    """What a request's body says; raises ServingError 400, 408 or 413.

    Args:
        limit: of the body, in bytes.
        seconds: that its client may take to send it.
    """
    too_large = ServingError(413, f"The body is larger than {limit:,} bytes.", "body_too_large")
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                content += piece
                if len(content) > limit:
                    raise too_large
    except ClientDisconnect:
        raise client_gone() from None
    except TimeoutError:
        text = f"The body was not complete after {seconds:g} s."
        raise ServingError(408, text, "slow_body") from None
    try:
        value = json.loads(content, parse_float=parse_float)
        # Half a surrogate pair passes as JSON and is no character.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = "The body holds half of a surrogate pair (\\ud800 to \\udfff)."
        raise invalid(text, None) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not JSON: {error}.", None) from error
    return value
