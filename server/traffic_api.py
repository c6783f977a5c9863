"""The page's traffic generator over HTTP: what is due is asked for, told about, and stopped.

Owns the handlers of /traffic; server/app.py puts them in its table. The page keeps the schedule
(rate, lengths, bursts) and says what is due; an answer never waits for what it asked. Does nothing
where the page may send no prompts (--try-it).
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.context import context_of
from server.errors import ApiError, invalid
from server.openai_api import answer
from server.session_api import try_it
from server.telemetry_api import read_body

AT_ONCE_MAX = 256


class Due(msgspec.Struct, frozen=True):
    """The body of POST /traffic: completions to be asked now."""

    requests: list[dict[str, Any]]


async def traffic(request: Request) -> Response:
    """Answer GET /traffic: what the generator has in flight and how its requests were answered."""
    return answer(context_of(request).traffic.state())


async def send_traffic(request: Request) -> Response:
    """Answer POST /traffic: ask for these completions now, and wait for none of them."""
    context = context_of(request)
    if try_it(context.config) == "off":
        message = "this server sends no traffic of its own (see --try-it)"
        raise ApiError(403, message, code="not_allowed")
    try:
        due = msgspec.json.decode(await read_body(request), type=Due)
    except msgspec.DecodeError as error:
        raise invalid("requests", f'the body must be {{"requests": [...]}}: {error}') from error
    if len(due.requests) > AT_ONCE_MAX:
        raise invalid("requests", f"at most {AT_ONCE_MAX} requests at once")
    context.traffic.ask(request.app, request.scope, due.requests)
    return answer(context.traffic.state())


async def stop_traffic(request: Request) -> Response:
    """Answer DELETE /traffic: what the generator has in flight is cancelled."""
    context_of(request).traffic.stop()
    return answer(context_of(request).traffic.state())


ROUTES = (
    Route("/traffic", traffic, methods=["GET"]),
    Route("/traffic", send_traffic, methods=["POST"]),
    Route("/traffic", stop_traffic, methods=["DELETE"]),
)
