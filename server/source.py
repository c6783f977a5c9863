"""Where a command's answers come from: a running server, the history's folder, or one file.

Owns the flags `--url | --history | --file` and `--api-key`, the choice they stand for, and
`Source`, whose `ask` takes one SELECT. Every command that reads the record uses it. A folder is
asked first: whether a server holds it is then a fact, not a guess. Must never write to what it
reads.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import msgspec

from server.config import default_api_key, default_history
from telemetry.answer import Answer, QueryError
from telemetry.config import TelemetryConfig
from telemetry.notes import read_server_file
from telemetry.sandbox import Sandbox, SandboxFailed
from telemetry.wire import OpenFile, OpenFolder, Opening, question

CONNECT_S = 5.0
ANSWER_S = 120.0
"""A server says itself when a query took too long; only one that is gone says nothing."""

DUCKDB_MAGIC, DUCKDB_MAGIC_AT = b"DUCK", 8
"""How every DuckDB file begins, behind a checksum."""

OFFLINE_DEADLINE_S = 60.0
"""Of a query over files: it takes nobody's time but its user's."""

Ask = Callable[[str, Sequence[object]], Answer]


class NoAnswer(Exception):
    """There is no answer: one line that says why, and where in the query if it is at fault."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One place to ask. `name` is for people, `url` the server's address if one answers.

    `abandoned` says that it is a history which no server holds: what runs in it never ended.
    Use it in a `with`, or call `close`.
    """

    name: str
    url: str | None
    api_key: str | None
    answer: Ask
    close: Callable[[], None]
    abandoned: bool = False

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
        return replace(
            _offline(str(folder), OpenFolder(path=str(folder.resolve()))), abandoned=True
        )
    except SandboxFailed as error:
        if not error.locked:
            raise NoAnswer(str(error)) from error
        server = read_server_file(folder)
        if server is None:
            raise NoAnswer(f"{error}; it does not say at which address it serves") from error
        return server_source(server.url, api_key)


def file_source(path: Path) -> Source:
    """Return one recorded file as a source."""
    if path.is_dir():
        raise NoAnswer(f"--file {path} is a folder; --history takes one")
    if not path.is_file():
        raise NoAnswer(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            begun = file.read(DUCKDB_MAGIC_AT + len(DUCKDB_MAGIC))
    except OSError as error:
        raise NoAnswer(f"--file {path} cannot be read: {error.strerror}") from error
    if begun[DUCKDB_MAGIC_AT:] != DUCKDB_MAGIC:
        raise NoAnswer(f"--file {path} is not a DuckDB file, as `iterscope record` writes them")
    try:
        return _offline(str(path), OpenFile(path=str(path.resolve())))
    except SandboxFailed as error:
        raise NoAnswer(str(error)) from error


class _Files:
    """A child over files, made anew after a query that cost it its life."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._sandbox = self._opened()

    def ask(self, sql: str, parameters: Sequence[object]) -> Answer:
        limits = TelemetryConfig()
        try:
            asked = question(
                sql,
                parameters,
                format="json",
                rows_max=limits.sql_rows_max,
                deadline_s=OFFLINE_DEADLINE_S,
            )
            if not self._sandbox.alive or self._sandbox.spent:
                self._sandbox.close()
                self._sandbox = self._opened()
            answered = self._sandbox.ask(asked)
        except QueryError as error:
            raise NoAnswer(_pointed(error, sql), error.position) from error
        except SandboxFailed as error:
            raise NoAnswer(str(error)) from error
        return msgspec.json.decode(answered.content, type=Answer)

    def close(self) -> None:
        self._sandbox.close()

    def _opened(self) -> Sandbox:
        sandbox = Sandbox()
        try:
            sandbox.open(self._opening)
        except BaseException:
            sandbox.close()
            raise
        return sandbox


def _offline(name: str, opening: Opening) -> Source:
    files = _Files(opening)
    return Source(name=name, url=None, api_key=None, answer=files.ask, close=files.close)


def _ask_server(url: str, api_key: str | None, sql: str, parameters: Sequence[object]) -> Answer:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.post(
            url.rstrip("/") + "/telemetry/sql",
            json={"sql": sql, "parameters": list(parameters)},
            headers=headers,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
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
