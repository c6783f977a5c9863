"""One SELECT answered on an open database: checked, run, fetched within caps, made JSON or CSV.

Owns what counts as one SELECT, the caps on rows and bytes, the turning of DuckDB's values into
text, and the place in the query that an error speaks of. query_child.py calls it in a process of
its own: it knows no deadline and no limit of memory. Must never hold a whole result as objects, nor
let an error carry a path.
"""

import csv
import io
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any, Literal

import duckdb
import msgspec

SQL_CHARACTERS_MAX = 100_000
MESSAGE_CHARACTERS_MAX = 2000
"""Of an error: the database lists every parameter too many by name."""
FETCH_ROWS_MAX = 1000
FETCH_BYTES = 2**20
"""What a fetch aims at, by the rows seen so far: a wide row is a large object."""

TOO_LARGE = "the query needs more memory than queries get"

Format = Literal["json", "csv"]

_READY = re.compile(r"(?:BOOLEAN|U?(?:TINY|SMALL|BIG)INT|U?INTEGER|VARCHAR)(?:\[\])*|DOUBLE|FLOAT")
_PATH = re.compile(r"(?<![\w/])~?(?:/[\w.+@-]+){2,}/?|(?<=[\"'])/[^\"']*(?=[\"'])")
_POSITION = re.compile(r"\n\nLINE (\d+): (.*)\n( *)\^")


class QueryError(Exception):
    """The query cannot be answered: one line, and the place in its text where that is known."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position


class QuerySpoiled(QueryError):
    """The query failed so badly that its database should not be asked again."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to one SELECT; columns are {"name", "type"}, rows hold what JSON can."""

    columns: list[dict[str, str]]
    rows: list[list[Any]]
    row_count: int
    truncated: bool
    elapsed_ms: float

    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows by column name."""
        names = [column["name"] for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def json(self) -> bytes:
        """Return the answer as it crosses the network."""
        return msgspec.json.encode(self)

    def csv(self) -> str:
        """Return the answer as CSV, names first."""
        return csv_line([column["name"] for column in self.columns]) + "".join(
            csv_line(row) for row in self.rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """How much of a result an answer carries, and as what."""

    rows_max: int
    bytes_max: int
    format: Format = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """An answer as bytes: the JSON of an Answer, or CSV."""

    content: bytes
    row_count: int
    truncated: bool


def answer(
    cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[object], caps: Caps
) -> Body:
    """Answer one SELECT; raises QueryError."""
    if len(sql) > SQL_CHARACTERS_MAX:
        raise QueryError(f"a query has at most {SQL_CHARACTERS_MAX} characters")
    started = time.monotonic()
    try:
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError("a query is exactly one SELECT")
        # A DELETE or a COPY may hide inside a WITH and still be a SELECT to the parser; the
        # read-only transaction and the locked configuration refuse it when it runs.
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        cursor.execute(statements[0], list(parameters))
        columns = [{"name": str(c[0]), "type": str(c[1])} for c in cursor.description or ()]
        ready = all(_READY.fullmatch(column["type"]) for column in columns)
        rows, truncated = _fetch(cursor, caps, ready=ready)
    except duckdb.OutOfMemoryException as error:
        raise QueryError(TOO_LARGE) from error
    except MemoryError as error:
        raise QuerySpoiled(TOO_LARGE) from error
    except (duckdb.FatalException, duckdb.InternalException) as error:
        raise QuerySpoiled(_explained(error, sql).message) from error
    except duckdb.Error as error:
        raise _explained(error, sql) from error
    except RecursionError as error:
        raise QueryError("a value of the answer is nested too deeply") from error
    elapsed_ms = round((time.monotonic() - started) * 1000, 3)
    content = (
        _csv(columns, rows) if caps.format == "csv" else _json(columns, rows, elapsed_ms, truncated)
    )
    return Body(content=content, row_count=len(rows), truncated=truncated)


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


def csv_line(row: Sequence[Any]) -> str:
    """Return one line of CSV: null is empty, true and false are words, lists and maps are JSON."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow([_csv_cell(value) for value in row])
    return line.getvalue()


def without_paths(message: str) -> str:
    """Return a message as one line in which no folder of this machine is named."""
    return _PATH.sub("(path)", " ".join(message.split()))


def _fetch(
    cursor: duckdb.DuckDBPyConnection, caps: Caps, *, ready: bool
) -> tuple[list[bytes], bool]:
    """Return rows as text, and whether there were more than the caps allow.

    `ready` rows hold nothing that would have to be made plain; JSON writes NaN as null by itself.
    """
    line = _csv_row if caps.format == "csv" else _json_row
    rows: list[bytes] = []
    size, ahead = 0, 1
    while chunk := cursor.fetchmany(ahead):
        for row in chunk:
            if len(rows) == caps.rows_max:
                return rows, True
            text = line(row if ready else [plain(value) for value in row])
            size += len(text) + 1
            if size > caps.bytes_max:
                return rows, True
            rows.append(text)
        ahead = min(FETCH_ROWS_MAX, 2 * ahead, max(1, FETCH_BYTES * len(rows) // size))
    return rows, False


def _json_row(row: Sequence[Any]) -> bytes:
    return msgspec.json.encode(row)


def _csv_row(row: Sequence[Any]) -> bytes:
    return csv_line(row).encode()


def _json(
    columns: list[dict[str, str]], rows: list[bytes], elapsed_ms: float, truncated: bool
) -> bytes:
    """Return the JSON of an Answer whose rows are JSON already."""
    head = b'{"columns":' + msgspec.json.encode(columns) + b',"rows":['
    rest = {"row_count": len(rows), "truncated": truncated, "elapsed_ms": elapsed_ms}
    return b"".join((head, b",".join(rows), b"],", msgspec.json.encode(rest)[1:]))


def _csv(columns: list[dict[str, str]], rows: list[bytes]) -> bytes:
    head = csv_line([column["name"] for column in columns]).encode()
    return head + b"".join(rows)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _explained(error: duckdb.Error, sql: str) -> QueryError:
    text = str(error)
    first = text.partition("\n\nLINE ")[0]
    if len(first) > MESSAGE_CHARACTERS_MAX:
        first = first[:MESSAGE_CHARACTERS_MAX] + "..."
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
