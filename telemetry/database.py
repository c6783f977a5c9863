"""The history's DuckDB file: opened safely, set up, set aside when it cannot be read.

Owns the file's name, its settings (no file access from SQL, configuration locked, UTC) and what is
done about a file that is locked, damaged or somebody else's. history.py opens it for writing,
server/sql_command.py to read. Must never delete a file that may hold records, and never raise
anything but HistoryUnavailable for what an operator's disk can do.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from telemetry.catalog import (
    BASE_OPTIONS,
    BASE_SETTINGS,
    LIVE,
    Part,
    attach,
    columns_of,
    detach,
    fit,
    open_catalog,
    seal,
    show,
    without_empty,
)
from telemetry.notes import read_progress
from telemetry.records import SCHEMA_VERSION
from telemetry.schema import LOST_TABLE, ddl, tables, view_ddl
from telemetry.segments import Segment, open_segments, reach_of, segment_files

FILE_NAME = "history.duckdb"
COPY_NAME = FILE_NAME + ".wal.before"

CONNECT_OPTIONS = {**BASE_OPTIONS, "enable_external_access": "false"}
SESSION_SETTINGS = (*BASE_SETTINGS, "SET lock_configuration = true")
HELD = ("Could not set lock", "Unique file handle conflict")
NO_ROOM = ("No space left", "Disk quota", "Read-only file system", "Permission denied")
MEMORY_MAX = "512MB"
"""What the server's own catalog may take; a merge of a day works within it. SQL has its own."""
ROOM_BYTES = 64 * 2**20
"""A disk with less free counts as full: what is begun there would fail again at once."""


class HistoryUnavailable(Exception):
    """The history cannot be used: one line that says why."""


class HistoryLocked(HistoryUnavailable):
    """Another process holds the file."""


def open_live(folder: Path, log: logging.Logger) -> duckdb.DuckDBPyConnection:
    """Return a catalog with the folder's live file attached for writing, its tables in place.

    SQL reaches no file outside the folder. A live file that cannot be read, or that is not ours, is
    moved aside with its write-ahead log and a new one begun; one of an older version is left as it
    is, for the archive to renew.
    """
    path, wal = folder / FILE_NAME, folder / (FILE_NAME + ".wal")
    _check_folder(folder, path)
    try:
        if wal.exists() and not path.exists():
            set_aside(folder, log, "a write-ahead log without its database")
        _copy_log(wal)
        connection = open_catalog()
        connection.execute(f"SET memory_limit = '{MEMORY_MAX}'")
        _attach_or_begin(connection, folder, path, log)
        found = columns_of(connection, [LIVE])[LIVE]
        if fit(found)[0] == "same":
            _make(connection, view_ddl() if found else ddl())
        seal(connection, [folder])
    except OSError as error:
        raise HistoryUnavailable(f"{folder}: {error.strerror}") from error
    except duckdb.Error as error:
        raise HistoryUnavailable(one_line(str(error))) from error
    return connection


def check_place(folder: Path) -> None:
    """Raise HistoryUnavailable for a folder that can never hold a history, whatever its disk has.

    For a start, which should fail then: one that is full, or held by another server, may be free
    later, and is no reason not to serve.
    """
    _check_folder(folder, folder / FILE_NAME)


def _make(connection: duckdb.DuckDBPyConnection, statements: Sequence[str]) -> None:
    """Make tables or views in the attached live file, for good."""
    cursor = connection.cursor()
    try:
        cursor.execute(f"USE {LIVE}")
        cursor.execute("BEGIN")
        for statement in statements:
            cursor.execute(statement)
        cursor.execute("COMMIT")
        # A change of tables that stands in the log alone may not replay after a kill.
        cursor.execute(f"CHECKPOINT {LIVE}")
    finally:
        cursor.close()


