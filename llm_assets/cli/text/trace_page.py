"""The page in the browser that traces answers; on loopback alone, everything escaped."""

from urllib.parse import parse_qs

import uvicorn
from jinja2 import Environment, PackageLoader
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.cli.session import Session
from llm_assets.cli.text.trace import find_answers
from llm_assets.tracing.trace import MOST_CHARACTERS, Trace, Tracer
from serving.api.address import LOOPBACK, listen

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'"
_PAGES = Environment(loader=PackageLoader("llm_assets.cli.text"), autoescape=True)


def serve_page(session: Session, port: int, report: Report) -> None:
    """Serve the page until interrupted; raises UserError where the port is taken."""
    with listen("127.0.0.1", port) as listener:
        address = listener.getsockname()[1]
        report(f"Trace answers at http://127.0.0.1:{address} (end it with Ctrl-C).")
        config = uvicorn.Config(build_page(session), log_level="warning", server_header=False)
        uvicorn.Server(config).run(sockets=[listener])


def build_page(session: Session) -> Starlette:
    """The page: a form, and what was found for it."""
    tracer = Tracer(session.record.store, lambda line: None)

    async def form(_: Request) -> HTMLResponse:
        return _render(session)

    async def found(request: Request) -> HTMLResponse:
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{request.headers['host']}":
            return _render(session, fault="Only this page itself may ask.", status=403)
        body = await _body(request)
        if body is None:
            return _render(session, fault="The text is too long.", status=413)
        asked, text = body.get("request", ""), body.get("text", "")
        return _answer(session, tracer, asked.strip() or None, text if text.strip() else None)

    # A page elsewhere whose name leads here (DNS rebinding) is known by its Host.
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))
    routes = [Route("/", form), Route("/", found, methods=["POST"])]
    return Starlette(routes=routes, middleware=[guard])


async def _body(request: Request) -> dict[str, str] | None:
    """The fields of the form; None where they are too long."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > 12 * MOST_CHARACTERS:
            return None
    fields = parse_qs(content.decode("ascii", "replace"))
    return {name: values[0].replace("\r\n", "\n") for name, values in fields.items()}


def _answer(
    session: Session, tracer: Tracer, request: str | None, text: str | None
) -> HTMLResponse:
    try:
        state = session.registry.state()
        found = [
            tracer.trace(state, one.version, one.answer)
            for one in find_answers(session, request, text, None)
        ]
    except UserError as error:
        return _render(session, request or "", text or "", fault=str(error), status=400)
    return _render(session, request or "", text or "", found)


def _render(
    session: Session,
    request: str = "",
    text: str = "",
    found: list[Trace] | None = None,
    fault: str | None = None,
    status: int = 200,
) -> HTMLResponse:
    page = _PAGES.get_template("trace.html").render(
        pipeline=session.settings.name, request=request, text=text, found=found or [], fault=fault
    )
    headers = {
        "Content-Security-Policy": _POLICY,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        # Without one, browsers would give the form's own origin as `null`.
        "Referrer-Policy": "same-origin",
    }
    return HTMLResponse(page, status, headers)
