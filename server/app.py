"""The web application: one table of routes, one gate before it, one shape for errors.

Owns the table, the page's security headers and the handlers of what goes wrong; the gate is in
server/gate.py, and server/life.py runs it. Must never compress (a token would wait for its block)
and never let an exception's text out: clients get a sentence, the log gets the trace.
"""

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from server import openai_api, openapi, requests_api, session_api, system_api, traffic_api
from server.context import Context
from server.diff_api import diff_routes
from server.errors import ApiError
from server.gate import Gate, error_response
from server.incidents_api import incidents_routes
from server.queries_api import queries_routes
from server.queue import QueueFull
from server.record_api import record_routes
from server.telemetry_api import telemetry_routes

DASHBOARD = Path(__file__).parent.parent / "dashboard"
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page(StaticFiles):
    """The dashboard's files, with headers that allow nothing from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return the file of `path`, or raise HTTPException."""
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.app.state.context.refusals.see(request.url.path, error.status)
    return error_response(error)


async def _queue_full(_: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFull)
    return error_response(error.answer())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    what = {404: f"there is no {request.url.path}", 405: f"{place} is not allowed"}
    message = what.get(error.status_code, error.detail)
    headers = {**(error.headers or {})}
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return error_response(ApiError(error.status_code, message, headers=headers))


def _methods(request: Request) -> set[str]:
    """Return what a path can be asked with, over all of its routes."""
    routes = [one for one in request.app.routes if isinstance(one, Route)]
    here = [one for one in routes if one.path_regex.match(request.url.path)]
    return {method for one in here for method in one.methods or ()}


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it: the client left while it was sending


async def _broken(_: Request, __: Exception) -> Response:
    return error_response(ApiError(500, "the server could not answer", code="internal_error"))


async def _to_page(_: Request) -> Response:
    # Relative: a proxy may have put all of this under a prefix that nobody told us of.
    return RedirectResponse("dashboard/")


def build_app(context: Context) -> Starlette:
    """Return the application; handlers find `context` in its state."""
    app = Starlette(
        routes=[
            *openai_api.ROUTES,
            *requests_api.ROUTES,
            *system_api.ROUTES,
            *session_api.ROUTES,
            *traffic_api.ROUTES,
            *openapi.ROUTES,
            *telemetry_routes,
            *record_routes,
            *queries_routes,
            *incidents_routes,
            *diff_routes,
            Route("/dashboard", _to_page, methods=["GET"], include_in_schema=False),
            Mount("/dashboard", Page(directory=DASHBOARD, html=True)),
            Route("/", _to_page, methods=["GET"], include_in_schema=False),
        ],
        middleware=[Middleware(Gate, checks=context.checks)],
        exception_handlers={
            ApiError: _api_error,
            QueueFull: _queue_full,
            HTTPException: _http_error,
            ClientDisconnect: _left,
            Exception: _broken,
        },
    )
    app.state.context = context
    return app
