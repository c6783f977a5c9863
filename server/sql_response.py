"""The answer to one SELECT over HTTP: waited for, written in pieces, or an error with its place.

Owns the watch over a client while its query waits or runs (who leaves ends it), the pace of writing
to a slow one, and which status each failure has; server/telemetry_api.py returns it as a response.
Must never run SQL, and never hold an answer for a client that takes nothing.
"""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from telemetry.answer import Format, QueryError
from telemetry.history import History
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


class SqlResponse(Response):
    """Answers one SELECT; nobody can be asked in the client's place once it has left."""

    def __init__(self, history: History, question: SqlQuestion, *, client_stall_s: float) -> None:
        super().__init__()
        self._history = history
        self._question = question
        self._client_stall_s = client_stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer, or raise ApiError before the first byte."""
        question, history = self._question, self._history
        try:
            with history.queries.submit(
                question.sql,
                question.parameters,
                before=lambda: history.flush(FLUSH_S),
                format=question.format,
            ) as asked:
                answered = await self._answered(receive, asked.future)
                if answered is not None:
                    await self._write(send, answered)
        except QueryError as error:
            await _refusal(error)(scope, receive, send)

    async def _answered(self, receive: Receive, future: "Future[Answered]") -> Answered | None:
        """Wait for the answer; None when the client left before."""
        answer = asyncio.wrap_future(future)
        leaving = asyncio.create_task(_left(receive))
        try:
            done, _ = await asyncio.wait(
                (answer, leaving),
                timeout=self._history.queries.patience_s,
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


def _refusal(error: QueryError) -> Response:
    """Return the error in OpenAI's shape; a 400 says where in the query the fault is."""
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
    return Response(content, 408 if late else 400, media_type="application/json")
