"""One catalog over several files: a database in memory whose views span live file and segments.

Owns DuckDB's settings, the attaching of files, the comparison of a file's tables with ours, and the
views that carry the tables' names. database.py and archive.py build it for the server, and for
commands that read a folder. A file of an older version shows NULL, or a type's zero, in columns
that it lacks. Must never change a file: it only reads from what it attaches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import duckdb

from telemetry.records import Column
from telemetry.schema import LOST_TABLE, quoted, shape, tables, view_ddl

MEMORY, LIVE = "memory", "live"
"""The catalog's own name, and that of an attached live file."""

BASE_OPTIONS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # Without this a table name in SQL may name a Python variable of ours.
    "python_enable_replacements": "false",
    # One thread: queries must not take the engine's cores. No folder to spill to: a query that
    # needs more memory than this ends with an error instead of filling the disk.
    "threads": 1,
    "async_threads": 0,
    "memory_limit": "1GB",
    "temp_directory": "",
}
BASE_SETTINGS = (
    "SET GLOBAL TimeZone = 'UTC'",
    "SET enable_progress_bar = false",  # it prints to standard output after two seconds
)
STORAGE = "STORAGE_VERSION 'v1.2.0', ROW_GROUP_SIZE 32768"
"""Of files that we begin: DuckDB 1.4 and later read them, and a batch of 256 rows fits a merge."""

SEGMENT_TABLES = ("segment", "segment_source")
"""What a segment says of itself: no part of the record."""

ZEROS = {"BIGINT": "0", "VARCHAR": "''", "BOOLEAN": "false", "DOUBLE": "0.0"}

Fit = Literal["same", "older", "newer", "other"]
Columns = Mapping[str, Mapping[str, str]]
"""Table to column to DuckDB type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An attached database as a part of the catalog.

    `hidden` are rows that another part shows: of each run those up to this seq.
    """

    alias: str
    columns: Columns
    hidden: Mapping[str, int] = field(default_factory=dict)


def open_catalog() -> duckdb.DuckDBPyConnection:
    """Return a new catalog without parts; files can be attached until it is sealed."""
    connection = duckdb.connect(":memory:", config=BASE_OPTIONS)
    for setting in BASE_SETTINGS:
        connection.execute(setting)
    return connection


def seal(connection: duckdb.DuckDBPyConnection, folders: Iterable[Path] = ()) -> None:
    """Let SQL reach no file from here on, but in these folders, and change no setting."""
    allowed = ", ".join(literal(str(folder.resolve())) for folder in folders)
    connection.execute(f"SET allowed_directories = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def attach(
    connection: duckdb.DuckDBPyConnection, path: Path, alias: str, *, read_only: bool = True
) -> None:
    """Attach a file; a new one begins in a format that DuckDB 1.4 reads. Raises duckdb.Error."""
    options = ["TYPE duckdb"]  # or the library would find a reader for what is something else
    if read_only:
        options.append("READ_ONLY")
    elif not path.exists():
        options.append(STORAGE)
    connection.execute(f"ATTACH {literal(str(path.resolve()))} AS {alias} ({', '.join(options)})")


def detach(connection: duckdb.DuckDBPyConnection, alias: str) -> None:
    """Let go of a file; a query that reads it goes on to its end."""
    connection.execute(f"DETACH DATABASE IF EXISTS {alias}")


def columns_of(
    connection: duckdb.DuckDBPyConnection, aliases: Sequence[str]
) -> dict[str, dict[str, dict[str, str]]]:
    """Return the tables of attached databases with the types of their columns, by alias."""
    found: dict[str, dict[str, dict[str, str]]] = {alias: {} for alias in aliases}
    rows = connection.execute(
        "SELECT c.database_name, c.table_name, c.column_name, c.data_type FROM duckdb_columns() c "
        "SEMI JOIN duckdb_tables() t USING (database_name, table_oid) "
        "WHERE c.database_name IN (SELECT unnest($1)) ORDER BY c.table_oid, c.column_index",
        [list(aliases)],
    ).fetchall()
    for alias, table, column, kind in rows:
        found[alias].setdefault(table, {})[column] = kind
    return found


