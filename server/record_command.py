"""`iterscope record`: a range of the record as one file that `sql`, `diff` and `export` open.

Owns the command's flags, its file and its exit codes. A running server makes the file and sends it;
without one the folder's files are copied from, or another recorded file. Must never write over a
file that exists, nor leave half a file under the name that was asked for.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import httpx

from server.config import default_api_key, default_history
from server.range_flags import add_range_flags, range_of
from server.source import add_source_flags
from server.terminal import ANSWERED, MISUSE, WRONG, refuse
from telemetry.catalog import Part, attach, columns_of, fit, open_catalog, show
from telemetry.database import (
    HistoryLocked,
    HistoryUnavailable,
    one_line,
    show_folder,
)
from telemetry.incidents import Note, asking, write_record
from telemetry.notes import read_server_file
from telemetry.spans import BadRange, TimeRange, shown, spans_of

MAKING_S = 600.0


class NotRecorded(Exception):
    """There is no file: one line that says why."""


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope record`."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to make")
    parser.add_argument("--detail", default="", metavar="TEXT", help="why; it stands in the file")
    add_range_flags(parser)
    add_source_flags(parser)


def run_record_command(args: argparse.Namespace) -> int:
    """Make the file; 0 when it is there, 1 when there is nothing to record, 2 for misuse."""
    try:
        asked = range_of(args)
    except BadRange as error:
        return refuse(f"record: {error}", MISUSE)
    output = Path(args.output).expanduser()
    if output.exists():
        return refuse(f"record: {output} exists already", MISUSE)
    try:
        origin = _record(args, asked, output)
    except (NotRecorded, HistoryUnavailable, BadRange) as error:
        return refuse(str(error), WRONG)
    except OSError as error:
        return refuse(f"{output} cannot be written: {error.strerror}", WRONG)
    except duckdb.Error as error:
        return refuse(f"{output} cannot be made: {one_line(str(error))}", WRONG)
    sys.stderr.write(f"{output.stat().st_size} bytes of {origin} in {output}\n")
    return ANSWERED


def _record(args: argparse.Namespace, asked: TimeRange, output: Path) -> str:
    """Make the file and return where its rows came from."""
    if args.url:
        return _of_server(args.url, args, output)
    if args.file:
        path = Path(args.file).expanduser()
        if not path.is_file():
            raise NotRecorded(f"there is no file {path}")
        return _of_files(path, _show_file, args, asked, output)
    folder = Path(args.history).expanduser() if args.history else default_history()
    try:
        return _of_files(folder, show_folder, args, asked, output)
    except HistoryLocked as error:
        server = read_server_file(folder)
        if server is None:
            raise NotRecorded(f"{error}; it does not say at which address it serves") from error
        return _of_server(server.url, args, output)


def _show_file(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    try:
        attach(connection, path, "file")
    except duckdb.Error as error:
        raise NotRecorded(f"{path} cannot be read: {one_line(str(error))}") from error
    columns = columns_of(connection, ["file"])["file"]
    if not columns or fit(columns)[0] in ("newer", "other"):
        raise NotRecorded(f"{path} is not a record that this version can read")
    show(connection, [Part(alias="file", columns=columns)], first=True)


def _of_files(
    place: Path,
    open_place: Callable[[duckdb.DuckDBPyConnection, Path], None],
    args: argparse.Namespace,
    asked: TimeRange,
    output: Path,
) -> str:
    note = Note(reason="asked", detail=args.detail, made_unix_us=time.time_ns() // 1000)
    with closing(open_catalog()) as connection:
        open_place(connection, place)
        spans = spans_of(asking(connection), asked)
        write_record(connection, output, spans, note)
    return f"{place}, {shown(spans[0].from_unix_us)} to {shown(spans[-1].to_unix_us)}"


# ---- a running server


def _of_server(url: str, args: argparse.Namespace, output: Path) -> str:
    key = args.api_key or default_api_key()
    asked = {
        "last": args.last,
        "from": args.since,
        "to": args.until,
        "run_id": args.run_id,
        "detail": args.detail,
    }
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with (
            httpx.Client(timeout=MAKING_S, trust_env=False) as client,
            client.stream(
                "POST",
                url.rstrip("/") + "/telemetry/record",
                json=asked,
                headers={"Authorization": f"Bearer {key}"} if key else {},
            ) as response,
            unfinished.open("wb") as file,
        ):
            if not response.is_success:
                raise NotRecorded(_fault(url, response))
            for chunk in response.iter_bytes():
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(output)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotRecorded(f"{url} does not answer: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return url


def _fault(url: str, response: httpx.Response) -> str:
    response.read()
    try:
        fault: Any = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{url} answered {response.status_code}"
    return str(fault)
