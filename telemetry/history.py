"""The history: one writer thread that moves records from the bus into DuckDB within a second.

Owns the thread, its reader of the bus, and the answer to "is history kept, and if not, why". The
server makes one; `POST /telemetry/sql` asks its `queries`. Must never make serving wait or fail:
whatever happens to the disk, the writer says so loudly, everything else goes on, and it tries again
until history is kept again; what the bus's ring still held by then is not lost.
"""

import logging
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb

from telemetry import database
from telemetry.bus import Batch, Bus, Reader
from telemetry.config import TelemetryConfig
from telemetry.database import HistoryLocked, HistoryUnavailable
from telemetry.notes import ServerFile, remove_server_file, write_server_file
from telemetry.queries import Queries
from telemetry.store import Store
from telemetry.tail import Rows
from telemetry.upkeep import Upkeep

LOOK_S = 0.2
"""How often the writer looks for work."""
COMMIT_S = 0.8
"""How old a record may be when it is stored, twice the time of a commit included.

A commit costs the same for one record as for many, nearly; a kill may lose a second, not more.
"""
FADING = 0.9
"""A slow commit is expected again for a while: what is expected of the next is so much of it."""
COMMIT_RECORDS_MAX = 4096
LOCK_PATIENCE_S = 5.0
RETRY_S = 5.0
OFF = "history is off"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStatus:
    """Whether records are kept, and what there is.

    `lost` counts records of this run that are not and will not be kept. `bytes`, `rows` and
    `segments` are of the whole history. `lag_s` is the time that stands in the live file alone,
    `behind_s` for how long a published record has not been written.
    """

    kept: bool
    degraded: bool
    reason: str | None
    folder: str | None
    records: int
    lost: int
    bytes: int
    rows: int
    segments: int
    lag_s: float
    behind_s: float


