"""Segment files: closed spans of the record, each one DuckDB file that never changes again.

Owns the writing of one so that a crash leaves it whole or not at all, what each says of itself, and
their listing. archive.py writes and merges those of a history; a recorded incident is the same kind
of file. A segment has all tables and views of the schema, and `segment`: a row for each run. Must
never write to a finished file.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import duckdb

from telemetry.catalog import MEMORY, Part, attach, columns_of, detach, fit
from telemetry.records import SCHEMA_VERSION
from telemetry.schema import LOST_TABLE, ddl, tables

FOLDER_NAME = "segments"
SUFFIX = ".duckdb"
PARTIAL = ".partial"
WRITING = "writing"
"""Alias of the file that is being written, with its level: one of each at a time in a database."""

Level = Literal["minute", "hour", "day", "record"]
LEVELS: tuple[Level, ...] = ("minute", "hour", "day")

INSTANTS: Mapping[str, str] = {
    "request_start": "arrived_at_ns",
    "iteration": "end_at_ns",
    "request_end": "released_at_ns",
    "delivery": "coalesce(last_write_at_ns, submitted_at_ns)",
    "rejection": "rejected_at_ns",
    "fault": "fault_at_ns",
}
"""Table to the expression that says when a row happened; the others have none."""

SEGMENT_DDL = """CREATE TABLE segment (
  schema_version BIGINT NOT NULL, level VARCHAR NOT NULL,
  run_id VARCHAR NOT NULL, first_seq BIGINT NOT NULL, last_seq BIGINT NOT NULL,
  first_unix_us BIGINT NOT NULL, last_unix_us BIGINT NOT NULL,
  rows BIGINT NOT NULL, slices BIGINT NOT NULL
)"""
SOURCES_DDL = "CREATE TABLE segment_source (name VARCHAR NOT NULL)"
"""Files that were merged into this one: one that is still there holds nothing of its own."""


class SegmentDamaged(Exception):
    """A segment cannot be read: one line that says why."""


class Stopped(Exception):
    """The writing was given up because it was asked to; nothing is left of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a segment holds of one run: all records from `first_seq` to `last_seq`."""

    first_seq: int
    last_seq: int
    first_unix_us: int
    last_unix_us: int
    rows: int
    slices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A finished segment file; `runs` is by run_id and empty when nothing lay in its span."""

    path: Path
    level: str  # a Level, or what a later version calls one
    schema_version: int
    runs: Mapping[str, Reach]
    sources: frozenset[str]
    bytes: int

    @property
    def first_unix_us(self) -> int:
        """Wall time of its oldest row."""
        return min((reach.first_unix_us for reach in self.runs.values()), default=0)

    @property
    def last_unix_us(self) -> int:
        """Wall time of its newest row."""
        return max((reach.last_unix_us for reach in self.runs.values()), default=0)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(reach.rows for reach in self.runs.values())

    @property
    def slices(self) -> int:
        """Entries in the lists of its iterations."""
        return sum(reach.slices for reach in self.runs.values())


