"""A history as Parquet files for engines beyond one machine: hive-partitioned, zstd.

Owns the layout `<table>/replica=R/date=YYYY-MM-DD/hour=HH/*.parquet`, in UTC, and how a row without
an instant of its own finds its hour. server/history_command.py calls it on a folder that it may
read. Writes beside the target and renames: must never leave half an export under its name.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import duckdb

from telemetry.catalog import Part, literal, rows_of
from telemetry.database import open_folder
from telemetry.schema import LOST_TABLE, quoted, tables
from telemetry.segments import INSTANTS

ROWS_A_GROUP = 32_768


class ExportRefused(Exception):
    """The export cannot be written where it was asked for: one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: rows by table, files; `live` tells whether the live file is in it."""

    rows: dict[str, int]
    files: int
    live: bool


def export_parquet(folder: Path, target: Path) -> Exported:
    """Write every row of a history folder under `target`, which must not exist or be empty.

    Without the live file where a server holds it. Raises ExportRefused, HistoryUnavailable,
    duckdb.Error or OSError; then nothing is left.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportRefused(f"{target} is there already, and not an empty folder")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    unfinished.mkdir(parents=True)
    try:
        connection, parts = open_folder(folder)
        with closing(connection):
            rows = _write(connection, [part for _, part in parts], unfinished)
        files = sum(1 for _ in unfinished.rglob("*.parquet"))
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    live = any(segment is None for segment, _ in parts)
    return Exported(rows=rows, files=files, live=live)


def _write(
    connection: duckdb.DuckDBPyConnection, parts: Sequence[Part], target: Path
) -> dict[str, int]:
    """Write part by part: a segment's rows are of one span, so few partitions are open at once."""
    connection.execute(f"SET partitioned_write_flush_threshold = {ROWS_A_GROUP}")
    counts: dict[str, int] = {}
    for number, part in enumerate(parts):
        for name, _, items in tables():
            rows = rows_of(part, name, items)
            if rows is None:
                continue
            columns = [quoted(item.name) for item in items]
            count = _copy(connection, _placed(part, name, rows, columns), target / name, number)
            counts[name] = counts.get(name, 0) + count
    return counts


def _copy(connection: duckdb.DuckDBPyConnection, select: str, folder: Path, number: int) -> int:
    ((count,),) = connection.execute(
        f"COPY ({select}) TO {literal(str(folder))} (FORMAT parquet, COMPRESSION zstd, "
        f"ROW_GROUP_SIZE {ROWS_A_GROUP}, PARTITION_BY (replica, date, hour), "
        f"OVERWRITE_OR_IGNORE, FILENAME_PATTERN 'part-{number:04d}-{{i}}')"
    ).fetchall()
    if not count and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return int(count)


def _placed(part: Part, table: str, rows: str, columns: Sequence[str]) -> str:
    """Return a part's rows with replica, date and hour.

    What has no instant of its own happened by the end of the step before it in the sequence.
    """
    place = "to_seq" if table == LOST_TABLE else "seq"
    join, instant = "", INSTANTS.get(table, "0")
    if table not in (*INSTANTS, "run"):
        join = (
            f"ASOF LEFT JOIN (SELECT run_id, seq, end_at_ns FROM {part.alias}.main.iteration) near "
            f"ON near.run_id = entry.run_id AND entry.{place} >= near.seq"
        )
        instant = "coalesce(near.end_at_ns, 0)"
    replica = "" if "replica" in columns else "coalesce(clock.replica, 'unknown') AS replica, "
    at = f"make_timestamp(coalesce(clock.zero_us, 0) + ({instant}) // 1000)"
    return f"""SELECT {", ".join(f"entry.{column}" for column in columns)}, {replica}
  strftime({at}, '%Y-%m-%d') AS date, strftime({at}, '%H') AS hour
FROM ({rows}) entry LEFT JOIN (
  SELECT run_id, min(started_unix_us) AS zero_us, any_value(replica) AS replica
  FROM memory.main.run GROUP BY run_id) clock ON clock.run_id = entry.run_id {join}"""
