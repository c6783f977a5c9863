"""The flight recorder over HTTP: a range of the record as one file, made and sent.

Owns POST /telemetry/record; server/app.py puts `record_routes` in its table, and incidents_api.py
answers from what was recorded. A client says which range and why, never where: the server names the
file, in its own folder of incidents. Must never make a file on the event loop.
"""

import asyncio
import time

import duckdb
import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from server.context import context_of
from server.errors import ApiError, invalid
from server.telemetry_api import read_body
from telemetry.database import HistoryUnavailable
from telemetry.incidents import Note
from telemetry.recorder import RecorderBusy
from telemetry.segments import Stopped
from telemetry.spans import BadRange, range_of

DETAIL_CHARACTERS_MAX = 500
FILE_TYPE = "application/vnd.duckdb"


class RecordRequest(msgspec.Struct, frozen=True, rename={"since": "from", "until": "to"}):
    """The body of POST /telemetry/record: `last` such as 5m, or instants; and why."""

    last: str | None = None
    since: str | None = None
    until: str | None = None
    run_id: str | None = None
    detail: str = ""


async def record(request: Request) -> Response:
    """POST /telemetry/record: copy a range, the newest records included, and send the file."""
    try:
        body = msgspec.json.decode(await read_body(request) or b"{}", type=RecordRequest)
    except msgspec.DecodeError as error:
        raise invalid("last", f'the body must be such as {{"last": "5m"}}: {error}') from error
    note = Note(
        reason="asked",
        detail=body.detail[:DETAIL_CHARACTERS_MAX],
        made_unix_us=time.time_ns() // 1000,
    )
    recorder = context_of(request).recorder
    try:
        asked = range_of(last=body.last, since=body.since, until=body.until, run_id=body.run_id)
        path = await asyncio.wrap_future(recorder.record(asked, note))
    except BadRange as error:
        raise invalid("last", str(error)) from error
    except RecorderBusy as error:
        message = "another recording is being made"
        headers = {"Retry-After": "5"}
        raise ApiError(503, message, code="recorder_busy", headers=headers) from error
    except (HistoryUnavailable, Stopped, OSError, duckdb.Error) as error:
        why = "the disk refused it" if isinstance(error, OSError) else str(error)
        raise ApiError(503, f"nothing was recorded: {why}", code="record_unavailable") from error
    return FileResponse(path, media_type=FILE_TYPE, filename=path.name)


record_routes = (Route("/telemetry/record", record, methods=["POST"]),)
