"""The archive of one history: its segments, attached, rotated into, merged, let go.

Owns the folder `segments/`, its ledger, and which parts the catalog's views span. The thread that
opens the history opens it; from then on the upkeep's thread alone calls it. A crash between any two
statements here leaves every row in exactly one place at the next start. Must never write to the
live file but to delete what a finished segment holds.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import duckdb

from telemetry import ledger
from telemetry.catalog import LIVE, Part, columns_of, covered, detach, fit, literal, rows_of, show
from telemetry.database import aside, begin_anew, size_bytes
from telemetry.ledger import Entry
from telemetry.retention import due_merge, expired
from telemetry.schema import LOST_TABLE, tables
from telemetry.segments import (
    FOLDER_NAME,
    Level,
    Segment,
    SegmentDamaged,
    doubled,
    open_segment,
    reach_of,
    remove_leftovers,
    segment_files,
    segment_path,
    write_segment,
)
from telemetry.tail import Tail

RENEW_BYTES = 256 * 2**20
"""A live file above this is begun anew at the next start."""


class Archive:
    """The segments of a history folder, and the catalog (`connection`) that shows them."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        folder: Path,
        log: logging.Logger,
        tail: Tail | None = None,
    ) -> None:
        self._cursor = connection.cursor()
        self._folder = folder
        self._log = log
        self._tail = tail
        self._live = Part(alias=LIVE, columns=columns_of(self._cursor, [LIVE])[LIVE])
        self._parts: dict[str, Part] = {}
        self._leaving: list[str] = []  # aliases that a query may still read
        self._ledger: dict[str, Entry] = {}
        self._read: set[str] = set()  # segments whose every byte was read in this life
        self._aliases = 0
        self._segments: tuple[Segment, ...] = ()
        self.lost_records = 0
        self.unread = 0
        self.rows_moved = 0
        self.still = threading.Lock()
        """Who holds it sees every row once, however long it reads: none leaves a file meanwhile."""

    # ---- what others ask

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that the views show; from any thread."""
        return self._segments

    def interrupt(self) -> None:
        """Stop the statement at work; from any thread."""
        self._cursor.interrupt()

    def close(self) -> None:
        """Let go of the catalog; the files stay."""
        self._cursor.close()

    # ---- at start

    def open(self, *, renew_above: int = RENEW_BYTES) -> None:
        """Take in the folder's segments and let the views show them; raises duckdb.Error, OSError.

        Whatever a crash left is put right: half a file, sources of a merge that was done, live rows
        that a segment holds. What is damaged or gone counts as lost.
        """
        (self._folder / FOLDER_NAME).mkdir(exist_ok=True)
        for name in remove_leftovers(self._folder):
            self._log.warning("history: removed %s, which a crash left half written", name)
        self._ledger = ledger.read_ledger(self._folder)
        paths = segment_files(self._folder)
        lost = dict.fromkeys(self._ledger.keys() - {path.name for path in paths}, "it is gone")
        for path in paths:
            try:
                self._adopt(path)
            except SegmentDamaged as error:
                lost[path.name] = str(error)
        merged = doubled(self._segments)
        doubles = [segment for segment in self._segments if segment.path.name in merged]
        self._forget(doubles)
        self._detach_left()
        reach = reach_of(self._segments)
        self._delete({run_id: reach.get(run_id, 0) for run_id in self._in_live()})
        show(self._cursor, [self._live, *self._parts.values()], first=True)
        for name, reason in lost.items():
            if name in merged:
                self._ledger.pop(name, None)
                (self._folder / FOLDER_NAME / name).unlink(missing_ok=True)
            else:
                self._mourn(name, reason)
        self._write_ledger()
        self._unlink(doubles)
        if fit(self._live.columns)[0] == "older" or size_bytes(self._folder) > renew_above:
            self._renew()
        self._show()

    def _renew(self) -> None:
        """Begin a new live file, once all that the old one held is a segment.

        So an older version's file is renewed, and one that grew is given back: deleting rows frees
        space inside a file, never the file's own.
        """
        self._log.warning("history: the live file becomes a segment, and another is begun")
        self.rotate()
        assert not self._in_live()
        begin_anew(self._cursor, self._folder)
        self._live = Part(alias=LIVE, columns=columns_of(self._cursor, [LIVE])[LIVE])

    def _adopt(self, path: Path) -> None:
        """Attach a segment and make it a part; one of a newer version is left alone."""
        self._aliases += 1
        found = open_segment(self._cursor, path, f"segment_{self._aliases}")
        if found is None:
            self._log.error("history: segment %s of a newer version stays unread", path.name)
            self.unread += 1
            return
        segment, part = found
        entry = self._ledger.get(path.name)
        if entry is not None and entry.bytes != segment.bytes:
            detach(self._cursor, part.alias)
            raise SegmentDamaged(f"it has {segment.bytes} bytes, not {entry.bytes}")
        self._parts[path.name] = part
        self._ledger[path.name] = entry or ledger.entry_of(segment)
        self._segments = (*self._segments, segment)

    # ---- upkeep

    def rotate(self) -> bool:
        """Move all live rows into a new segment; True when there were any.

        The file is whole, named and on the disk before a row is deleted; in between the views show
        the rows from the segment alone. Raises duckdb.Error or OSError, and then nothing is lost.
        """
        self._detach_left()
        self._delete(self._live.hidden)  # what an earlier turn could not
        through = self._in_live()
        if not through:
            return False
        segment = self._write("minute", self._selects([self._live], through))
        self._take_in(segment, hidden=through)
        self._delete(through)
        self.rows_moved += segment.rows
        return True

    def merge(self, now_us: int, stopped: Callable[[], bool]) -> bool:
        """Do the next merge that is due; True when there was one. Raises as `rotate`, and Stopped.

        The merged file names its sources: one that a crash leaves beside it is known for a double.
        """
        due = due_merge(self._segments, now_us)
        if due is None:
            return False
        level, sources = due
        self._detach_left()
        names = [source.path.name for source in sources]
        selects = self._selects([self._parts[name] for name in names])
        try:
            merged = self._write(level, selects, names, stopped)
        except duckdb.Error:
            if not self._check_these(sources):
                raise
            return True  # the one at fault has left; the rest is merged in another turn
        self._take_in(merged, sources)
        return True

    def retire(self, now_us: int, *, days: float, bytes_max: int) -> bool:
        """Delete segments by age, and by size with the live file; True if there were any."""
        room = bytes_max - size_bytes(self._folder)
        gone = expired(self._segments, now_us=now_us, days=days, bytes_max=room)
        if not gone:
            return False
        rows = sum(segment.rows for segment in gone)
        self._log.info("history: retention deletes %d segments with %d rows", len(gone), rows)
        self._forget(gone)
        self._show()
        self._write_ledger()  # first: a file that the ledger does not miss may go
        self._unlink(gone)
        return True

    def check_next(self) -> bool:
        """Read one segment that this life has not read yet; True when there was one.

        DuckDB notices a damaged block only when a query needs it: that must not be an operator's.
        """
        for segment in self._segments:
            if segment.path.name not in self._read:
                self._check(segment)
                return True
        return False

    def check_all(self) -> bool:
        """Read all segments at once; True when one was let go."""
        return self._check_these(self._segments)

    def _check_these(self, segments: Sequence[Segment]) -> bool:
        return sum(self._check(segment) for segment in segments) > 0

    def _check(self, segment: Segment) -> bool:
        """Compare a segment with its checksum; one that differs is let go, which is True."""
        name = segment.path.name
        entry, reason = self._ledger[name], "its checksum is another"
        try:
            found = ledger.checksum(segment.path)
        except OSError as error:
            found, reason = "", f"it cannot be read: {error.strerror}"
        if not entry.sha256 and found:
            self._ledger[name] = ledger.entry_of(segment, found)
            self._write_ledger()
        elif entry.sha256 != found:
            self._forget([segment], keep_entry=True)
            self._show()
            self._mourn(name, reason)
            self._write_ledger()
            return True
        self._read.add(name)
        return False

    def _mourn(self, name: str, reason: str) -> None:
        """Move a segment that cannot be used aside and put a file with its loss in its place."""
        path = self._folder / FOLDER_NAME / name
        if path.exists():
            path.rename(aside(path))
        entry = self._ledger.get(name)
        if entry is None:
            self._log.error("history lost segment %s, with what nobody knows: %s", name, reason)
            return
        losses = {run_id: (first, last) for run_id, (first, last) in entry.runs.items()}
        count = sum(last - first + 1 for first, last in losses.values())
        self._log.error("history lost segment %s with %d records: %s", name, count, reason)
        values = ", ".join(
            f"({literal(run_id)}, 0, {first}, {last}, {last - first + 1})"
            for run_id, (first, last) in losses.items()
        )
        self.lost_records += count
        if losses:
            self._take_in(self._write("minute", [(LOST_TABLE, f"VALUES {values}")]))
        self._ledger.pop(name, None)

    # ---- parts

    def _selects(
        self, parts: Sequence[Part], through: Mapping[str, int] | None = None
    ) -> list[tuple[str, str]]:
        return [
            (name, select)
            for name, _, items in tables()
            for part in parts
            if (select := rows_of(part, name, items, through=through)) is not None
        ]

    def _write(
        self,
        level: Level,
        contents: Sequence[tuple[str, str]],
        sources: Sequence[str] = (),
        stopped: Callable[[], bool] = bool,
    ) -> Segment:
        path = segment_path(self._folder, level)
        return write_segment(
            self._cursor, path, level=level, contents=contents, sources=sources, stopped=stopped
        )

    def _take_in(
        self,
        segment: Segment,
        instead_of: Sequence[Segment] = (),
        hidden: Mapping[str, int] | None = None,
    ) -> None:
        """Make a finished segment a part, instead of sources or of live rows up to `hidden`.

        One that cannot be read back is removed, and what it was made of stays: OSError.
        """
        name = segment.path.name
        try:
            self._adopt(segment.path)
        except SegmentDamaged as error:
            segment.path.unlink(missing_ok=True)
            raise OSError(f"{name} cannot be read back: {error}") from error
        self._ledger[name] = ledger.entry_of(segment, ledger.checksum(segment.path))
        self._read.add(name)
        self._forget(instead_of)
        if hidden is not None:
            self._live = replace(self._live, hidden=hidden)
        self._show()
        self._write_ledger()
        self._unlink(instead_of)

    def _forget(self, segments: Sequence[Segment], *, keep_entry: bool = False) -> None:
        """Take segments out of the parts; their files are let go when no query reads them."""
        names = {segment.path.name for segment in segments}
        for name in names:
            self._leaving.append(self._parts.pop(name).alias)
            self._read.discard(name)
            if not keep_entry:
                self._ledger.pop(name, None)
        self._segments = tuple(s for s in self._segments if s.path.name not in names)

    def _detach_left(self) -> None:
        with self.still:
            while self._leaving:
                detach(self._cursor, self._leaving.pop())

    def _show(self) -> None:
        """Let the views, and who follows, know the parts of this moment."""
        show(self._cursor, [self._live, *self._parts.values()], first=False)
        if self._tail is not None:
            paths = [segment.path for segment in self._segments]
            self._tail.rotate(paths, reach_of(self._segments))

    def _write_ledger(self) -> None:
        ledger.write_ledger(self._folder, self._ledger)

    @staticmethod
    def _unlink(segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.path.unlink(missing_ok=True)

    # ---- live rows

    def _in_live(self) -> dict[str, int]:
        """Return the newest seq of each run that has rows in the live file."""
        parts = [
            f"SELECT run_id, {'to_seq' if name == LOST_TABLE else 'seq'} AS seq FROM {LIVE}.{name}"
            for name in self._live.columns
        ]
        rows = self._cursor.execute(
            f"SELECT run_id, max(seq) FROM ({' UNION ALL '.join(parts)}) GROUP BY run_id"
        ).fetchall()
        return dict(rows)

    def _delete(self, through: Mapping[str, int]) -> None:
        """Delete live rows that a segment holds, in one transaction."""
        if not through:
            return
        with self.still:
            self._cursor.execute("BEGIN")
            try:
                for name in self._live.columns:
                    where = covered(name, through)
                    self._cursor.execute(f"DELETE FROM {LIVE}.{name} WHERE {where}")
                self._cursor.execute("COMMIT")
            except duckdb.Error:
                with suppress(duckdb.Error):
                    self._cursor.execute("ROLLBACK")
                raise
