"""The gate before every request: who asks, from which page, by which name, with how much.

Owns the order of the checks and the answers of those that fail; server/app.py puts it before its
routes. Knows keys, sessions, origins and bodies, and asks each. Must never read a body itself, and
costs a plain request some microseconds.
"""

import posixpath
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.bodies import Bodies, Body
from server.config import ServerConfig
from server.errors import ApiError
from server.keys import Caller, KeyRing
from server.origins import Origins, origins_of
from server.queue import Queue
from server.sessions import Sessions, token_in

CALLER = "iterscope.caller"
OPEN_PATHS = frozenset({"/health", "/ready", "/session"})
LOGIN = "/dashboard/login/"
OPEN_FOLDER = "/dashboard/login"
TENANT_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
        "/openapi.json",
    }
)
"""What a key with a tenant opens; the rest tells of other tenants' requests, if not their text."""

FILES = "/telemetry/incidents"
"""Where a POST brings a file, which goes to the disk as it comes."""

SINGLE = frozenset({b"host", b"origin", b"authorization", b"sec-fetch-site", b"x-tenant"})
"""Headers that decide something: of two, a proxy may have looked at the other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What the gate asks; `keys` None lets everybody in."""

    keys: KeyRing | None
    sessions: Sessions
    origins: Origins
    bodies: Bodies


def checks_of(config: ServerConfig, keys: KeyRing | None, queue: Queue) -> Checks:
    """Return the checks that the configuration asks for."""
    return Checks(
        keys=keys,
        sessions=Sessions(time.monotonic),
        origins=origins_of(config),
        bodies=Bodies(
            each_max=config.body_bytes_max,
            file_max=config.file_bytes_max,
            all_max=config.max_inflight_bytes,
            queue=queue,
        ),
    )


class Gate:
    """Passes a request on, with its caller in scope["state"], or answers why not."""

    def __init__(self, app: ASGIApp, checks: Checks) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then let the application answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        twice = len(headers) < len(scope["headers"]) and _twice(scope["headers"])
        if b"origin" in headers and not twice:
            send = _with_headers(send, self._checks.origins.cors(headers))
        refusal = error_response(twice) if twice else self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        file = _is_file(scope["method"], scope["path"])
        body = Body(self._checks.bodies, receive, file=file)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        """Return the answer to a request that goes no further, None for one that does."""
        checks, method, path = self._checks, scope["method"], scope["path"]
        port = scope["server"][1] if scope.get("server") else None
        bearer = headers.get(b"authorization")
        token = token_in(headers.get(b"cookie", b""), port) if bearer is None else None
        by_cookie = checks.keys is not None and token is not None
        error = checks.origins.refusal(method, headers, by_cookie=by_cookie)
        if error is not None:
            return error_response(error)
        if method == "OPTIONS" and b"access-control-request-method" in headers:
            return _preflight(checks.origins.preflight(headers))
        if checks.keys is not None and not _is_open(path):
            caller = _holder(checks.keys, bearer) if bearer is not None else None
            if token is not None:
                caller = checks.sessions.find(token)
            if caller is None:
                return _nobody(method, headers, path)
            if caller.tenant is not None and not _may_generate(method, path):
                message = "this key may generate, and no more"
                return error_response(ApiError(403, message, code="not_allowed"))
            scope.setdefault("state", {})[CALLER] = caller
        length = headers.get(b"content-length")
        if length is not None:
            try:
                checks.bodies.check_length(length, file=_is_file(method, path))
            except ApiError as too_large:
                return error_response(too_large)
        return None


def caller_in(scope: Scope) -> Caller | None:
    """Return who holds the key of a request, None where no key is needed."""
    caller: Caller | None = scope.get("state", {}).get(CALLER)
    return caller


def error_response(error: ApiError) -> Response:
    """Return the response of an error."""
    return Response(
        error.body(), error.status, media_type="application/json", headers=dict(error.headers)
    )


def _twice(headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
    """Return the refusal of a request in which a header that decides stands twice."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in SINGLE:
            if name in seen:
                shown = name.decode()
                return ApiError(400, f"the header {shown} stands twice", code="header_twice")
            seen.add(name)
    return None


def _is_file(method: str, path: str) -> bool:
    return method == "POST" and path == FILES


def _is_open(path: str) -> bool:
    if path in OPEN_PATHS or path == OPEN_FOLDER:
        return True
    name = path.removeprefix(LOGIN)
    return name != path and "/" not in name and name != ".."


def _holder(keys: KeyRing, authorization: bytes) -> Caller | None:
    scheme, _, key = authorization.partition(b" ")
    return keys.caller_of(key.strip()) if scheme.lower() == b"bearer" else None


def _may_generate(method: str, path: str) -> bool:
    """Tell whether a path is for keys with a tenant; a request is cancelled by its owner alone."""
    if path in TENANT_PATHS or path.startswith("/v1/models/"):
        return True
    return method == "DELETE" and path.startswith("/v1/requests/")


def _nobody(method: str, headers: Mapping[bytes, bytes], path: str) -> Response:
    """Return the answer to one without a key: people at a browser are led to the login page."""
    reads = method == "GET" and b"text/html" in headers.get(b"accept", b"")
    if reads and (path == "/" or path.startswith("/dashboard")):
        # Relative: a proxy may have put all of this under a prefix that nobody told us of.
        login = posixpath.relpath(LOGIN, posixpath.dirname(path))
        return RedirectResponse(login + "/?from=page", status_code=303)
    challenge = {"WWW-Authenticate": "Bearer"}
    message = "the API key is missing or wrong"
    return error_response(ApiError(401, message, code="invalid_api_key", headers=challenge))


def _preflight(headers: list[tuple[bytes, bytes]]) -> Response:
    response = Response(status_code=204)
    response.raw_headers += headers
    return response


def _with_headers(send: Send, added: list[tuple[bytes, bytes]]) -> Send:
    """Return `send` that adds headers to an answer's head; itself when there are none to add."""
    if not added:
        return send

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {name for name, _ in message.get("headers", ())}
            more = [(name, value) for name, value in added if name not in known]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending
