"""Google's REST APIs, where no generated client is installed."""

from typing import Any

from llm_assets.cloud.settings import GoogleCloudSettings

CALL_SECONDS = 30.0


def open_session() -> Any:
    """A `requests` session with the credentials of this machine."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    return AuthorizedSession(credentials)


def rest_url(settings: GoogleCloudSettings, host: str) -> str:
    """Where an API's host answers, or what stands for it."""
    return settings.rest_endpoint or f"https://{host}"


def get_json(session: Any, url: str) -> dict[str, Any]:
    """A JSON answer; raises what `requests` raises."""
    reply = session.get(url, timeout=CALL_SECONDS)
    reply.raise_for_status()
    content: dict[str, Any] = reply.json()
    return content


def post_json(session: Any, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a JSON body; raises what `requests` raises."""
    reply = session.post(url, json=body, timeout=CALL_SECONDS)
    reply.raise_for_status()
    content: dict[str, Any] = reply.json()
    return content
