"""The answer to one SELECT over HTTP: waited for, written in pieces, or an error with its place.

Owns the watch over a client while its query waits or runs (who leaves ends it), the pace of writing
to a slow one, and which status each failure has; server/telemetry_api.py returns it as a response.
Must never run SQL, and never hold an answer for a client that takes nothing.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from telemetry.answer import Format, QueryError
from telemetry.case_files import CaseFiles, NoSuchFile
from telemetry.history import History
from telemetry.queries import Asked
from telemetry.query_lane import QueriesBusy, QueryUnavailable
from telemetry.sandbox import DeadlinePassed, QueryBroken
from telemetry.wire import Answered, Parameters

FLUSH_S = 1.0
PIECE_BYTES = 256 * 1024
RETRY_AFTER_S = 1
TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8; header=present"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlQuestion:
    """What a client wants to know, and how it wants to read it."""

    sql: str
    parameters: Parameters
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlPlace:
    """Who answers: `submit` takes the question, and an answer may take `patience_s`."""

    submit: Callable[[SqlQuestion], Asked]
    patience_s: float


def in_history(history: History) -> SqlPlace:
    """Return the server's own record, everything published so far included."""

    def submit(asked: SqlQuestion) -> Asked:
        return history.queries.submit(
            asked.sql,
            asked.parameters,
            before=lambda: history.flush(FLUSH_S),
            format=asked.format,
        )

    return SqlPlace(submit=submit, patience_s=history.queries.patience_s)


def in_file(files: CaseFiles, name: str) -> SqlPlace:
    """Return a recorded file by its name."""

    def submit(asked: SqlQuestion) -> Asked:
        return files.submit(name, asked.sql, asked.parameters, format=asked.format)

    return SqlPlace(submit=submit, patience_s=files.patience_s)


class SqlResponse(Response):
    """Answers one SELECT; nobody can be asked in the client's place once it has left."""

    def __init__(self, place: SqlPlace, question: SqlQuestion, *, client_stall_s: float) -> None:
        super().__init__()
        self._place = place
        self._question = question
        self._client_stall_s = client_stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer, or raise ApiError before the first byte."""
        try:
            with self._place.submit(self._question) as asked:
                answered = await self._answered(receive, asked.future)
                if answered is not None:
                    await self._write(send, answered)
        except QueryError as error:
            await refusal(error)(scope, receive, send)

    async def _answered(self, receive: Receive, future: "Future[Answered]") -> Answered | None:
        """Wait for the answer; None when the client left before."""
        answer = asyncio.wrap_future(future)
        leaving = asyncio.create_task(_left(receive))
        try:
            done, _ = await asyncio.wait(
                (answer, leaving),
                timeout=self._place.patience_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer in done:
                return answer.result()
            if leaving in done:
                return None
            raise QueriesBusy("too many queries at once: this one waited too long")
        finally:
            answer.cancel()
            leaving.cancel()

    async def _write(self, send: Send, answered: Answered) -> None:
        content = answered.content
        headers = {
            "content-type": TYPES[self._question.format],
            "content-length": str(len(content)),
            "x-iterscope-row-count": str(answered.row_count),
            "x-iterscope-truncated": "true" if answered.truncated else "false",
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            for start in range(0, len(content), PIECE_BYTES):
                end = start + PIECE_BYTES
                piece = {"body": content[start:end], "more_body": end < len(content)}
                async with asyncio.timeout(self._client_stall_s):
                    await send({"type": "http.response.body", **piece})
        except TimeoutError:
            return  # uvicorn closes what is not whole


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(error: QueryError) -> Response:
    """Return the error in OpenAI's shape; a 400 says where in the query the fault is."""
    if isinstance(error, NoSuchFile):
        raise ApiError(404, error.message, code="no_such_file") from error
    if isinstance(error, QueriesBusy):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ApiError(429, error.message, code="sql_busy", headers=headers) from error
    if isinstance(error, QueryUnavailable):
        raise ApiError(503, error.message, code="sql_unavailable") from error
    if isinstance(error, QueryBroken):
        raise ApiError(500, error.message, code="sql_broken") from error
    late = isinstance(error, DeadlinePassed)
    body = {
        "message": error.message,
        "type": "invalid_request_error",
        "param": "sql",
        "code": "sql_deadline" if late else "sql_error",
        "position": error.position,
    }
    content = msgspec.json.encode({"error": body})
    # Not 408: a browser takes that for a connection that timed out, and sends the query once more.
    return Response(content, 400, media_type="application/json")
