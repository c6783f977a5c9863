"""Where a command's answers come from: a running server, the history's folder, or one file.

Owns the flags `--url | --history | --file` and `--api-key`, the choice they stand for, and
`Source`, whose `ask` takes one SELECT. Every command that reads the record uses it. A folder is
asked first: whether a server holds it is then a fact, not a guess. Must never write to what it
reads.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import httpx
import msgspec

from server.config import default_api_key, default_history
from telemetry.config import TelemetryConfig
from telemetry.database import (
    CONNECT_OPTIONS,
    SESSION_SETTINGS,
    HistoryLocked,
    HistoryUnavailable,
    one_line,
    open_read_only,
    read_server_file,
)
from telemetry.queries import QueryError, QueryRunner

ANSWER_MARGIN_S = 5.0

Ask = Callable[[str, Sequence[object]], "Answer"]


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


class NoAnswer(Exception):
    """There is no answer: one line that says why, and where in the query if it is at fault."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One place to ask. `name` is for people, `url` the server's address if one answers.

    Use it in a `with`, or call `close`.
    """

    name: str
    url: str | None
    api_key: str | None
    answer: Ask
    close: Callable[[], None]

    def ask(self, sql: str, parameters: Sequence[object] = ()) -> Answer:
        """Answer one SELECT ($1, $2... or ? are the parameters); raises NoAnswer."""
        return self.answer(sql, parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags that choose where answers come from."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", help="ask the server at this address")
    place.add_argument(
        "--history",
        metavar="DIR",
        help=f"folder of the history, or the server that holds it (default: {default_history()})",
    )
    place.add_argument("--file", help="a recorded file, or a segment of a history")
    parser.add_argument("--api-key", help="key of the server (or ITERSCOPE_API_KEY)")


def source_of(args: argparse.Namespace) -> Source:
    """Return the source that the parsed flags ask for; raises NoAnswer when it cannot be read."""
    key = args.api_key or default_api_key()
    if args.url:
        return server_source(args.url, key)
    if args.file:
        return file_source(Path(args.file).expanduser())
    folder = Path(args.history).expanduser() if args.history else default_history()
    return history_source(folder, key)


def server_source(url: str, api_key: str | None = None) -> Source:
    """Return the running server at `url` as a source; whether it answers shows in `ask`."""

    def answer(sql: str, parameters: Sequence[object]) -> Answer:
        return _ask_server(url, api_key, sql, parameters)

    return Source(name=url, url=url, api_key=api_key, answer=answer, close=lambda: None)


def history_source(folder: Path, api_key: str | None = None) -> Source:
    """Return a history as a source: its files, or the server that holds them."""
    try:
        connection = open_read_only(folder)
    except HistoryLocked as error:
        server = read_server_file(folder)
        if server is None:
            raise NoAnswer(f"{error}; it does not say at which address it serves") from error
        return server_source(server.url, api_key)
    except HistoryUnavailable as error:
        raise NoAnswer(str(error)) from error
    return _offline(str(folder), connection)


def file_source(path: Path) -> Source:
    """Return one recorded file as a source."""
    if not path.is_file():
        raise NoAnswer(f"there is no file {path}")
    try:
        connection = duckdb.connect(path, read_only=True, config=CONNECT_OPTIONS)
        for setting in SESSION_SETTINGS:
            connection.execute(setting)
    except duckdb.Error as error:
        raise NoAnswer(f"{path} cannot be read: {one_line(str(error))}") from error
    return _offline(str(path), connection)


def _offline(name: str, connection: duckdb.DuckDBPyConnection) -> Source:
    limits = TelemetryConfig()
    runner = QueryRunner(
        connection.cursor, rows_max=limits.sql_rows_max, deadline_s=limits.sql_deadline_s
    )

    def answer(sql: str, parameters: Sequence[object]) -> Answer:
        try:
            return msgspec.json.decode(runner.run(sql, parameters).json(), type=Answer)
        except QueryError as error:
            raise NoAnswer(_pointed(error, sql), error.position) from error

    def close() -> None:
        runner.close()
        connection.close()

    return Source(name=name, url=None, api_key=None, answer=answer, close=close)


def _ask_server(url: str, api_key: str | None, sql: str, parameters: Sequence[object]) -> Answer:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout_s = TelemetryConfig().sql_deadline_s + ANSWER_MARGIN_S
    try:
        response = httpx.post(
            url.rstrip("/") + "/telemetry/sql",
            json={"sql": sql, "parameters": list(parameters)},
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(f"{url} does not answer: {error}") from error
    if response.is_success:
        try:
            return msgspec.json.decode(response.content, type=Answer)
        except msgspec.DecodeError as error:
            raise NoAnswer(f"{url} answered what is no answer to SQL") from error
    try:
        fault = response.json()["error"]
        message, position = str(fault["message"]), fault.get("position")
    except (ValueError, KeyError, TypeError):
        raise NoAnswer(f"{url} answered {response.status_code}") from None
    place = position if isinstance(position, int) else None
    raise NoAnswer(_pointed(QueryError(message, place), sql), place)


def _pointed(error: QueryError, sql: str) -> str:
    """Return the message with the place it speaks of."""
    message, position = error.message, error.position
    if position is None or not 0 <= position < len(sql):
        return message
    line = sql.count("\n", 0, position) + 1
    near = sql[position : position + 20].splitlines()[0]
    return f"{message} (line {line}, at: {near})" if near else f"{message} (line {line})"
