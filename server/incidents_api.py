"""Recorded files over HTTP: their list, SQL and named queries on one, and one sent to look at.

Owns the routes under /telemetry/incidents; server/app.py puts `incidents_routes` in its table. A
file is named by its name in this server's folder, never by a path, and read only in the sealed
process of telemetry/case_files.py. Must never write anything that a client named.
"""

import asyncio
import os
import shutil
import struct
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

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
from telemetry.query_lane import QueriesBusy, QueryUnavailable
from telemetry.segments import SUFFIX

FILE_TYPE = "application/vnd.duckdb"
MAGIC = b"DUCK"
MAGIC_AT = 8
"""Where a DuckDB file says what it is, behind the checksum of its first block."""
HEAD_BYTES = MAGIC_AT + len(MAGIC)
HEADERS_AT = (4096, 8192)
"""Headers that DuckDB writes in turn: checksum, iteration, two places, blocks, bytes of each."""
BLOCKS_AT = 12288
SPARE_BYTES = 256 * 2**20
"""What a file that is sent leaves free on the disk: the history goes on."""


async def incidents(request: Request) -> Response:
    """GET /telemetry/incidents: the recorded files of this server's folder, newest first."""
    context = context_of(request)
    listed = await asyncio.to_thread(_listed, context.case_files.files())
    body = {"data": listed, "bytes_max": context.config.file_bytes_max}
    return Response(msgspec.json.encode(body), media_type=JSON)


async def send(request: Request) -> Response:
    """POST /telemetry/incidents: keep a recorded file that a person brings, to ask it."""
    files = context_of(request).case_files
    try:
        with files.place() as folder:
            path, size = await _take(request, folder)
            try:
                with files.submit(path.name, "SELECT count(*) FROM run") as asked:
                    await asyncio.wait_for(asyncio.wrap_future(asked.future), files.patience_s)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except (QueriesBusy, QueryUnavailable) as error:
        return refusal(error)
    except (QueryError, TimeoutError) as error:
        message = str(error) or "it could not be opened in time"
        raise invalid(None, f"not taken: {message}", code="not_a_record") from error
    return Response(msgspec.json.encode({"name": path.name, "bytes": size}), media_type=JSON)


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


async def _take(request: Request, folder: Path) -> tuple[Path, int]:
    """Write what comes under a name of ours, part by part; return its path and its bytes."""
    sent = folder / FOLDER_NAME / SENT
    now = datetime.fromtimestamp(time.time_ns() / 1e9, UTC)
    path = sent / f"{now:%Y%m%dT%H%M%S.%f}-sent{SUFFIX}"
    staged = path.with_name(f".{path.name}")
    head, size = b"", 0
    try:
        out = await asyncio.to_thread(_open, staged, int(request.headers.get("content-length", 0)))
        with out:
            async for part in request.stream():  # the gate bounds them all
                if size < HEAD_BYTES:
                    head += part[: HEAD_BYTES - size]
                    _check_head(head, whole=False)
                size += len(part)
                await asyncio.to_thread(out.write, part)
        _check_head(head, whole=True)
        await asyncio.to_thread(_check_length, staged, size)
        await asyncio.to_thread(_settle, staged, path, folder)
    except OSError as error:
        raise ApiError(503, "the disk refused the file", code="record_unavailable") from error
    finally:
        await asyncio.to_thread(staged.unlink, missing_ok=True)
    return path, size


def _open(staged: Path, announced_bytes: int) -> BinaryIO:
    staged.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(staged.parent).free
    if free_bytes < announced_bytes + SPARE_BYTES:
        message = "the disk has no room for the file beside the history"
        raise ApiError(503, message, code="record_unavailable")
    return staged.open("wb")


def _check_head(head: bytes, *, whole: bool) -> None:
    """Refuse what is no DuckDB file, as soon as its head tells."""
    if len(head) < HEAD_BYTES and not whole:
        return
    if head[MAGIC_AT:] != MAGIC:
        raise invalid(None, "not taken: it is not a DuckDB file", code="not_a_record")


def _check_length(staged: Path, size: int) -> None:
    """Refuse a file that was cut on its way: it would open, and fail in the midst of a query."""
    with staged.open("rb") as file:
        newest, blocks, block_bytes = -1, 0, 0
        for at in HEADERS_AT:
            file.seek(at)
            found = file.read(48)
            if len(found) == 48:
                _, iteration, _, _, *length = struct.unpack("<6Q", found)
                if iteration > newest:
                    newest, (blocks, block_bytes) = iteration, length
    if newest < 0 or size < BLOCKS_AT + blocks * block_bytes:
        raise invalid(None, "not taken: the file is cut short", code="not_a_record")


def _settle(staged: Path, path: Path, folder: Path) -> None:
    os.replace(staged, path)
    keep_newest_sent(folder)
