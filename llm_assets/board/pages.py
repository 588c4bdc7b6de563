"""What all pages share: the pipeline they tell of, who may come in, and how a page is set."""

import hmac
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from artifacts.errors import shown
from artifacts.progress import counted
from artifacts.reasons import reason_of
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.config import PipelineSettings
from llm_assets.registry.base import Registry
from llm_assets.registry.state import ModelVersion
from serving.api.app import check_origin
from serving.errors import ServingError
from serving.settings import EndpointSettings

MOST_BYTES = 1_000_000
"""Of a form that is sent."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # Without one, browsers would give the form's own origin as `null`.
    "Referrer-Policy": "same-origin",
}
MOST_REMEMBERED = 16
"""Of what pages show of artifacts."""
PUBLIC = ("/sign-in", "/board.css", "/board.js")
Fields = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Board:
    """The pipeline that is shown, and who may see it and decide."""

    settings: PipelineSettings
    record: Pipeline
    registry: Registry
    status: Callable[[], dict[str, Any]]
    """What `llm-assets status --json` says."""
    command: Sequence[str]
    """How the command line is called, by which decisions are made."""
    key: str
    """Whoever presents it may decide: the endpoint's token, or the content of a private file."""
    key_name: str
    """Where people find it, in words."""
    is_open: bool
    """Whether everybody on this machine may read, as they may ask the endpoint."""
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """What the cookie holds of a browser that signed in with the key."""
    _remembered: dict[Hashable, tuple[list[Any], Any]] = field(default_factory=dict)
    # Pages are plain functions, which Starlette calls in threads, several at a time.
    _lock: Lock = field(default_factory=Lock)

    @property
    def store(self) -> Store:
        """The pipeline's."""
        return self.record.store

    @property
    def cookie(self) -> str:
        """Named after the pipeline: cookies ignore ports, so boards need different ones."""
        return f"board_{self.settings.name}"

    def remember(
        self, make: Callable[..., T], artifacts: Sequence[Artifact | None], *more: Hashable
    ) -> T:
        """What `make(*artifacts, *more)` gave before, or gives now.

        Forgetting rewrites artifacts in place and changes their manifests, so those are compared.
        """
        manifests = [artifact and artifact.manifest for artifact in artifacts]
        key = (
            make.__qualname__,
            *(manifest and manifest.fingerprint for manifest in manifests),
            *more,
        )
        entry = self._remembered.get(key)
        if entry is None or entry[0] != manifests:
            # Outside the lock, since a page that takes long would hold up the others.
            entry = manifests, make(*artifacts, *more)
            with self._lock:
                self._remembered.pop(key, None)
                self._remembered[key] = entry
                # A dictionary keeps the order in which keys were entered, so the first key is the
                # oldest.
                while len(self._remembered) > MOST_REMEMBERED:
                    del self._remembered[next(iter(self._remembered))]
        value: T = entry[1]
        return value

    def knows(self, request: Request) -> bool:
        """Whether a request comes from somebody who presented the key."""
        # These are bytes, since `compare_digest` refuses text with characters beyond ASCII.
        cookie = request.cookies.get(self.cookie, "").encode()
        bearer = request.headers.get("authorization", "").encode()
        # In constant time, so that the time of an answer tells nothing about the key.
        is_signed_in = hmac.compare_digest(cookie, self.session.encode())
        return hmac.compare_digest(bearer, f"Bearer {self.key}".encode()) or is_signed_in


def find_behind(store: Store, version: ModelVersion, kind: str) -> Artifact | None:
    """The artifact of a kind that a version stands on; None where it is gone, or there was none."""
    return store.find_named(kind, version.lineage.get(kind, ""))


_TEMPLATES = Environment(
    loader=PackageLoader("llm_assets.board"),
    autoescape=True,
    # Control characters, including those that reverse a line, are written out everywhere.
    finalize=lambda one: one if isinstance(one, Markup) or not isinstance(one, str) else shown(one),
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "count": lambda value: f"{value:,}",
    "of": counted,
    "day": lambda at: f"{at:%Y-%m-%d %H:%M}" if isinstance(at, datetime) else at,
    "figure": lambda value: "not finite" if value is None else f"{value:#.4g}".rstrip("."),
    "percent": lambda value: "-" if value is None else f"{value:.0%}",
    "sentence": lambda text: text[:1].upper() + text[1:],
    "line": lambda text: " ".join(str(text).split()),
    "in_address": lambda text: quote(str(text), safe=""),
}


def fragment(name: str, **values: Any) -> HTMLResponse:
    """A part of a page, for the script that asked for it."""
    return HTMLResponse(_TEMPLATES.get_template(name).render(values))


