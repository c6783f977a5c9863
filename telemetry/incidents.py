"""Recorded files: a range of the record copied into one file, and the folder that keeps a few.

Owns what such a file holds (every row of the range, whole requests, `incident` saying why it was
made), and the bound on the folder `incidents/`. recorder.py calls it in the server, `iterscope
record` on a folder or a file. A file is a segment of its own: whatever opens a segment opens it.
Must never leave half a file under its name.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from telemetry.catalog import attach, detach, literal
from telemetry.schema import quoted, tables
from telemetry.segments import SUFFIX, Segment, sync, write_segment
from telemetry.spans import LIES_IN, Page, Span

FOLDER_NAME = "incidents"
STAGED = ".staged"
ASKED = "-asked"
NOTING = "noting"
"""Alias of a file while its reason is put in; one at a time in a database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why a file was made: `reason` is one word such as slo, stall, crash or asked."""

    reason: str
    detail: str
    made_unix_us: int


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: list[list[Any]]
    truncated: bool = False


def asking(cursor: duckdb.DuckDBPyConnection) -> Callable[[str, Sequence[object]], Page]:
    """Return a way to ask a connection of ours without any limit."""

    def ask(sql: str, parameters: Sequence[object]) -> Page:
        return _Rows([list(row) for row in cursor.execute(sql, list(parameters)).fetchall()])

    return ask


def write_record(
    cursor: duckdb.DuckDBPyConnection,
    path: Path,
    spans: Sequence[Span],
    note: Note,
    *,
    stopped: Callable[[], bool] = bool,
) -> Segment:
    """Copy the spans that the cursor's catalog shows into a new file at `path`.

    The catalog must reach the file's folder. Raises duckdb.Error, OSError or segments.Stopped; then
    nothing is left.
    """
    staged = path.with_name(f".{path.name}{STAGED}")
    try:
        segment = write_segment(
            cursor, staged, level="record", contents=_contents(spans), stopped=stopped
        )
        _put_note(cursor, staged, note, spans)
        staged.rename(path)
    except BaseException:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return segment


def _contents(spans: Sequence[Span]) -> Iterator[tuple[str, str]]:
    for table, _, items in tables():
        names = ", ".join(quoted(item.name) for item in items)
        for span in spans:
            condition = f"run_id = $1 AND {LIES_IN[table]}"
            for place, value in (
                ("$1", literal(span.run_id)),
                ("$2", str(span.from_ns)),
                ("$3", str(span.to_ns)),
            ):
                condition = condition.replace(place, value)
            yield table, f"SELECT {names} FROM {table} WHERE {condition}"


def _put_note(
    cursor: duckdb.DuckDBPyConnection, path: Path, note: Note, spans: Sequence[Span]
) -> None:
    """Let the file say why it was made: a view of one row, since tables are the record's."""
    attach(cursor, path, NOTING, read_only=False)
    try:
        cursor.execute(
            f"CREATE VIEW {NOTING}.main.incident AS SELECT {literal(note.reason)} AS reason, "
            f"{literal(note.detail)} AS detail, {note.made_unix_us} AS made_unix_us, "
            f"{min(span.from_unix_us for span in spans)} AS from_unix_us, "
            f"{max(span.to_unix_us for span in spans)} AS to_unix_us"
        )
        cursor.execute(f"CHECKPOINT {NOTING}")
    finally:
        detach(cursor, NOTING)


# ---- the folder


def incident_path(folder: Path, note: Note) -> Path:
    """Return the name of a new file in a history's folder of incidents, which is made."""
    incidents = folder / FOLDER_NAME
    incidents.mkdir(exist_ok=True)
    made = datetime.fromtimestamp(note.made_unix_us / 1e6, UTC)
    word = re.sub(r"[^a-z0-9]+", "-", note.reason.lower()).strip("-")[:20] or "asked"
    return incidents / f"{made:%Y%m%dT%H%M%S.%f}-{word}{SUFFIX}"


def incident_files(folder: Path) -> list[Path]:
    """Return the finished files of a history's folder of incidents, oldest first."""
    found = (folder / FOLDER_NAME).glob(f"*{SUFFIX}")
    return sorted(path for path in found if not path.name.startswith("."))


def remove_leftovers(folder: Path) -> None:
    """Remove what a crash left half written."""
    for path in (folder / FOLDER_NAME).glob(f".*{STAGED}*"):
        path.unlink(missing_ok=True)


def keep_within(folder: Path, *, files_max: int, bytes_max: int) -> list[Path]:
    """Delete the oldest files above either bound, but never the newest; return them.

    What somebody asked for goes before what an alarm made: its asker has a copy. A quarter of the
    places is for the newest of either kind, since they may still be on their way to their askers.
    """
    kept, total, gone = 0, 0, []
    files = incident_files(folder)[::-1]
    new = max(1, files_max // 4)
    alarms_first = sorted(files[new:], key=lambda path: path.stem.endswith(ASKED))
    for path in [*files[:new], *alarms_first]:
        kept, total = kept + 1, total + path.stat().st_size
        if kept > 1 and (kept > files_max or total > bytes_max):
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone
