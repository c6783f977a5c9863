"""`iterscope history`: what a history folder holds, and its way into Parquet files.

Owns the flags of `info` and `export`, their tables for people and their exit codes; the folder is
read by telemetry/database.py and written out by telemetry/parquet.py. Works while a server holds
the folder, on its closed segments, and then says what is not in the answer. Must never write to
the history.
"""

import argparse
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from server.config import default_history
from server.terminal import ANSWERED, MISUSE, WRONG, open_console, printable, refuse
from telemetry.catalog import Part
from telemetry.database import HistoryUnavailable, one_line, open_folder, size_bytes
from telemetry.notes import read_server_file
from telemetry.parquet import ExportRefused, export_parquet
from telemetry.segments import Segment


def add_history_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope history`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser("info", help="segments, spans, rows and bytes of a history")
    export = actions.add_parser("export", help="write a history as hive-partitioned Parquet")
    export.add_argument("target", metavar="DIR", help="folder to write; new, or empty")
    for action in (info, export):
        action.add_argument(
            "--history", metavar="DIR", help=f"folder of the history (default: {default_history()})"
        )
        action.add_argument("--json", action="store_true", help="print the answer as JSON")


def run_history_command(args: argparse.Namespace) -> int:
    """Run the action; 0 when it is done, 1 when there is no history, 2 for misuse."""
    folder = Path(args.history).expanduser() if args.history else default_history()
    try:
        if args.action == "export":
            return _export(folder, Path(args.target).expanduser(), as_json=args.json)
        return _info(folder, as_json=args.json)
    except HistoryUnavailable as error:
        return refuse(str(error), WRONG)
    except duckdb.Error as error:
        return refuse(f"{folder}: {one_line(str(error))}", WRONG)


# ---- info


def _info(folder: Path, *, as_json: bool) -> int:
    connection, parts = open_folder(folder)
    with closing(connection):
        live = next((part for segment, part in parts if segment is None), None)
        rows = _live_rows(connection, live) if live is not None else None
    segments = [segment for segment, _ in parts if segment is not None]
    server = read_server_file(folder) if live is None else None
    facts = {
        "folder": str(folder),
        "server": server.url if server else None,
        "live_rows": rows,
        "live_bytes": size_bytes(folder),
        "rows": sum(segment.rows for segment in segments) + (rows or 0),
        "slices": sum(segment.slices for segment in segments),
        "bytes": sum(segment.bytes for segment in segments) + size_bytes(folder),
        "segments": [_facts(segment) for segment in segments],
    }
    if as_json:
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    else:
        _show(segments, facts)
    return ANSWERED


def _live_rows(connection: duckdb.DuckDBPyConnection, live: Part) -> int:
    counts = " UNION ALL ".join(
        f"SELECT count(*) AS n FROM {live.alias}.main.{table}" for table in live.columns
    )
    ((count,),) = connection.execute(f"SELECT sum(n)::BIGINT FROM ({counts})").fetchall()
    return int(count or 0)


def _facts(segment: Segment) -> dict[str, Any]:
    return {
        "name": segment.path.name,
        "level": segment.level,
        "schema_version": segment.schema_version,
        "first": _instant(segment.first_unix_us),
        "last": _instant(segment.last_unix_us),
        "runs": sorted(segment.runs),
        "rows": segment.rows,
        "slices": segment.slices,
        "bytes": segment.bytes,
    }


def _instant(unix_us: int) -> str:
    return datetime.fromtimestamp(unix_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _show(segments: list[Segment], facts: dict[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, right in (
        ("segment", False),
        ("level", False),
        ("first", False),
        ("last", False),
        ("runs", True),
        ("rows", True),
        ("slices", True),
        ("bytes", True),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for segment in sorted(segments, key=lambda one: one.first_unix_us):
        one = _facts(segment)
        numbers = (len(one["runs"]), one["rows"], one["slices"], one["bytes"])
        words = (one["name"], one["level"], one["first"], one["last"])
        table.add_row(*map(Text, map(printable, words)), *(f"{number:,}" for number in numbers))
    console = open_console()
    if segments:
        console.print(table)
    console.print(
        f"{len(segments)} segments, {facts['rows']:,} rows, {facts['slices']:,} slices in segments,"
        f" {facts['bytes']:,} bytes in {printable(facts['folder'])}"
    )
    if facts["live_rows"] is None:
        console.print(_not_included(facts["server"]))
    else:
        console.print(f"the live file holds {facts['live_rows']:,} of the rows")


def _not_included(server: str | None) -> str:
    who = f"the server at {server}" if server else "a server"
    return f"not included: the live file, which {who} holds (at most the last minutes)"


# ---- export


def _export(folder: Path, target: Path, *, as_json: bool) -> int:
    try:
        done = export_parquet(folder, target)
    except ExportRefused as error:
        return refuse(f"history export: {error}", MISUSE)
    except OSError as error:
        return refuse(f"{target} cannot be written: {error.strerror}", WRONG)
    if as_json:
        facts = {"target": str(target), "files": done.files, "live": done.live, "rows": done.rows}
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
        return ANSWERED
    console = open_console()
    console.print(
        f"{sum(done.rows.values()):,} rows in {done.files} files in {printable(str(target))}"
    )
    if not done.live:
        server = read_server_file(folder)
        console.print(_not_included(server.url if server else None))
    return ANSWERED
