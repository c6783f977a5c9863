"""The history's DuckDB file: opened safely, set up, set aside when it cannot be read.

Owns the file's name, its settings (no file access from SQL, configuration locked, UTC) and what is
done about a file that is locked, damaged or somebody else's. history.py opens it for writing,
server/sql_command.py to read. Must never delete a file that may hold records, and never raise
anything but HistoryUnavailable for what an operator's disk can do.
"""

import logging
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import duckdb
import msgspec

from telemetry.schema import LOST_TABLE, ddl, shape, tables

FILE_NAME = "history.duckdb"
COPY_NAME = FILE_NAME + ".wal.before"
PROGRESS_NAME = "history.progress"
SERVER_NAME = "server.json"

CONNECT_OPTIONS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # Without this a table name in SQL may name a Python variable of ours.
    "python_enable_replacements": "false",
    # One thread: queries must not take the engine's cores. No folder to spill to: a query that
    # needs more memory than this ends with an error instead of filling the disk.
    "threads": 1,
    "memory_limit": "1GB",
    "temp_directory": "",
}
SESSION_SETTINGS = (
    "SET GLOBAL TimeZone = 'UTC'",
    "SET enable_progress_bar = false",  # it prints to standard output after two seconds
    "SET lock_configuration = true",
)
NO_ROOM = ("No space left", "Disk quota", "Read-only file system", "Permission denied")


_File = TypeVar("_File", bound=msgspec.Struct)


class HistoryUnavailable(Exception):
    """The history cannot be used: one line that says why."""


class HistoryLocked(HistoryUnavailable):
    """Another process holds the file."""


class Progress(msgspec.Struct, frozen=True):
    """How far a run's records were committed, written beside the database after each commit."""

    run_id: str
    seq: int


class ServerFile(msgspec.Struct, frozen=True):
    """Which running server holds a history folder."""

    url: str
    pid: int
    run_id: str


def open_live(folder: Path, log: logging.Logger) -> duckdb.DuckDBPyConnection:
    """Open the folder's database for writing, with every table in place.

    A database that cannot be read, or that is not ours, is moved aside with its write-ahead log
    and a new one begun. Committed records that a damaged log lost are put on record as lost.
    """
    path, wal = folder / FILE_NAME, folder / (FILE_NAME + ".wal")
    _check_folder(folder, path)
    try:
        if wal.exists() and not path.exists():
            set_aside(folder, log, "a write-ahead log without its database")
        copy = _copy_log(wal)
        connection = _open_or_begin(folder, path, log)
        _set_up(connection)
        _check_progress(connection, folder, copy, log)
    except OSError as error:
        raise HistoryUnavailable(f"{folder}: {error.strerror}") from error
    except duckdb.Error as error:
        raise HistoryUnavailable(one_line(str(error))) from error
    return connection


