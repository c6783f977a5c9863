"""Telemetry over HTTP: the live stream, SQL on the history, and the schema of both.

Owns the routes under /telemetry/ and the reading of their parameters; server/app.py puts
`telemetry_routes` in its table. Answers errors in OpenAI's shape. Must never run a query on the
event loop, and never let a parameter choose anything but what to read.
"""

import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.context import context_of
from server.errors import ApiError, invalid
from server.sql_response import SqlPlace, SqlQuestion, SqlResponse, in_history
from server.telemetry_stream import StreamRequest, TelemetryStream
from telemetry.answer import Format
from telemetry.records import KINDS
from telemetry.schema import describe

HZ_DEFAULT, HZ_MIN, HZ_MAX = 15.0, 1.0, 60.0
SQL_BODY_BYTES_MAX = 2**20
PAST_DIGITS = 9
JSON = "application/json"

Scalar = str | int | float | bool | None


class SqlRequest(msgspec.Struct, frozen=True):
    """The body of POST /telemetry/sql."""

    sql: str
    parameters: list[Scalar] = []
    format: Format | None = None


async def stream(request: Request) -> TelemetryStream:
    """GET /telemetry/stream: the record as it happens."""
    context = context_of(request)
    config = context.config
    query = request.query_params
    place = request.headers.get("last-event-id") or query.get("last_event_id") or None
    asked = StreamRequest(
        place=place,
        past=_past(query.get("past", "0")),
        kinds=_kinds(query.get("kinds")),
        hz=_hz(query.get("hz", str(HZ_DEFAULT))),
    )
    return TelemetryStream(
        context.bus,
        asked,
        readers_max=config.telemetry.stream_readers_max,
        client_stall_s=config.client_stall_s,
    )


async def sql(request: Request) -> Response:
    """POST /telemetry/sql: one SELECT over the history, everything published so far included."""
    asked = await sql_request(request)
    return await answer_sql(request, asked.sql, asked.parameters, asked.format)


async def answer_sql(
    request: Request,
    text: str,
    parameters: list[Scalar],
    format: Format | None = None,
    place: SqlPlace | None = None,
) -> Response:
    """Answer one SELECT, a client's or a named one, from all that is published or from `place`."""
    context = context_of(request)
    wanted = format or ("csv" if _prefers_csv(request.headers.get("accept", "")) else "json")
    return SqlResponse(
        place or in_history(context.history),
        SqlQuestion(sql=text, parameters=parameters, format=wanted),
        client_stall_s=context.config.client_stall_s,
    )


async def schema(request: Request) -> Response:
    """GET /telemetry/schema: tables, views and event bodies, with meanings and units."""
    body = {"run_id": context_of(request).bus.run_id, **describe()}
    return Response(msgspec.json.encode(body), media_type=JSON)


telemetry_routes = (
    Route("/telemetry/stream", stream, methods=["GET"]),
    Route("/telemetry/sql", sql, methods=["POST"]),
    Route("/telemetry/schema", schema, methods=["GET"]),
)


def _kinds(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not kinds or not kinds <= KINDS.keys():
        raise invalid("kinds", f"kinds must be some of {', '.join(KINDS)}")
    return kinds


def _past(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= PAST_DIGITS):
        raise invalid("past", "past must be a number of records, from 0")
    return int(text)


def _hz(text: str) -> float:
    try:
        hz = float(text)
    except ValueError:
        hz = math.nan
    if math.isnan(hz):
        raise invalid("hz", "hz must be a number")
    return min(HZ_MAX, max(HZ_MIN, hz))


async def sql_request(request: Request) -> SqlRequest:
    """Return the body of a query, checked; raises ApiError."""
    try:
        return msgspec.json.decode(await read_body(request), type=SqlRequest)
    except msgspec.DecodeError as error:
        raise invalid("sql", f'the body must be {{"sql": "...", "parameters": []}}: {error}') from (
            error
        )


async def read_body(request: Request) -> bytes:
    """Return the body of a query; raises ApiError 413 before more than its limit was read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > SQL_BODY_BYTES_MAX:
            raise ApiError(413, f"the body is over {SQL_BODY_BYTES_MAX} bytes")
    return bytes(body)


def _prefers_csv(accept: str) -> bool:
    """Tell whether a client names CSV, and JSON not before it."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return "text/csv" in kinds and JSON not in kinds[: kinds.index("text/csv")]