def write_segment(
    connection: duckdb.DuckDBPyConnection,
    path: Path,
    *,
    level: Level,
    contents: Iterable[tuple[str, str]],
    sources: Iterable[str] = (),
    stopped: Callable[[], bool] = bool,
) -> Segment:
    """Write (table, SELECT of its rows in the schema's columns) pairs into a new segment file.

    The connection is a cursor of a catalog that may still reach the file's folder. The file has its
    name only once it is whole and on the disk. Raises duckdb.Error or OSError, or Stopped when
    `stopped` said so between two SELECTs; then nothing is left.
    """
    partial = path.with_name(path.name + PARTIAL)
    writing = f"{WRITING}_{level}"
    _remove(partial)
    try:
        attach(connection, partial, writing, read_only=False)
        try:
            _fill(connection, writing, contents, stopped)
            _describe(connection, writing, level, sources)
            connection.execute(f"CHECKPOINT {writing}")
            segment = read_segment(connection, partial, writing)
        finally:
            _give_up(connection, writing)
        sync(partial)
        partial.rename(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            _remove(partial)
        raise
    return replace(segment, path=path, bytes=path.stat().st_size)


def read_segment(connection: duckdb.DuckDBPyConnection, path: Path, alias: str) -> Segment:
    """Return what an attached segment says of itself; raises SegmentDamaged."""
    try:
        (version, level) = connection.execute(
            f"SELECT max(schema_version), max(level) FROM {alias}.main.segment"
        ).fetchone() or (None, None)
        sources = connection.execute(f"SELECT name FROM {alias}.main.segment_source").fetchall()
        runs = _reaches(connection, alias)
        size = path.stat().st_size
    except (duckdb.Error, OSError) as error:
        raise SegmentDamaged(" ".join(str(error).split())) from error
    return Segment(
        path=path,
        level=level or "record",
        schema_version=version or 0,
        runs=runs,
        sources=frozenset(name for (name,) in sources),
        bytes=size,
    )


def open_segment(
    connection: duckdb.DuckDBPyConnection, path: Path, alias: str
) -> tuple[Segment, Part] | None:
    """Attach a segment and return it as a part; None for one that a newer version wrote.

    Raises SegmentDamaged; then, and for None, nothing stays attached.
    """
    try:
        attach(connection, path, alias)
        columns = columns_of(connection, [alias])[alias]
        relation, reason = fit(columns)
        if relation == "newer":
            detach(connection, alias)
            return None
        if relation == "other" or not columns:
            raise SegmentDamaged(reason or "it is empty")
        return read_segment(connection, path, alias), Part(alias=alias, columns=columns)
    except (duckdb.Error, SegmentDamaged) as error:
        detach(connection, alias)
        raise SegmentDamaged(" ".join(str(error).split())) from error


def open_segments(
    connection: duckdb.DuckDBPyConnection, paths: Iterable[Path], log: logging.Logger
) -> list[tuple[Segment, Part]]:
    """Attach segments to read them all; what cannot be read is left out and logged."""
    opened: list[tuple[Segment, Part]] = []
    for number, path in enumerate(paths, 1):
        try:
            found = open_segment(connection, path, f"segment_{number}")
        except SegmentDamaged as error:
            log.error("%s cannot be read: %s", path.name, error)
            continue
        if found is None:
            log.error("%s is of a newer version and is not read", path.name)
        else:
            opened.append(found)
    doubles = doubled(segment for segment, _ in opened)
    return [pair for pair in opened if pair[0].path.name not in doubles]


def doubled(segments: Iterable[Segment]) -> frozenset[str]:
    """Return the names of files whose rows a merged segment among these holds."""
    return frozenset[str]().union(*(segment.sources for segment in segments))


def reach_of(segments: Iterable[Segment]) -> dict[str, int]:
    """Return through which seq of each run the segments reach."""
    through: dict[str, int] = {}
    for segment in segments:
        for run_id, reach in segment.runs.items():
            through[run_id] = max(through.get(run_id, 0), reach.last_seq)
    return through


def segment_files(folder: Path) -> list[Path]:
    """Return the finished segments of a history folder, in the order they were made."""
    return sorted((folder / FOLDER_NAME).glob(f"*{SUFFIX}"))


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what a crash left half written; return its names."""
    left = sorted((folder / FOLDER_NAME).glob(f"*{PARTIAL}*"))
    for path in left:
        path.unlink(missing_ok=True)
    return [path.name for path in left]


def segment_path(folder: Path, level: Level) -> Path:
    """Return a name for a new segment that no file ever had; names sort by when they were made."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    return folder / FOLDER_NAME / f"{stamp}-{level}-{secrets.token_hex(4)}{SUFFIX}"


def _fill(
    connection: duckdb.DuckDBPyConnection,
    writing: str,
    contents: Iterable[tuple[str, str]],
    stopped: Callable[[], bool],
) -> None:
    # One transaction: nothing is synced but the last checkpoint, and none of it stays in a log.
    connection.execute("BEGIN")
    connection.execute(f"USE {writing}")
    for statement in (*ddl(), SEGMENT_DDL, SOURCES_DDL):
        connection.execute(statement)
    connection.execute(f"USE {MEMORY}")
    for table, select in contents:
        if stopped():
            raise Stopped
        connection.execute(f"INSERT INTO {writing}.main.{table} {select}")
    connection.execute("COMMIT")


def _describe(
    connection: duckdb.DuckDBPyConnection, writing: str, level: Level, sources: Iterable[str]
) -> None:
    connection.execute(
        f"INSERT INTO {writing}.main.segment {_summary(writing)}",
        [SCHEMA_VERSION, level, time.time_ns() // 1000],
    )
    for name in sources:
        connection.execute(f"INSERT INTO {writing}.main.segment_source VALUES (?)", [name])


def _summary(alias: str) -> str:
    """Return the SELECT of the rows of `segment`, made from the file's own tables.

    Wall time is the run's zero plus the row's instant; what has neither counts as now.
    """
    parts = []
    for table, _, _ in tables():
        first, last = ("from_seq", "to_seq") if table == LOST_TABLE else ("seq", "seq")
        instant = INSTANTS.get(table, "NULL")
        slices = "len(requests)" if table == "iteration" else "0"
        parts.append(
            f"SELECT run_id, {first} AS first_seq, {last} AS last_seq, "
            f"{instant}::BIGINT AS at_ns, {slices} AS slices FROM {alias}.main.{table}"
        )
    return f"""WITH entry AS ({" UNION ALL ".join(parts)}),
clock AS (SELECT run_id, min(started_unix_us) AS zero_us FROM {MEMORY}.main.run GROUP BY run_id),
reach AS (
  SELECT run_id, min(first_seq) AS first_seq, max(last_seq) AS last_seq, min(at_ns) AS first_ns,
    max(at_ns) AS last_ns, count(*) AS rows, sum(slices)::BIGINT AS slices
  FROM entry GROUP BY run_id)
SELECT $1, $2, run_id, first_seq, last_seq,
  coalesce(zero_us + coalesce(first_ns, 0) // 1000, $3),
  coalesce(zero_us + coalesce(last_ns, 0) // 1000, $3), rows, slices
FROM reach LEFT JOIN clock USING (run_id) ORDER BY run_id"""


def _reaches(connection: duckdb.DuckDBPyConnection, alias: str) -> dict[str, Reach]:
    rows = connection.execute(
        "SELECT run_id, first_seq, last_seq, first_unix_us, last_unix_us, rows, slices "
        f"FROM {alias}.main.segment"
    ).fetchall()
    return {
        run_id: Reach(
            first_seq=first,
            last_seq=last,
            first_unix_us=first_us,
            last_unix_us=last_us,
            rows=count,
            slices=slices,
        )
        for run_id, first, last, first_us, last_us, count, slices in rows
    }


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_up(connection: duckdb.DuckDBPyConnection, writing: str) -> None:
    """Let go of the file being written; what was not committed is undone."""
    with suppress(duckdb.Error):
        connection.execute("ROLLBACK")  # an error where nothing is open
    connection.execute(f"USE {MEMORY}")
    detach(connection, writing)


def _remove(partial: Path) -> None:
    for name in (partial, partial.with_name(partial.name + ".wal")):
        name.unlink(missing_ok=True)
