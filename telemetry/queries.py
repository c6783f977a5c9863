"""SQL for people: exactly one SELECT, read-only, bounded in rows, bytes and time, strict JSON out.

Owns the checks on the statement, the deadline, and the turning of DuckDB's values into JSON. Called
by server/telemetry_api.py on the live history and by `iterscope sql` on a file. Must never write,
open a file, or let an error carry a path; and must never be run on the event loop: it blocks.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

import duckdb
import msgspec

ROWS_A_FETCH = 1000
BYTES_MAX = 32 * 2**20
SQL_CHARACTERS_MAX = 100_000
AT_ONCE = 2
WAITING_MAX = 32
INTERRUPT_PERIOD_S = 0.05

_PATH = re.compile(r"(?<![\w/])~?(?:/[\w.+@-]+){2,}/?|(?<=[\"'])/[^\"']*(?=[\"'])")
_POSITION = re.compile(r"\n\nLINE (\d+): (.*)\n( *)\^")


class QueryError(Exception):
    """The query cannot be answered: one line, and the place in its text where that is known."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position


class QueryUnavailable(QueryError):
    """No query can be answered now: there is no history, or too much is asked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """An answer; `columns` are {"name", "type"}, `rows` hold nothing that JSON cannot."""

    columns: list[dict[str, str]]
    rows: list[list[Any]]
    truncated: bool
    elapsed_ms: float

    def json(self) -> bytes:
        """Return the body of the HTTP answer."""
        return msgspec.json.encode(
            {
                "columns": self.columns,
                "rows": self.rows,
                "row_count": len(self.rows),
                "truncated": self.truncated,
                "elapsed_ms": self.elapsed_ms,
            }
        )


class QueryRunner:
    """Answers queries on cursors that `connect` opens: at once with `run`, in turn with `submit`.

    `submit` runs two at a time on threads of its own, so that slow queries hold no other work up.
    """

    def __init__(
        self,
        connect: Callable[[], duckdb.DuckDBPyConnection],
        *,
        rows_max: int,
        deadline_s: float,
    ) -> None:
        self._connect = connect
        self._rows_max = rows_max
        self._deadline_s = deadline_s
        self._waiting = threading.BoundedSemaphore(WAITING_MAX)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="query")

    def submit(
        self, sql: str, parameters: Sequence[object], before: Callable[[], object]
    ) -> Future[QueryResult]:
        """Answer one SELECT in its turn, after calling `before` on the query's thread.

        Raises QueryUnavailable at once when too many wait already.
        """
        if not self._waiting.acquire(blocking=False):
            raise QueryUnavailable("too many queries at once")

        def answer() -> QueryResult:
            before()
            return self.run(sql, parameters)

        future = self._threads.submit(answer)
        future.add_done_callback(lambda _: self._waiting.release())
        return future

    def run(self, sql: str, parameters: Sequence[object] = ()) -> QueryResult:
        """Answer one SELECT on the calling thread, within the deadline; raises QueryError."""
        if len(sql) > SQL_CHARACTERS_MAX:
            raise QueryError(f"a query has at most {SQL_CHARACTERS_MAX} characters")
        cursor = self._connect()
        try:
            with _interrupted_after(cursor, self._deadline_s) as expired:
                return self._answer(cursor, sql, parameters)
        except duckdb.Error as error:
            if expired.is_set():
                late = f"stopped at its deadline of {self._deadline_s:g} s"
                raise QueryError(late) from error
            raise _explained(error, sql) from error
        finally:
            cursor.close()

    def close(self) -> None:
        """Start no query any more; one that runs goes on to its deadline at most."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answer(
        self,
        cursor: duckdb.DuckDBPyConnection,
        sql: str,
        parameters: Sequence[object],
    ) -> QueryResult:
        started = time.monotonic()
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError("a query is exactly one SELECT")
        # A DELETE or a COPY may hide inside a WITH and still be a SELECT to the parser; the
        # read-only transaction and the locked configuration refuse it when it runs.
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        try:
            cursor.execute(statements[0], list(parameters))
            columns = [{"name": str(c[0]), "type": str(c[1])} for c in cursor.description or ()]
            rows, truncated = self._fetch(cursor)
        finally:
            cursor.execute("ROLLBACK")
        elapsed_ms = round((time.monotonic() - started) * 1000, 3)
        return QueryResult(columns=columns, rows=rows, truncated=truncated, elapsed_ms=elapsed_ms)

    def _fetch(self, cursor: duckdb.DuckDBPyConnection) -> tuple[list[list[Any]], bool]:
        rows: list[list[Any]] = []
        size = 0
        while chunk := cursor.fetchmany(min(ROWS_A_FETCH, self._rows_max + 1 - len(rows))):
            plain_rows = [[plain(value) for value in row] for row in chunk]
            size += len(msgspec.json.encode(plain_rows))
            if size > BYTES_MAX:
                return rows, True
            rows += plain_rows
            if len(rows) > self._rows_max:
                return rows[: self._rows_max], True
        return rows, False


def plain(value: object) -> Any:
    """Return what JSON can hold: NaN and infinity as null, instants as ISO text, blobs as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value
    if isinstance(value, float | Decimal):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, datetime | date | time_of_day):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", errors="backslashreplace")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return str(value)


def without_paths(message: str) -> str:
    """Return a message as one line in which no folder of this machine is named."""
    return _PATH.sub("(path)", " ".join(message.split()))


@contextmanager
def _interrupted_after(
    cursor: duckdb.DuckDBPyConnection, seconds: float
) -> Iterator[threading.Event]:
    """Interrupt whatever the cursor runs once the time is up; yields whether that happened.

    Interrupts repeat: one that falls between two statements would be forgotten by the second.
    """
    done, expired = threading.Event(), threading.Event()

    def watch() -> None:
        if done.wait(max(seconds, 0.0)):
            return
        expired.set()
        while not done.wait(INTERRUPT_PERIOD_S):
            cursor.interrupt()

    watcher = threading.Thread(target=watch, name="query deadline", daemon=True)
    watcher.start()
    try:
        yield expired
    finally:
        done.set()
        watcher.join()


def _explained(error: duckdb.Error, sql: str) -> QueryError:
    text = str(error)
    first = text.partition("\n\nLINE ")[0]
    return QueryError(without_paths(first), _position(text, sql))


def _position(text: str, sql: str) -> int | None:
    """Return the offset that DuckDB's caret points at; long lines are shown as ...excerpts...."""
    found = _POSITION.search(text)
    if found is None:
        return None
    number, shown, spaces = int(found[1]), found[2], found[3]
    lines = sql.split("\n")
    if number > len(lines):
        return None
    column = len(spaces) - len(f"LINE {number}: ")
    line = lines[number - 1]
    if line != shown:
        excerpt = shown.removeprefix("...").removesuffix("...")
        start = line.find(excerpt)
        if start < 0:
            return None
        column += start - (3 if shown.startswith("...") else 0)
    return sum(len(before) + 1 for before in lines[: number - 1]) + column