class History:
    """The writer thread, and the way to query what it wrote. Without a folder it keeps nothing."""

    def __init__(self, *, bus: Bus, config: TelemetryConfig) -> None:
        self._bus = bus
        self._config = config
        self._folder = Path(config.history).expanduser() if config.history else None
        self._log = logging.getLogger("iterscope.history")
        self._reader: Reader | None = None
        self._store: Store | None = None
        self._upkeep: Upkeep | None = None
        self._pending: Batch | None = None
        self._records_before = 0
        self._lost_before = 0
        self._thread: threading.Thread | None = None
        self._reason: str | None = None if self._folder else OFF
        self._url: str | None = None
        self._announced: str | None = None
        self._stored_seq = 0
        self._stored_at_s = time.monotonic()  # all that was published by then is stored
        self._took_s = 0.0
        self._stopping = False
        self._wake = threading.Event()
        self._news = threading.Condition()
        self.queries = Queries(
            self.live_rows,
            why_not=self._why_not,
            rows_max=config.sql_rows_max,
            deadline_s=config.sql_deadline_s,
            log=self._log,
        )

    # ---- for the server

    def start(self) -> None:
        """Begin to keep records, from the run's first; returns at once."""
        if self._folder is None:
            return
        self._reader = self._bus.reader(0, label="history")
        self._thread = threading.Thread(
            target=self._live, args=(self._folder, self._reader), name="history", daemon=True
        )
        self._thread.start()

    def announce(self, url: str) -> None:
        """Say in the folder that this server, at `url`, holds it, as soon as it does."""
        self._url = url
        self._wake.set()

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until all that is published now can be queried; False when it is not in time.

        Blocks: not for the event loop.
        """
        target = self._bus.head
        self._wake.set()
        with self._news:
            self._news.wait_for(
                lambda: self._stored_seq >= target or self._reason is not None, timeout_s
            )
        return self._stored_seq >= target

    @property
    def behind(self) -> int:
        """How many published records are not stored yet; the ring holds the newest of them."""
        return self._bus.head - self._stored_seq

    def status(self) -> HistoryStatus:
        """Return the state for /health, metrics and logs; from any thread, without waiting."""
        reader, store, upkeep = self._reader, self._store, self._upkeep
        folder, reason, pending = self._folder, self._reason, self._pending
        lost = self._lost_before + (store.lost if store else 0)
        if reader is not None:
            lost += reader.lost_total
            if reason is not None:
                lost += reader.behind + (len(pending.entries) if pending else 0)
        segments = store.archive.segments if store else ()
        kept_bytes = sum(segment.bytes for segment in segments)
        return HistoryStatus(
            kept=store is not None and reason is None,
            degraded=folder is not None and reason is not None,
            reason=reason,
            folder=str(folder) if folder else None,
            records=self._records_before + (store.records if store else 0),
            lost=lost,
            bytes=kept_bytes + (database.size_bytes(folder) if folder else 0),
            rows=sum(segment.rows for segment in segments) + (store.live_count if store else 0),
            segments=len(segments),
            lag_s=upkeep.lag_s if upkeep else 0.0,
            behind_s=time.monotonic() - self._stored_at_s if folder and self.behind else 0.0,
        )

    def live_rows(self) -> Generator[Rows, None, None]:
        """Yield the live file's rows of one instant, for a tail; raises HistoryUnavailable."""
        store = self._store
        if store is None:
            raise HistoryUnavailable(self._why_not() or "history was closed")
        yield from store.live_rows()

    @contextmanager
    def catalog(self) -> Iterator[tuple[Path, duckdb.DuckDBPyConnection]]:
        """Yield the folder and a connection to all it holds, from which no row leaves meanwhile.

        For one thread, and for seconds. It reaches no file outside the folder. Raises
        HistoryUnavailable.
        """
        store = self._store
        if store is None or self._folder is None:
            raise HistoryUnavailable(self._why_not() or "history was closed")
        with store.archive.still, closing(store.cursor()) as cursor:
            yield self._folder, cursor

    def close(self, deadline_s: float = 5.0) -> bool:
        """Store what is published, checkpoint, let go of the folder; False when out of time."""
        self.queries.close()
        if self._thread is None:
            return True
        self._stopping = True
        self._wake.set()
        self._thread.join(deadline_s)
        in_time = not self._thread.is_alive()
        if not in_time:
            self._log.error("history was not closed within %g s", deadline_s)
        return in_time

    def _why_not(self) -> str | None:
        """Return why nothing can be asked now; a history that stopped can still be."""
        return None if self._store is not None else self._reason or "history is not open yet"

    # ---- the writer thread

    def _live(self, folder: Path, reader: Reader) -> None:
        while True:
            try:
                self._store = store = self._open(folder)
                self._upkeep = Upkeep(store.archive, self._config, self._log)
                self._upkeep.start()
                while not self._turn(folder, reader, store):
                    self._await_work(reader)
            except HistoryUnavailable as error:
                self._degrade(str(error))
            except Exception as error:  # noqa: BLE001 - the top of a thread: serving must go on
                self._degrade(f"a fault of its own: {error!r}", trace=True)
            self._rest(folder)
            self._let_go(folder)
            if self._stopping:
                break
        reader.close()

    def _open(self, folder: Path) -> Store:
        patience = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                store = Store(folder, self._bus.run_id, self._log, self.queries)
            except HistoryLocked:
                # A reader such as `iterscope sql` holds the file for a moment only.
                if self._stopping or self._reason is not None or time.monotonic() > patience:
                    raise
                self._wake.wait(LOOK_S)
                self._wake.clear()
            else:
                self._log.info("history in %s", folder)
                return store

    def _turn(self, folder: Path, reader: Reader, store: Store) -> bool:
        """Store what was published; True when this was the last turn."""
        self._wake.clear()
        stopping = self._stopping
        self._announce(folder)
        head, head_at_s = self._bus.head, time.monotonic()
        while (batch := self._next(reader, head)) is not None:
            store.append(batch)
            self._pending = None
            with self._news:
                self._stored_seq = batch.entries[-1].seq if batch.entries else batch.lost_to
                self._news.notify_all()
        self._stored_at_s = head_at_s
        self._took_s = max(time.monotonic() - head_at_s, FADING * self._took_s)
        if database.size_bytes(folder) > self._config.history_bytes_max:
            limit = self._config.history_bytes_max
            raise HistoryUnavailable(f"its live file has reached the limit of {limit} bytes")
        if self._reason is not None:
            self._log.warning("history is kept again")
            self._reason = None
        return stopping

    def _await_work(self, reader: Reader) -> None:
        """Wait until somebody asks, or what was published is as old, or as much, as may wait."""
        due_at_s = self._stored_at_s + COMMIT_S - 2 * self._took_s
        while True:
            now_s, behind = time.monotonic(), reader.behind
            if not behind:
                self._stored_at_s = now_s
            elif now_s >= due_at_s or behind >= self._bus.capacity // 4:
                return
            if self._wake.wait(min(LOOK_S, due_at_s - now_s) if now_s < due_at_s else LOOK_S):
                return

    def _next(self, reader: Reader, head: int) -> Batch | None:
        """Return what to store next; a batch that could not be stored comes again."""
        if self._pending is None and reader.seq < head:
            self._pending = reader.take(COMMIT_RECORDS_MAX)
        return self._pending

    def _announce(self, folder: Path) -> None:
        url = self._url
        if url is None or url == self._announced:
            return
        server = ServerFile(url=url, pid=os.getpid(), run_id=self._bus.run_id)
        try:
            write_server_file(folder, server)
        except OSError as error:
            self._log.error("history could not name its server: %s", error.strerror)
        self._announced = url

    def _degrade(self, reason: str, *, trace: bool = False) -> None:
        if reason != self._reason:
            self._log.error("no history is kept from here on: %s", reason, exc_info=trace)
        with self._news:
            self._reason = reason
            self._news.notify_all()

    def _rest(self, folder: Path) -> None:
        """Wait until it is worth another try; what is stored can be asked meanwhile."""
        until = time.monotonic() + RETRY_S
        while not self._stopping and (time.monotonic() < until or not database.has_room(folder)):
            self._wake.wait(LOOK_S)
            self._wake.clear()

    def _let_go(self, folder: Path) -> None:
        store, self._store = self._store, None
        upkeep, self._upkeep = self._upkeep, None
        if store is None:
            return
        self._records_before += store.records
        self._lost_before += store.lost
        self._announced = None
        try:
            if upkeep is not None and not upkeep.stop():
                raise OSError("its upkeep does not end")
            remove_server_file(folder)
            store.close()
        except (duckdb.Error, OSError) as error:
            self._log.error("history was not closed cleanly: %s", error)
