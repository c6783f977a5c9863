"""Two runs or windows compared over HTTP: POST /telemetry/diff.

Owns the route and the reading of its body; server/app.py puts `diff_routes` in its table, and
server/comparisons.py does the work on a thread. Must never compare on the event loop, nor go on
with a comparison whose client has left.
"""

import asyncio
import threading

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.comparisons import Comparison, Named
from server.context import context_of
from server.errors import invalid
from server.sql_response import refusal
from server.telemetry_api import JSON, read_body
from telemetry.answer import QueryError
from telemetry.spans import BadRange

LOOK_S = 0.5
SIDE_CHARACTERS_MAX = 200


class DiffRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /telemetry/diff: each side a window, a run, or a recorded file."""

    a: str | None = None
    b: str | None = None
    a_file: str | None = None
    b_file: str | None = None


async def diff(request: Request) -> Response:
    """POST /telemetry/diff: what changed from A to B, beyond chance."""
    try:
        body = msgspec.json.decode(await read_body(request), type=DiffRequest)
    except msgspec.DecodeError as error:
        message = f'the body must be such as {{"a": "previous", "b": "last"}}: {error}'
        raise invalid(None, message) from error
    a = _side("a", body.a, body.a_file)
    b = _side("b", body.b, body.b_file)
    given_up = threading.Event()
    comparing = asyncio.create_task(
        asyncio.to_thread(context_of(request).comparisons.compare, a, b, given_up)
    )
    try:
        found = await _unless_left(request, comparing, given_up)
    except BadRange as error:
        raise invalid(str(error)[0].lower(), str(error), code="bad_range") from error
    except TimeoutError as error:
        raise invalid("a", "the queries of this comparison waited too long") from error
    except QueryError as error:
        return refusal(error)
    return Response(msgspec.json.encode(found), media_type=JSON)


diff_routes = (Route("/telemetry/diff", diff, methods=["POST"]),)


def _side(name: str, text: str | None, file: str | None) -> Named:
    if not text and not file:
        what = "a window such as 15m/10m, a run_id, `last` or `previous`"
        raise invalid(name, f"{name} must be {what}, or {name}_file a recorded file")
    if len(text or "") > SIDE_CHARACTERS_MAX:
        raise invalid(name, f"{name} has at most {SIDE_CHARACTERS_MAX} characters")
    return Named(text=text or None, file=file or None)


async def _unless_left(
    request: Request, comparing: "asyncio.Task[Comparison]", given_up: threading.Event
) -> Comparison:
    """Wait; once the client has left, the comparison ends before its next query."""
    try:
        while not comparing.done():
            await asyncio.wait((comparing,), timeout=LOOK_S)
            if await request.is_disconnected():
                given_up.set()
        return comparing.result()
    finally:
        given_up.set()