def without_empty(connection: duckdb.DuckDBPyConnection, parts: Sequence[Part]) -> list[Part]:
    """Return finished files as parts less the tables in which they have no row.

    A view takes as long to plan as it has arms, and few of a hundred segments hold a `run`.
    """
    rows = connection.execute(
        "SELECT database_name, table_name FROM duckdb_tables() WHERE estimated_size > 0"
    ).fetchall()
    filled = set(rows)
    return [
        replace(
            part,
            columns={
                table: columns
                for table, columns in part.columns.items()
                if (part.alias, table) in filled
            },
        )
        for part in parts
    ]


def fit(found: Columns) -> tuple[Fit, str]:
    """Return how a database's tables relate to ours, and what shows it.

    `newer` has what we do not know, `older` lacks what we know, `other` is not ours at all.
    """
    wanted = {name: items for name, _, items in tables()}
    if found and "run" not in found:
        return "other", "a database of another program"
    result: tuple[Fit, str] = ("same", "")
    for table, columns in found.items():
        if table not in wanted:
            if table not in SEGMENT_TABLES:
                return "newer", f"table {table} was made by another version"
            continue
        ours = {item.name: shape(item.type).sql for item in wanted[table]}
        if any(ours.get(column, kind) != kind for column, kind in columns.items()):
            return "other", f"table {table} was made by another version"
        if not columns.keys() <= ours.keys():
            return "newer", f"table {table} was made by another version"
        if list(columns) != list(ours):
            result = ("older", f"table {table} was made by an older version")
    if found and not wanted.keys() <= found.keys():
        result = ("older", f"no table {min(wanted.keys() - found.keys())}")
    return result


def rows_of(
    part: Part,
    table: str,
    items: Sequence[Column],
    *,
    through: Mapping[str, int] | None = None,
) -> str | None:
    """Return the SELECT of a part's rows of a table in our columns; None when it has no such.

    With `through` only the rows of those runs, each up to its seq.
    """
    has = part.columns.get(table)
    if has is None:
        return None
    columns = ", ".join(
        quoted(item.name) if item.name in has else f"{_blank(item)} AS {quoted(item.name)}"
        for item in items
    )
    if through is not None:
        where = f" WHERE {covered(table, through)}"
    else:
        where = f" WHERE NOT ({covered(table, part.hidden)})" if part.hidden else ""
    return f"SELECT {columns} FROM {part.alias}.main.{table}{where}"


def covered(table: str, through: Mapping[str, int]) -> str:
    """Return the condition for rows of these runs up to these seqs; a loss counts by its end."""
    place = "to_seq" if table == LOST_TABLE else "seq"
    runs = " OR ".join(
        f"(run_id = {literal(run_id)} AND {place} <= {seq})" for run_id, seq in through.items()
    )
    return runs or "false"


def show(connection: duckdb.DuckDBPyConnection, parts: Sequence[Part], *, first: bool) -> None:
    """Let the tables' names mean all rows of these parts, from one instant on.

    `first` makes the views that stand on those, such as `slice`, too; they last.
    """
    cursor = connection.cursor()  # its names mean the catalog's, whatever the caller's USE says
    try:
        cursor.execute("BEGIN")
        for statement in (*_views(parts), *(view_ddl() if first else ())):
            cursor.execute(statement)
        cursor.execute("COMMIT")
    finally:
        cursor.close()


def literal(text: str) -> str:
    """Return a text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


def _views(parts: Sequence[Part]) -> Iterator[str]:
    for name, _, items in tables():
        arms = [arm for part in parts if (arm := rows_of(part, name, items)) is not None]
        if not arms:
            blanks = ", ".join(f"{_blank(item)} AS {quoted(item.name)}" for item in items)
            arms = [f"SELECT {blanks} WHERE false"]
        yield f"CREATE OR REPLACE VIEW {MEMORY}.main.{name} AS {' UNION ALL '.join(arms)}"


def _blank(item: Column) -> str:
    """Return the value of a column that a file lacks, with its type."""
    of = shape(item.type)
    value = "NULL" if of.nullable else "[]" if of.is_list else ZEROS[of.sql]
    return f"CAST({value} AS {of.sql})"
