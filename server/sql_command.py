"""`iterscope sql`: one SELECT over the history, answered by a running server or by the file itself.

Owns the choice between the two, the table for people and the exit codes; server/cli.py adds its
flags and calls `run_sql_command`. With a folder the file is asked first: whether a server holds it
is then a fact, not a guess. Must never write to the history, nor print a control character.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.config import default_api_key, default_history
from telemetry.config import TelemetryConfig
from telemetry.database import (
    HistoryLocked,
    HistoryUnavailable,
    open_read_only,
    read_server_file,
)
from telemetry.queries import QueryError, QueryRunner

ANSWERED, WRONG, MISUSE = 0, 1, 2
ANSWER_MARGIN_S = 5.0
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class Answer(msgspec.Struct, frozen=True):
    """The body of an answer to POST /telemetry/sql."""

    columns: list[dict[str, str]]
    rows: list[list[Any]]
    row_count: int
    truncated: bool
    elapsed_ms: float


class SqlFailed(Exception):
    """There is no answer: one line that says why."""


def add_sql_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope sql`."""
    parser.add_argument("sql", help="one SELECT; tables are described in SCHEMA.md")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", help="ask the server at this address")
    place.add_argument(
        "--history", help=f"folder of the history to read (default: {default_history()})"
    )
    parser.add_argument("--api-key", help="key of the server (or ITERSCOPE_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run_sql_command(args: argparse.Namespace) -> int:
    """Answer `args.sql`; 0 when answered, 1 when there is no answer, 2 for misuse."""
    if not args.sql.strip():
        return _refuse("sql: the query is empty", MISUSE)
    try:
        body = _ask(args)
    except (SqlFailed, HistoryUnavailable) as error:
        return _refuse(str(error), WRONG)
    except QueryError as error:
        return _refuse(_pointed(error.message, error.position, args.sql), WRONG)
    if args.json:
        sys.stdout.write(body.decode() + "\n")
    else:
        _show(msgspec.json.decode(body, type=Answer))
    return ANSWERED


def _ask(args: argparse.Namespace) -> bytes:
    key = args.api_key or default_api_key()
    if args.url:
        return _ask_server(args.url, args.sql, key)
    folder = Path(args.history).expanduser() if args.history else default_history()
    try:
        connection = open_read_only(folder)
    except HistoryLocked as error:
        server = read_server_file(folder)
        if server is None:
            raise SqlFailed(f"{error}; it does not say at which address it serves") from error
        return _ask_server(server.url, args.sql, key)
    limits = TelemetryConfig()
    runner = QueryRunner(
        connection.cursor, rows_max=limits.sql_rows_max, deadline_s=limits.sql_deadline_s
    )
    try:
        return runner.run(args.sql).json()
    finally:
        runner.close()
        connection.close()


def _ask_server(url: str, sql: str, api_key: str | None) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout_s = TelemetryConfig().sql_deadline_s + ANSWER_MARGIN_S
    try:
        response = httpx.post(
            url.rstrip("/") + "/telemetry/sql",
            json={"sql": sql},
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SqlFailed(f"{url} does not answer: {error}") from error
    if response.is_success:
        return response.content
    try:
        fault = response.json()["error"]
        message, position = str(fault["message"]), fault.get("position")
    except (ValueError, KeyError, TypeError):
        raise SqlFailed(f"{url} answered {response.status_code}") from None
    if response.status_code == httpx.codes.BAD_REQUEST:
        raise QueryError(message, position if isinstance(position, int) else None)
    raise SqlFailed(message)


def _pointed(message: str, position: int | None, sql: str) -> str:
    """Return a message with the place it speaks of."""
    if position is None or not 0 <= position < len(sql):
        return message
    line = sql.count("\n", 0, position) + 1
    near = sql[position : position + 20].splitlines()[0]
    return f"{message} (line {line}, at: {near})" if near else f"{message} (line {line})"


def _show(answer: Answer) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in answer.columns:
        number = column["type"].startswith(("BIGINT", "INTEGER", "DOUBLE", "HUGEINT", "DECIMAL"))
        right = number and not column["type"].endswith("]")
        table.add_column(
            Text(_printable(column["name"])),
            justify="right" if right else "left",
            overflow="fold",
        )
    for row in answer.rows:
        table.add_row(*(_cell(value) for value in row))
    # Without a terminal nothing may be folded: the reader is grep or a file.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)
    more = ", there is more" if answer.truncated else ""
    rows = "1 row" if answer.row_count == 1 else f"{answer.row_count} rows"
    console.print(Text(f"{rows}{more} ({answer.elapsed_ms:.1f} ms)", style="dim"))


def _cell(value: Any) -> Text:
    if value is None:
        return Text("null", style="dim")
    if isinstance(value, list | dict):
        return Text(_printable(msgspec.json.encode(value).decode()))
    return Text(_printable(str(value)))


def _printable(text: str) -> str:
    return text.translate(CONTROL)


def _refuse(message: str, code: int) -> int:
    sys.stderr.write(f"iterscope: {_printable(message)}\n")
    return code
