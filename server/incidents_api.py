"""Recorded files over HTTP: their list, SQL and named queries on one, and one sent to look at.

Owns the routes under /telemetry/incidents; server/app.py puts `incidents_routes` in its table. A
file is named by its name in this server's folder, never by a path, and read only in the sealed
process of telemetry/case_files.py. Must never write anything that a client named.
"""

import asyncio
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from server.context import context_of
from server.errors import ApiError, invalid
from server.queries_api import bind, given
from server.sql_response import in_file, refusal
from server.telemetry_api import JSON, answer_sql, sql_request
from telemetry.answer import QueryError
from telemetry.case_files import SENT, keep_newest_sent
from telemetry.incidents import FOLDER_NAME
from telemetry.segments import SUFFIX

FILE_TYPE = "application/vnd.duckdb"
MAGIC = b"DUCK"
MAGIC_AT = 8
"""Where a DuckDB file says what it is, behind the checksum of its first block."""


async def incidents(request: Request) -> Response:
    """GET /telemetry/incidents: the recorded files of this server's folder, newest first."""
    listed = await asyncio.to_thread(_listed, context_of(request).case_files.files())
    return Response(msgspec.json.encode({"data": listed}), media_type=JSON)


async def send(request: Request) -> Response:
    """POST /telemetry/incidents: keep a recorded file that a person brings, to ask it."""
    context = context_of(request)
    folder = context.history.status().folder
    if folder is None:
        raise ApiError(503, "this server keeps no history: it has no place for a file")
    body = await request.body()  # the gate bounds it
    if body[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC:
        raise invalid(None, "the body is not a DuckDB file", code="not_a_record")
    path = await asyncio.to_thread(_keep, Path(folder), body)
    try:
        with context.case_files.submit(path.name, "SELECT count(*) FROM run") as asked:
            await asyncio.wait_for(asyncio.wrap_future(asked.future), context.case_files.patience_s)
    except (QueryError, TimeoutError) as error:
        path.unlink(missing_ok=True)
        message = str(error) or "it could not be opened in time"
        raise invalid(None, f"not taken: {message}", code="not_a_record") from error
    return Response(msgspec.json.encode({"name": path.name, "bytes": len(body)}), media_type=JSON)


async def file(request: Request) -> Response:
    """GET /telemetry/incidents/{name}: the file itself."""
    try:
        path = context_of(request).case_files.find(request.path_params["name"])
    except QueryError as error:
        return refusal(error)
    return FileResponse(path, media_type=FILE_TYPE, filename=path.name)


async def file_sql(request: Request) -> Response:
    """POST /telemetry/incidents/{name}/sql: one SELECT over a recorded file."""
    asked = await sql_request(request)
    place = in_file(context_of(request).case_files, request.path_params["name"])
    return await answer_sql(request, asked.sql, asked.parameters, asked.format, place)


async def file_query(request: Request) -> Response:
    """GET or POST /telemetry/incidents/{name}/queries/{query}: a named query over it."""
    bound = bind(request.path_params["query"], await given(request))
    place = in_file(context_of(request).case_files, request.path_params["name"])
    return await answer_sql(request, bound.sql, bound.parameters, place=place)


incidents_routes = (
    Route("/telemetry/incidents", incidents, methods=["GET"]),
    Route("/telemetry/incidents", send, methods=["POST"]),
    Route("/telemetry/incidents/{name}", file, methods=["GET"]),
    Route("/telemetry/incidents/{name}/sql", file_sql, methods=["POST"]),
    Route("/telemetry/incidents/{name}/queries/{query}", file_query, methods=["GET", "POST"]),
)


def _listed(paths: list[Path]) -> list[dict[str, object]]:
    found = []
    for path in paths:
        with suppress(FileNotFoundError):  # its time was over meanwhile
            sent = path.parent.name == SENT
            found.append({"name": path.name, "bytes": path.stat().st_size, "sent": sent})
    return found


def _keep(folder: Path, body: bytes) -> Path:
    """Write what was sent under a name of ours, and let the oldest go."""
    sent = folder / FOLDER_NAME / SENT
    try:
        sent.mkdir(parents=True, exist_ok=True)
        now = datetime.fromtimestamp(time.time_ns() / 1e9, UTC)
        path = sent / f"{now:%Y%m%dT%H%M%S.%f}-sent{SUFFIX}"
        staged = path.with_name(f".{path.name}")
        staged.write_bytes(body)
        os.replace(staged, path)
        keep_newest_sent(folder)
    except OSError as error:
        raise ApiError(503, "the disk refused the file", code="record_unavailable") from error
    return path
