"""Signing in at the page: a key once, then a cookie that the browser sends and no script can read.

Owns the handlers of /session; server/app.py puts them in its table. The login page's own files
stand in dashboard/login/. A session is opened by a key, so that a forged request gains nothing
(server/gate.py turns away those of other sites' pages anyway). Must never answer with a key.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.config import ServerConfig
from server.context import context_of
from server.errors import ApiError, invalid
from server.keys import Caller
from server.openai_api import answer
from server.origins import is_loopback
from server.sessions import set_cookie, token_in

NO_STORE = {"cache-control": "no-store"}
BODY_BYTES_MAX = 4096


class SignIn(msgspec.Struct, frozen=True):
    """The body of POST /session."""

    key: str


async def session(request: Request) -> Response:
    """Answer GET /session: is a key needed here, is this browser signed in, what may the page do.

    `try_it` is "on" or "off", or "loopback": for a page that came from this machine alone.
    """
    context = context_of(request)
    caller = _caller(request)
    content = {
        "key_needed": context.checks.keys is not None,
        "signed_in": caller is not None,
        "name": caller.name if caller else None,
        "try_it": try_it(context.config),
    }
    return answer(content, NO_STORE)


def try_it(config: ServerConfig) -> str:
    """Return "on", "off" or "loopback": whoever serves others says first that pages may send.

    A proxy on this machine speaks to us by loopback for everybody, so the page looks at its own
    address too. This keeps a page from tempting people; who may generate is the keys' affair.
    """
    if config.try_it is not None:
        return "on" if config.try_it else "off"
    return "loopback" if is_loopback(config.host) else "off"


async def sign_in(request: Request) -> Response:
    """Answer POST /session: open one for the key in the body."""
    checks = context_of(request).checks
    if checks.keys is None:
        raise ApiError(404, "this server needs no key", code="no_keys")
    try:
        asked = msgspec.json.decode(await _short_body(request), type=SignIn)
    except msgspec.DecodeError:
        # The decoder's own words may quote what was sent, and that may be a key.
        raise invalid("key", 'the body must be {"key": "..."}') from None
    caller = checks.keys.caller_of(asked.key.encode())
    if caller is None:
        raise ApiError(401, "this key is not known here", code="invalid_api_key")
    if caller.tenant is not None:
        raise ApiError(403, "this key may generate, and no more", code="not_allowed")
    cookie = set_cookie(checks.sessions.open(caller), _port(request), secure=_is_secure(request))
    return answer({"signed_in": True, "name": caller.name}, NO_STORE | {"set-cookie": cookie})


async def sign_out(request: Request) -> Response:
    """Answer DELETE /session: end it here and in the browser."""
    token = token_in(request.headers.get("cookie", "").encode("latin-1"), _port(request))
    if token is not None:
        context_of(request).checks.sessions.close(token)
    cookie = set_cookie("", _port(request), secure=_is_secure(request))
    return answer({"signed_in": False}, NO_STORE | {"set-cookie": cookie})


def _caller(request: Request) -> Caller | None:
    token = token_in(request.headers.get("cookie", "").encode("latin-1"), _port(request))
    return context_of(request).checks.sessions.find(token) if token is not None else None


async def _short_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise ApiError(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _port(request: Request) -> int | None:
    place = request.scope.get("server")
    return place[1] if place else None


def _is_secure(request: Request) -> bool:
    """Tell whether the browser speaks TLS, to us or to a proxy that says so."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))


ROUTES = (
    Route("/session", session, methods=["GET"]),
    Route("/session", sign_in, methods=["POST"]),
    Route("/session", sign_out, methods=["DELETE"]),
)
