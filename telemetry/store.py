"""The live part of the history: the open database, batches going into it, older runs closed in it.

Owns the one writing connection and the archive beside it. history.py's thread makes it, feeds it
and closes it; nobody else touches it, readers get cursors of their own. A batch is stored whole or
not at all, and what cannot be stored is on record as lost.
"""

import logging
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import duckdb

from telemetry import database
from telemetry.archive import Archive
from telemetry.bus import Batch
from telemetry.catalog import LIVE
from telemetry.database import HistoryUnavailable
from telemetry.lost_ends import Closed, close_open_requests
from telemetry.notes import Progress, ProgressFile
from telemetry.records import KINDS, columns
from telemetry.schema import LOST_TABLE, tables
from telemetry.tail import Rows, Tail

_FIELDS = {name: attrgetter(*(c.name for c in columns(kind))) for name, kind in KINDS.items()}
"""Record to the tuple of its fields, by kind."""

RECORDS_AT_FAULT = (duckdb.DataError, duckdb.IntegrityError, duckdb.ProgrammingError)
ROWS_A_FETCH = 4096


class Store:
    """The live database of one run of the server. Opening raises HistoryUnavailable."""

    def __init__(
        self, folder: Path, run_id: str, log: logging.Logger, tail: Tail | None = None
    ) -> None:
        self._connection = database.open_live(folder, log)
        self._folder = folder
        self._run_id = run_id
        self._log = log
        self._tail = tail
        # Cursors are opened from a connection that never runs anything, so that no thread shares
        # one that is in use.
        self._root = self._connection.cursor()
        self._appenders: dict[str, duckdb.Appender] = {}
        self._progress: ProgressFile | None = None
        self.archive = Archive(self._root, folder, log, tail)
        self.records = 0
        self.lost = 0
        try:
            self._generation, self.last_seq = self._begin()
        except duckdb.Error as error:
            self._let_go()
            raise HistoryUnavailable(database.one_line(str(error))) from error
        except OSError as error:
            self._let_go()
            raise HistoryUnavailable(f"{folder}: {error.strerror}") from error

    def _begin(self) -> tuple[int, int]:
        """Put earlier runs in order; return this run's place, which is 0 and 0 when it is new."""
        self.archive.open()
        try:
            closed, place = self._put_in_order()
        except duckdb.Error:
            if not self.archive.check_all():
                raise
            closed, place = self._put_in_order()  # without the segment that was at fault
        if closed.lost:
            self._log.warning("history: %d requests of an earlier server ended", closed.lost)
        if closed.unknown:
            self._log.warning("history: %d ends were lost with other records", closed.unknown)
        self._rows_added = self._count_live() + self.archive.rows_moved
        self._connection.execute(f"USE {LIVE}")  # for the appenders
        return place

    def _put_in_order(self) -> tuple[Closed, tuple[int, int]]:
        cursor = self.cursor()
        try:
            if not self.archive.unread:  # what a newer version's segments hold is not missing
                database.check_progress(cursor, self._folder, self._log)
            closed = close_open_requests(cursor, self._run_id)
            return closed, database.last_place(cursor, self._run_id)
        finally:
            cursor.close()

    def _count_live(self) -> int:
        counts = [f"SELECT count(*) AS n FROM {LIVE}.main.{name}" for name, _, _ in tables()]
        row = self._root.execute(f"SELECT sum(n)::BIGINT FROM ({' UNION ALL '.join(counts)})")
        ((count,),) = row.fetchall()
        return int(count)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection to read with, for one thread."""
        return self._root.cursor()

    @property
    def live_count(self) -> int:
        """Rows in the live file."""
        return self._rows_added - self.archive.rows_moved

    def live_rows(self) -> Generator[Rows, None, None]:
        """Yield the live file's rows in pieces of one instant, for a tail that starts anew.

        For a thread of its own; raises HistoryUnavailable.
        """
        cursor = self.cursor()
        try:
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            for name, _, _ in tables():
                cursor.execute(f"FROM {LIVE}.main.{name}")
                while rows := cursor.fetchmany(ROWS_A_FETCH):
                    yield {name: rows}
        except duckdb.Error as error:
            raise HistoryUnavailable(database.one_line(str(error))) from error
        finally:
            cursor.close()

    def append(self, batch: Batch) -> None:
        """Store a batch, in one transaction, less what is stored already.

        Raises HistoryUnavailable when nothing can be stored; the batch may then be given again to
        the next store.
        """
        rows: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        if batch.lost and batch.lost_to > self.last_seq:
            rows[LOST_TABLE].append(self._loss(batch.lost_from, batch.lost_to))
            self._log.error("history lost %d records: the writer was too slow", batch.lost)
        entries = [entry for entry in batch.entries if entry.seq > self.last_seq]
        for entry in entries:
            fields = _FIELDS[entry.kind](entry.record)
            rows[entry.kind].append((self._run_id, entry.generation, entry.seq, *fields))
        if not rows:
            return
        first = batch.lost_from or entries[0].seq
        last = entries[-1].seq if entries else batch.lost_to
        try:
            self._write(rows)
            self.records += len(entries)
        except RECORDS_AT_FAULT as error:
            rows = defaultdict(list, {LOST_TABLE: [self._loss(first, last)]})
            reason = database.one_line(str(error))
            self._log.error("history could not store %d records: %s", last - first + 1, reason)
            self._write_or_fail(rows)
            self.lost += len(entries)
        except duckdb.Error as error:
            raise HistoryUnavailable(database.one_line(str(error))) from error
        if entries:
            self._generation = entries[-1].generation
        self.last_seq = last
        self._rows_added += sum(map(len, rows.values()))
        self._note(rows)

    def close(self) -> None:
        """Checkpoint and let go of the file; the upkeep must have ended."""
        self._forget()
        self._appenders.clear()
        if self._progress is not None:
            self._progress.close()
        self.archive.close()
        self._root.close()
        try:
            self._connection.execute(f"CHECKPOINT {LIVE}")
        finally:
            self._connection.close()

    def _let_go(self) -> None:
        self.archive.close()
        self._root.close()
        self._connection.close()

    def _note(self, rows: Rows) -> None:
        """Tell of what was committed: in the folder how far, to the tail what."""
        try:
            if self._progress is None:
                self._progress = ProgressFile(self._folder)
            self._progress.write(Progress(self._run_id, self.last_seq))
        except OSError as error:
            self._log.error("history could not note its progress: %s", error.strerror)
        if self._tail is not None:
            self._tail.feed(rows)

    def _write(self, rows: Rows) -> None:
        connection = self._connection
        several = len(rows) > 1  # what one flush writes is a transaction of its own
        try:
            if several:
                connection.execute("BEGIN")
            for table, new in rows.items():
                appender = self._appender(table)
                appender.append_rows(new)
                appender.flush()
            if several:
                connection.execute("COMMIT")
        except duckdb.Error:
            self._forget()
            # A commit that failed has ended its transaction already.
            with suppress(duckdb.Error):
                connection.execute("ROLLBACK")
            raise

    def _appender(self, table: str) -> duckdb.Appender:
        """Return the table's appender; to make one costs a fifth of a commit."""
        if table not in self._appenders:
            self._appenders[table] = self._connection.appender(table)
        return self._appenders[table]

    def _forget(self) -> None:
        """Let the appenders drop the rows of a batch that failed."""
        for appender in self._appenders.values():
            appender.clear()

    def _write_or_fail(self, rows: Rows) -> None:
        try:
            self._write(rows)
        except duckdb.Error as error:
            raise HistoryUnavailable(database.one_line(str(error))) from error

    def _loss(self, first: int, last: int) -> tuple[object, ...]:
        return self._run_id, self._generation, first, last, last - first + 1
