"""The web application: one table of routes, one gate before it, one shape for errors.

Owns the table, the API key, the limit on bodies, the page's security headers and the handlers of
what goes wrong; server/life.py runs it. Must never compress (a token would wait for its block) and
never let an exception's text out: clients get a sentence, the log gets the trace.
"""

import hmac
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import openai_api, requests_api, system_api
from server.config import ServerConfig
from server.context import Context
from server.errors import ApiError
from server.queries_api import queries_routes
from server.telemetry_api import telemetry_routes

OPEN_PATHS = frozenset({"/health", "/ready"})
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


class Gate:
    """Checks the API key and the size of the body before anything else looks at a request."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._key = config.api_key.encode() if config.api_key else None
        self._bytes_max = config.body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 413 without reading it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if self._key and scope["path"] not in OPEN_PATHS and not self._holds_key(headers):
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await error_response(error)(scope, receive, send)
        elif not length.isdigit() or int(length) > self._bytes_max:
            await error_response(self._too_large())(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _holds_key(self, headers: dict[bytes, bytes]) -> bool:
        assert self._key is not None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._bytes_max} bytes"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})

    def _counted(self, receive: Receive) -> Receive:
        """Return `receive` with a count: a body without a stated length may be endless."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._bytes_max:
                raise self._too_large()
            return message

        return counted


def error_response(error: ApiError) -> Response:
    """Return the response of an error."""
    return Response(
        error.body(), error.status, media_type="application/json", headers=dict(error.headers)
    )


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    what = {404: f"there is no {request.url.path}", 405: f"{place} is not allowed"}
    message = what.get(error.status_code, error.detail)
    headers = {**(error.headers or {})}
    return error_response(ApiError(error.status_code, message, headers=headers))


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it: the client left while it was sending


async def _broken(_: Request, __: Exception) -> Response:
    return error_response(ApiError(500, "the server could not answer", code="internal_error"))


async def _root(_: Request) -> Response:
    return RedirectResponse("/dashboard/")


def build_app(context: Context) -> Starlette:
    """Return the application; handlers find `context` in its state."""
    app = Starlette(
        routes=[
            *openai_api.ROUTES,
            *requests_api.ROUTES,
            *system_api.ROUTES,
            *telemetry_routes,
            *queries_routes,
            Mount("/dashboard", Page(directory=DASHBOARD, html=True)),
            Route("/", _root, methods=["GET"]),
        ],
        middleware=[Middleware(Gate, config=context.config)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _left,
            Exception: _broken,
        },
    )
    app.state.context = context
    return app
