"""The live part of the history: the open database, batches going into it, older runs closed in it.

Owns the one writing connection. history.py's thread makes it, feeds it and closes it; nobody else
touches it, readers get cursors of their own. A batch is stored whole or not at all, and what cannot
be stored is on record as lost. Closed spans will leave from here as segments.
"""

import logging
from collections import defaultdict
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import duckdb

from telemetry import database
from telemetry.bus import Batch
from telemetry.database import HistoryUnavailable, Progress
from telemetry.records import KINDS, columns
from telemetry.schema import LOST_TABLE

_FIELDS = {name: attrgetter(*(c.name for c in columns(kind))) for name, kind in KINDS.items()}
"""Record to the tuple of its fields, by kind."""

RECORDS_AT_FAULT = (duckdb.DataError, duckdb.IntegrityError, duckdb.ProgrammingError)

Rows = dict[str, list[tuple[object, ...]]]


class Store:
    """The live database of one run of the server. Opening raises HistoryUnavailable."""

    def __init__(self, folder: Path, run_id: str, log: logging.Logger) -> None:
        self._connection = database.open_live(folder, log)
        self._folder = folder
        self._run_id = run_id
        self._log = log
        self._generation = 0
        self.records = 0
        self.lost = 0
        # Cursors are opened from a connection that never runs anything, so that no thread shares
        # one that is in use.
        self._root = self._connection.cursor()
        closed = close_open_requests(self._connection, run_id)
        if closed:
            log.warning("history: %d requests of an earlier server ended as lost", closed)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection to read with, for one thread."""
        return self._root.cursor()

    def append(self, batch: Batch) -> None:
        """Store a batch, in one transaction; raises HistoryUnavailable when nothing can be."""
        rows: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        if batch.lost:
            lost = self._loss(self._generation, batch.lost_from, batch.lost_to)
            rows[LOST_TABLE].append(lost)
            self._log.error("history lost %d records: the writer was too slow", batch.lost)
        for entry in batch.entries:
            fields = _FIELDS[entry.kind](entry.record)
            rows[entry.kind].append((self._run_id, entry.generation, entry.seq, *fields))
        last = batch.lost_to
        if batch.entries:
            last, self._generation = batch.entries[-1].seq, batch.entries[-1].generation
        try:
            self._write(rows)
            self.records += len(batch.entries)
        except duckdb.Error as error:
            self.lost += len(batch.entries)
            self._write_off(batch.lost_from or batch.entries[0].seq, last, error)
        try:
            database.write_progress(self._folder, Progress(self._run_id, last))
        except OSError as error:
            self._log.error("history could not note its progress: %s", error.strerror)

    def close(self) -> None:
        """Checkpoint and let go of the file."""
        self._root.close()
        try:
            self._connection.execute("CHECKPOINT")
        finally:
            self._connection.close()

    def _write(self, rows: Rows) -> None:
        connection = self._connection
        connection.execute("BEGIN")
        try:
            for table, new in rows.items():
                appender = connection.appender(table)
                appender.append_rows(new)
                appender.flush()
            connection.execute("COMMIT")
        except duckdb.Error:
            # A commit that failed has ended its transaction already.
            with suppress(duckdb.TransactionException):
                connection.execute("ROLLBACK")
            raise

    def _write_off(self, first: int, last: int, error: duckdb.Error) -> None:
        """Put records that could not be stored on record as lost.

        Goes on only if the records were at fault: a disk that is full may take this small row and
        no batch, and would be tried four times a second for ever.
        """
        reason = database.one_line(str(error))
        self._log.error("history could not store %d records: %s", last - first + 1, reason)
        try:
            self._write({LOST_TABLE: [self._loss(self._generation, first, last)]})
        except duckdb.Error as again:
            raise HistoryUnavailable(database.one_line(str(again))) from error
        if not isinstance(error, RECORDS_AT_FAULT):
            raise HistoryUnavailable(reason) from error

    def _loss(self, generation: int, first: int, last: int) -> tuple[object, ...]:
        return self._run_id, generation, first, last, last - first + 1


def close_open_requests(connection: duckdb.DuckDBPyConnection, run_id: str) -> int:
    """Give every start of an earlier run that has no end its end, and return how many.

    Instants after the arrival are the last that the run had on record: nothing later is known.
    """
    names = ", ".join(LOST_END)
    values = ", ".join(LOST_END.values())
    try:
        found = connection.execute(f"{OPEN_STARTS} SELECT count(*) FROM open_start", [run_id])
        count: int = (found.fetchone() or (0,))[0]
        if count:
            connection.execute(
                f"INSERT INTO request_end ({names}) {OPEN_STARTS}, {WHAT_IS_KNOWN} SELECT {values}"
                " FROM open_start s JOIN place USING (run_id)"
                " LEFT JOIN work USING (run_id, request)"
                " LEFT JOIN receipt USING (run_id, request)",
                [run_id],
            )
    except duckdb.Error as error:
        raise HistoryUnavailable(database.one_line(str(error))) from error
    return count


OPEN_STARTS = """WITH open_start AS (
  SELECT * FROM request_start s
  WHERE run_id <> $1 AND NOT EXISTS (
    FROM request_end e WHERE e.run_id = s.run_id AND e.request = s.request)
)"""

WHAT_IS_KNOWN = """known AS (
  SELECT run_id, seq, 0 AS at_ns FROM run
  UNION ALL SELECT run_id, seq, arrived_at_ns FROM request_start
  UNION ALL SELECT run_id, seq, end_at_ns FROM iteration
  UNION ALL SELECT run_id, seq, released_at_ns FROM request_end
  UNION ALL SELECT run_id, seq, 0 FROM step_model
  UNION ALL SELECT run_id, seq, coalesce(last_write_at_ns, submitted_at_ns) FROM delivery
  UNION ALL SELECT run_id, seq, 0 FROM request_cause
  UNION ALL SELECT run_id, seq, 0 FROM request_share
  UNION ALL SELECT run_id, seq, rejected_at_ns FROM rejection
  UNION ALL SELECT run_id, seq, fault_at_ns FROM fault
  UNION ALL SELECT run_id, to_seq, 0 FROM telemetry_lost
), place AS (
  SELECT run_id, max(seq) AS last_seq, max(at_ns) AS last_at_ns FROM known
  WHERE run_id IN (SELECT run_id FROM open_start) GROUP BY run_id
), work AS (
  SELECT run_id, request, count(*) AS iterations, min(begin_at_ns) AS first_scheduled_at_ns,
    max(start_position + token_count) AS computed_tokens
  FROM slice SEMI JOIN open_start USING (run_id, request) GROUP BY run_id, request
), receipt AS (
  SELECT run_id, request, min(received_at_ns) AS received_at_ns
  FROM delivery SEMI JOIN open_start USING (run_id, request) GROUP BY run_id, request
)"""

LOST_END = {
    "run_id": "s.run_id",
    "generation": "s.generation",
    "seq": "last_seq + row_number() OVER (PARTITION BY s.run_id ORDER BY s.seq)",
    "request": "s.request",
    "request_id": "s.request_id",
    "external_id": "s.external_id",
    "parent_id": "s.parent_id",
    "tenant": "s.tenant",
    "received_at_ns": "coalesce(receipt.received_at_ns, s.arrived_at_ns)",
    "arrived_at_ns": "s.arrived_at_ns",
    "admitted_at_ns": "NULL",
    "first_scheduled_at_ns": "work.first_scheduled_at_ns",
    "prefill_finished_at_ns": "NULL",
    "first_token_at_ns": "NULL",
    "cancel_requested_at_ns": "NULL",
    "decided_at_ns": "last_at_ns",
    "freed_at_ns": "NULL",
    "released_at_ns": "last_at_ns",
    "prompt_tokens": "s.prompt_tokens",
    "cached_tokens": "0",
    "output_tokens": "greatest(0, coalesce(work.computed_tokens, 0) - s.prompt_tokens + 1)",
    "recomputed_tokens": "0",
    "dropped_tokens": "0",
    "wasted_tokens": "0",
    "preemptions": "0",
    "iterations": "coalesce(work.iterations, 0)",
    "finish": "'error'",
    "cancel_cause": "NULL",
    "error": "'server lost'",
}
"""Column of request_end to its expression; a test holds the names against the record."""