def page(board: Board, request: Request, name: str, status: int = 200, **values: Any) -> Response:
    """A whole page, reloaded after the number of seconds in `refreshes`, if any."""
    # One slash only: a link to a path that begins with two leads to another host.
    path, query = f"/{request.url.path.lstrip('/')}", request.url.query
    here = f"{path}?{query}" if query else path
    common = {"board": board, "path": path, "here": here, "signed": board.knows(request)}
    # As a header: accessibility audits object to the element for it in the page.
    seconds = values.get("refreshes")
    headers = {"Refresh": str(seconds)} if seconds else {}
    return HTMLResponse(_TEMPLATES.get_template(name).render(common | values), status, headers)


def page_at(path: str, board: Board, name: str, look: Callable[[Request], dict[str, Any]]) -> Route:
    """The page at an address: a template, filled in with what a request is answered by."""
    return Route(path, lambda request: page(board, request, name, **look(request)))


def posted(path: str, work: Callable[[Request, Fields], Response]) -> Route:
    """What takes a form at an address; its work may take long."""

    async def handle(request: Request) -> Response:
        # The form is read here, since Starlette's `form` needs another package, python-multipart.
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > MOST_BYTES:
                raise HTTPException(413, f"The form is larger than {MOST_BYTES:,} bytes")
        # Browsers escape all but ASCII in a form, and end each line of a field with CR and LF.
        sent = parse_qs(content.decode("ascii", "replace"), keep_blank_values=True)
        fields = {name: values[0].replace("\r\n", "\n") for name, values in sent.items()}
        return await run_in_threadpool(work, request, fields)

    return Route(path, handle, methods=["POST"])


def as_number(text: str) -> int | None:
    """Up to nine digits as a number; None of any other text."""
    # `isdecimal` alone accepts the digits of every script.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def number(request: Request, name: str, otherwise: int) -> int:
    """A number of the address; raises HTTPException where it is none."""
    value = as_number(request.query_params.get(name) or str(otherwise))
    if value is None:
        raise HTTPException(400, f"`{name}` in the address is not a number")
    return value


def apology(board: Board) -> Callable[[Request, Exception], Response]:
    """The answer that replaces a page that cannot be made."""

    def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return page(board, request, "fault.html", error.status_code, fault=error.detail)
        fault, status = reason_of(error), 400
        if not fault:
            fault, status = "An unexpected error; the board's log shows it.", 500
        return page(board, request, "fault.html", status, fault=fault)

    return answer


class Doorkeeper:
    """Admits those who may enter, and tells browsers in every answer what they may do with it."""

    def __init__(self, app: ASGIApp, board: Board) -> None:
        self._app, self._board = app, board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # ASGI also announces the server's start and end by this call, and those are no requests.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    # An answer may have one of its own, as a version's own page has its policy.
                    headers.setdefault(name, value)
            await send(message)

        try:
            check_origin(request, EndpointSettings())
        except ServingError as error:
            error.body["error"]["message"] = (
                "The board is for browsers on this machine, at its loopback address, and takes no "
                "requests from other websites."
            )
            await error.response()(scope, receive, send_guarded)
            return
        path = request.url.path
        decides = request.method == "POST" and path.startswith("/decide")
        needs_key = path not in PUBLIC and (decides or not self._board.is_open)
        if needs_key and not self._board.knows(request):
            # The form's content is lost, and the address of a POST shows nothing: back to its page.
            target = f"/{path.split('/')[1]}"
            if request.method != "POST":
                target = f"{path}?{request.url.query}" if request.url.query else path
            answer = RedirectResponse(f"/sign-in?next={quote(target, safe='/')}", 303)
            await answer(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


def sign_in(board: Board) -> list[Route]:
    """The form that asks for the key, and what takes it."""

    def ask(request: Request) -> dict[str, Any]:
        return {"next": _own(request.query_params.get("next"))}

    def take(request: Request, fields: Fields) -> Response:
        target = _own(fields.get("next"))
        key = fields.get("key", "").strip().encode()
        if not hmac.compare_digest(key, board.key.encode()):
            fault = "This is not the key."
            return page(board, request, "sign_in.html", 403, next=target, fault=fault)
        answer = RedirectResponse(target, 303)
        # Browsers send a strict cookie with no request that another website makes.
        answer.set_cookie(board.cookie, board.session, httponly=True, samesite="strict")
        return answer

    return [page_at("/sign-in", board, "sign_in.html", ask), posted("/sign-in", take)]


def _own(path: str | None) -> str:
    """Where to go on: a page of this board, whatever the address says."""
    # Browsers take `//host` and `/\host` for another host, and drop tabs and line breaks in them.
    is_own = path and path.startswith("/") and path[1:2] not in ("/", "\\") and path.isprintable()
    return path if path and is_own else "/"