def open_read_only(folder: Path) -> duckdb.DuckDBPyConnection:
    """Open the folder's database to read; HistoryLocked when a server holds it."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise HistoryUnavailable(f"no history in {folder}")
    try:
        return _connect(path, read_only=True)
    except duckdb.Error as error:
        raise HistoryUnavailable(f"{path} cannot be read: {one_line(str(error))}") from error


def set_aside(folder: Path, log: logging.Logger, reason: str) -> None:
    """Move the database and its log to a name that says when; nothing is deleted."""
    kept = _aside(folder)
    _move_log(folder, kept)
    _move(folder / FILE_NAME, kept)
    log.error("history moved aside to %s: %s", kept.name, reason)


def write_progress(folder: Path, progress: Progress) -> None:
    """Note how far commits went; not synced, since it guards against damage, not power loss."""
    _replace(folder / PROGRESS_NAME, msgspec.json.encode(progress))


def write_server_file(folder: Path, server: ServerFile) -> None:
    """Say which server holds the folder, so that `iterscope sql` finds it."""
    _replace(folder / SERVER_NAME, msgspec.json.encode(server))


def read_server_file(folder: Path) -> ServerFile | None:
    """Return which server said that it holds the folder; None when nobody did."""
    return _read(folder / SERVER_NAME, ServerFile)


def remove_server_file(folder: Path) -> None:
    """Take back what `write_server_file` of this process said."""
    server = read_server_file(folder)
    if server is not None and server.pid == os.getpid():
        (folder / SERVER_NAME).unlink(missing_ok=True)


def size_bytes(folder: Path) -> int:
    """Return the bytes of the database and its log."""
    total = 0
    for suffix in ("", ".wal"):
        try:
            total += (folder / (FILE_NAME + suffix)).stat().st_size
        except OSError:
            continue
    return total


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


def _connect(path: Path, *, read_only: bool = False) -> duckdb.DuckDBPyConnection:
    try:
        connection = duckdb.connect(path, read_only=read_only, config=CONNECT_OPTIONS)
    except duckdb.Error as error:
        text = str(error)
        if "Could not set lock" in text:
            raise HistoryLocked(f"another process holds {path}") from error
        if any(sign in text for sign in NO_ROOM):
            raise HistoryUnavailable(one_line(text)) from error
        raise
    for setting in SESSION_SETTINGS:
        connection.execute(setting)
    return connection


def _open_or_begin(folder: Path, path: Path, log: logging.Logger) -> duckdb.DuckDBPyConnection:
    """Open the database, or set what stands there aside and begin a new one."""
    try:
        connection = _connect(path)
    except duckdb.Error as error:
        connection = _open_without_log(folder, path, log, one_line(str(error)))
    if problem := _not_ours(connection):
        connection.close()
        set_aside(folder, log, problem)
        return _connect(path)
    return connection


def _open_without_log(
    folder: Path, path: Path, log: logging.Logger, reason: str
) -> duckdb.DuckDBPyConnection:
    """Open the state of the last checkpoint if only the log is at fault, else begin anew."""
    kept = _aside(folder)
    if _move_log(folder, kept):
        log.error("history's write-ahead log moved aside to %s.wal: %s", kept.name, reason)
        try:
            return _connect(path)
        except duckdb.Error as error:
            reason = one_line(str(error))
    _move(path, kept)  # the same name, so that the two open together again
    log.error("history moved aside to %s: %s", kept.name, reason)
    return _connect(path)


def _not_ours(connection: duckdb.DuckDBPyConnection) -> str | None:
    """Return why the database is not one that this version wrote, or None."""
    try:
        found: dict[str, list[tuple[str, str]]] = {}
        for table, column, kind in connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal "
            "ORDER BY table_oid, column_index"
        ).fetchall():
            found.setdefault(table, []).append((column, kind))
    except duckdb.Error as error:
        return one_line(str(error))
    if found and "run" not in found:
        return "a database of another program"
    for name, _, items in tables():
        wanted = [(item.name, shape(item.type).sql) for item in items]
        if name in found and found[name] != wanted:
            return f"table {name} was made by another version"
    return None


def _set_up(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("BEGIN")
    for statement in ddl():
        connection.execute(statement)
    connection.execute("COMMIT")
    # A change of tables that stands in the log alone may not replay after a kill.
    connection.execute("CHECKPOINT")


def _copy_log(wal: Path) -> Path | None:
    """Keep a copy of a log that a crash left: opening the database consumes it."""
    copy = wal.with_name(COPY_NAME)
    if not wal.is_file():
        copy.unlink(missing_ok=True)
        return None
    shutil.copyfile(wal, copy)
    return copy


def _check_progress(
    connection: duckdb.DuckDBPyConnection, folder: Path, copy: Path | None, log: logging.Logger
) -> None:
    """Compare what came back with what was committed; keep the log's copy if any is missing."""
    progress = _read(folder / PROGRESS_NAME, Progress)
    if progress is not None:
        generation, last = last_place(connection, progress.run_id)
        missing = progress.seq - last
        if missing > 0:
            log.error("history lost %d committed records of %s", missing, progress.run_id)
            connection.execute(
                f"INSERT INTO {LOST_TABLE} VALUES (?, ?, ?, ?, ?)",
                [progress.run_id, generation, last + 1, progress.seq, missing],
            )
            if copy is not None and copy.exists():
                kept = _aside(folder)
                copy.rename(kept.with_name(kept.name + ".wal"))
    if copy is not None:
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


def _aside(folder: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return folder / f"{FILE_NAME}.unreadable-{stamp}"


def _move(source: Path, target: Path) -> bool:
    if not source.exists():
        return False
    source.rename(target)
    return True


def _move_log(folder: Path, kept: Path) -> bool:
    # Its copy is for a log that opening consumes; this one stays.
    (folder / COPY_NAME).unlink(missing_ok=True)
    return _move(folder / (FILE_NAME + ".wal"), kept.with_name(kept.name + ".wal"))


def _replace(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.new")  # one writer: who holds the database
    temporary.write_bytes(content)
    temporary.replace(path)


def _read(path: Path, kind: type[_File]) -> _File | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