def begin_anew(connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Begin a new live file in place of one without rows."""
    detach(connection, LIVE)
    (folder / FILE_NAME).unlink()
    _attach(connection, folder / FILE_NAME)
    _make(connection, ddl())


def open_read_only(folder: Path) -> duckdb.DuckDBPyConnection:
    """Return a catalog of a folder's live file and segments; HistoryLocked if a server has it."""
    connection = open_catalog()
    try:
        show_folder(connection, folder)
        seal(connection)
    except HistoryUnavailable:
        connection.close()
        raise
    return connection


def show_folder(connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Let a new catalog show a folder's live file and segments; HistoryLocked when a server has it.

    A segment that cannot be read is left out, loudly.
    """
    open_parts(connection, folder)


def open_parts(
    connection: duckdb.DuckDBPyConnection, folder: Path, *, live: bool = True
) -> list[tuple[Segment | None, Part]]:
    """Do what `show_folder` does and return the parts; None stands for the live file.

    Without `live` the segments alone, which can be read while a server holds the folder.
    """
    path = folder / FILE_NAME
    if not path.is_file() and not segment_files(folder):
        raise HistoryUnavailable(f"no history in {folder}")
    try:
        opened = _open_segments(connection, folder)
        filled = without_empty(connection, [part for _, part in opened])
        parts = list[tuple[Segment | None, Part]](
            (segment, part) for (segment, _), part in zip(opened, filled, strict=True)
        )
        if live and path.is_file():
            _attach(connection, path, read_only=True)
            columns = columns_of(connection, [LIVE])[LIVE]
            if fit(columns)[0] in ("newer", "other"):
                raise HistoryUnavailable(f"{path} is a database that this version cannot read")
            hidden = reach_of(segment for segment, _ in opened)
            parts.append((None, Part(alias=LIVE, columns=columns, hidden=hidden)))
        show(connection, [part for _, part in parts], first=True)
    except duckdb.Error as error:
        raise HistoryUnavailable(f"{path} cannot be read: {one_line(str(error))}") from error
    return parts


def _open_segments(
    connection: duckdb.DuckDBPyConnection, folder: Path
) -> list[tuple[Segment, Part]]:
    """Attach the folder's segments; again where a server merged some of them meanwhile."""
    log = logging.getLogger("iterscope.history")
    while True:
        paths = segment_files(folder)
        opened = open_segments(connection, paths, log)
        if all(path.exists() for path in paths):
            return opened
        for _, part in opened:
            detach(connection, part.alias)


def open_folder(
    folder: Path,
) -> tuple[duckdb.DuckDBPyConnection, list[tuple[Segment | None, Part]]]:
    """Return a catalog of what can be read of a folder now, and its parts as `open_parts` does.

    While a server holds the live file, that is the segments. Raises HistoryUnavailable.
    """
    for live in (True, False):
        connection = open_catalog()
        try:
            return connection, open_parts(connection, folder, live=live)
        except HistoryUnavailable as error:
            connection.close()
            if not (live and isinstance(error, HistoryLocked)):
                raise
    raise AssertionError("without the live file nothing is locked")


def set_aside(folder: Path, log: logging.Logger, reason: str) -> None:
    """Move the database and its log to a name that says when; nothing is deleted."""
    kept = aside(folder / FILE_NAME)
    _move_log(folder, kept)
    _move(folder / FILE_NAME, kept)
    log.error("history moved aside to %s: %s", kept.name, reason)


def size_bytes(folder: Path) -> int:
    """Return the bytes of the database and its log."""
    total = 0
    for suffix in ("", ".wal"):
        try:
            total += (folder / (FILE_NAME + suffix)).stat().st_size
        except OSError:
            continue
    return total


def has_room(folder: Path) -> bool:
    """Tell whether the folder's disk has room to begin again; True where nobody can tell."""
    try:
        return shutil.disk_usage(folder).free >= ROOM_BYTES
    except OSError:
        return True


def one_line(text: str) -> str:
    """Return the first paragraph of DuckDB's message as one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _check_folder(folder: Path, path: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HistoryUnavailable(f"{folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HistoryUnavailable(f"{folder} is not writable")
    if path.is_file() and not os.access(path, os.R_OK | os.W_OK):
        raise HistoryUnavailable(f"{path} is not writable")


def _attach(connection: duckdb.DuckDBPyConnection, path: Path, *, read_only: bool = False) -> None:
    try:
        attach(connection, path, LIVE, read_only=read_only)
    except duckdb.Error as error:
        text = str(error)
        if any(sign in text for sign in HELD):
            raise HistoryLocked(f"another process holds {path}") from error
        if any(sign in text for sign in NO_ROOM):
            raise HistoryUnavailable(one_line(text)) from error
        raise


def _attach_or_begin(
    connection: duckdb.DuckDBPyConnection, folder: Path, path: Path, log: logging.Logger
) -> None:
    """Attach the live file, or set what stands there aside and begin a new one."""
    try:
        _attach(connection, path)
    except duckdb.Error as error:
        _attach_without_log(connection, folder, path, log, one_line(str(error)))
    if problem := _not_ours(connection):
        detach(connection, LIVE)
        set_aside(folder, log, problem)
        _attach(connection, path)


def _attach_without_log(
    connection: duckdb.DuckDBPyConnection,
    folder: Path,
    path: Path,
    log: logging.Logger,
    reason: str,
) -> None:
    """Attach the state of the last checkpoint if only the log is at fault, else begin anew."""
    kept = aside(path)
    if _move_log(folder, kept):
        log.error("history's write-ahead log moved aside to %s.wal: %s", kept.name, reason)
        try:
            _attach(connection, path)
            return
        except duckdb.Error as error:
            reason = one_line(str(error))
    _move(path, kept)  # the same name, so that the two open together again
    log.error("history moved aside to %s: %s", kept.name, reason)
    _attach(connection, path)


def _not_ours(connection: duckdb.DuckDBPyConnection) -> str | None:
    """Return why the live file is not one that this version can go on with, or None."""
    try:
        found = columns_of(connection, [LIVE])[LIVE]
        relation, reason = fit(found)
        if relation in ("newer", "other"):
            return reason
        if "run" not in found:
            return None
        row = connection.execute(f"SELECT max(schema_version) FROM {LIVE}.main.run").fetchone()
    except duckdb.Error as error:
        return one_line(str(error))
    if row and row[0] and row[0] > SCHEMA_VERSION:
        return f"it has records of version {row[0]}, newer than {SCHEMA_VERSION}"
    return None


def _copy_log(wal: Path) -> None:
    """Keep a copy of a log that a crash left: opening the database consumes it."""
    copy = wal.with_name(COPY_NAME)
    if not wal.is_file():
        copy.unlink(missing_ok=True)
        return
    shutil.copyfile(wal, copy)


def check_progress(
    connection: duckdb.DuckDBPyConnection, folder: Path, log: logging.Logger
) -> None:
    """Compare what came back with what was committed; keep the log's copy if any is missing.

    Needs the catalog's views. What is missing is put on record as lost.
    """
    progress, copy = read_progress(folder), folder / COPY_NAME
    if progress is not None:
        generation, last = last_place(connection, progress.run_id)
        missing = progress.seq - last
        if missing > 0:
            log.error("history lost %d committed records of %s", missing, progress.run_id)
            connection.execute(
                f"INSERT INTO {LIVE}.main.{LOST_TABLE} VALUES (?, ?, ?, ?, ?)",
                [progress.run_id, generation, last + 1, progress.seq, missing],
            )
            if copy.exists():
                kept = aside(folder / FILE_NAME)
                copy.rename(kept.with_name(kept.name + ".wal"))
    copy.unlink(missing_ok=True)


def last_place(connection: duckdb.DuckDBPyConnection, run_id: str) -> tuple[int, int]:
    """Return the newest generation and seq that the database knows of a run, 0 and 0 if none."""
    parts = [
        f"SELECT max(generation) AS generation, max({'to_seq' if name == LOST_TABLE else 'seq'}) "
        f"AS seq FROM {name} WHERE run_id = $1"
        for name, _, _ in tables()
    ]
    row = connection.execute(
        "SELECT coalesce(max(generation), 0), coalesce(max(seq), 0) FROM ("
        + " UNION ALL ".join(parts)
        + ")",
        [run_id],
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def aside(path: Path) -> Path:
    """Return the name that a file which cannot be used is kept under; it says when."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return path.with_name(f"{path.name}.unreadable-{stamp}")


def _move(source: Path, target: Path) -> bool:
    if not source.exists():
        return False
    source.rename(target)
    return True


def _move_log(folder: Path, kept: Path) -> bool:
    # Its copy is for a log that opening consumes; this one stays.
    (folder / COPY_NAME).unlink(missing_ok=True)
    return _move(folder / (FILE_NAME + ".wal"), kept.with_name(kept.name + ".wal"))
