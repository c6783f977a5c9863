"""The flight recorder: one thread that copies a range of the history into a file, asked or alarmed.

Owns the thread, the order of recordings and the folder's bounds. server/record_api.py asks it for
one; alarms.py tells it when to make one by itself. What it records by itself is also a Fault and a
line of the log. Works at the lowest priority and one at a time: serving never waits for it.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import duckdb

from telemetry.alarms import MARK, Alarm, Alarms, Rules
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.database import HistoryUnavailable, one_line
from telemetry.history import History
from telemetry.incidents import (
    Note,
    asking,
    incident_path,
    keep_within,
    remove_leftovers,
    write_record,
)
from telemetry.records import Fault
from telemetry.segments import Stopped
from telemetry.spans import BadRange, TimeRange, spans_of

PERIOD_S = 1.0
WAITING_MAX = 2
TAKE_MAX = 4096
FLUSH_S = 2.0
LONGEST_S = 24 * 3600
NICENESS = 19


class RecorderBusy(Exception):
    """Too many recordings wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the recorder asks of the server: its clock, its engine, and a way to publish a Fault."""

    now_ns: Callable[[], int]
    stalled_s: Callable[[], float]
    publish: Callable[[Fault], None]


@dataclass(frozen=True, slots=True)
class _Job:
    asked: TimeRange
    note: Note
    done: "Future[Path]"


class Recorder:
    """The thread of one server. Without a history it refuses, and raises no alarm."""

    def __init__(
        self, *, bus: Bus, history: History, config: TelemetryConfig, rules: Rules, watched: Watched
    ) -> None:
        self._bus = bus
        self._history = history
        self._config = config
        self._watched = watched
        self._alarms = Alarms(rules)
        self._log = logging.getLogger("iterscope.recorder")
        self._jobs: queue.Queue[_Job] = queue.Queue(WAITING_MAX)
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._live, name="recorder", daemon=True)

    # ---- for the server

    def start(self) -> None:
        """Begin to watch; returns at once."""
        self._thread.start()

    def record(self, asked: TimeRange, note: Note) -> "Future[Path]":
        """Return the file of a range, once it is made; raises RecorderBusy at once.

        The future raises BadRange, HistoryUnavailable or OSError.
        """
        job = _Job(asked, note, Future())
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise RecorderBusy from None
        self._wake.set()
        return job.done

    def stop(self, deadline_s: float = 5.0) -> bool:
        """End; what is being made is given up. False when it is not over in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # ---- its thread

    def _live(self) -> None:
        if sys.platform == "linux":  # elsewhere this would slow the whole process down
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        with self._bus.reader(0, label="recorder") as reader:
            while not self._stopping:
                self._wake.wait(PERIOD_S)
                self._wake.clear()
                while not self._jobs.empty():
                    self._answer(self._jobs.get_nowait())
                while reader.behind and not self._stopping:
                    for entry in reader.take(TAKE_MAX).entries:
                        self._alarms.see(entry.record)
                watched = self._watched
                for alarm in self._alarms.raised(
                    now_ns=watched.now_ns(), stalled_s=watched.stalled_s()
                ):
                    self._sound(alarm)
        while not self._jobs.empty():
            self._jobs.get_nowait().done.set_exception(HistoryUnavailable("the server stops"))

    def _answer(self, job: _Job) -> None:
        if not job.done.set_running_or_notify_cancel():
            return
        try:
            job.done.set_result(self._make(job.asked, job.note))
        except Exception as error:  # noqa: BLE001 - the top of a thread: it is the asker's to see
            job.done.set_exception(error)

    def _sound(self, alarm: Alarm) -> None:
        """Put an alarm on record, record what led to it, and say so."""
        if not self._config.incidents or self._history.status().folder is None:
            return
        now_ns = self._watched.now_ns()
        line = f"{alarm.reason}: {alarm.detail}"
        fault = Fault(fault_at_ns=now_ns, step=None, where=MARK, error=line, traceback="")
        note = Note(reason=alarm.reason, detail=alarm.detail, made_unix_us=time.time_ns() // 1000)
        last_us = int(self._config.incident_s * 1e6)
        try:
            self._watched.publish(fault)
            path = self._make(TimeRange(last_us=last_us, run_id=self._bus.run_id), note)
        except (HistoryUnavailable, BadRange, OSError) as error:
            self._log.error("incident: %s; it could not be recorded: %s", line, error)
        except Stopped:
            self._log.error("incident: %s; not recorded, the server stops", line)
        except Exception:  # noqa: BLE001 - the top of a thread: it must go on watching
            self._log.exception("incident: %s; the recorder met a fault of its own", line)
        else:
            self._log.error("incident: %s; recorded in %s", line, path)

    def _make(self, asked: TimeRange, note: Note) -> Path:
        """Record a range of all that is published so far."""
        self._history.flush(FLUSH_S)
        try:
            with self._history.catalog() as (folder, cursor):
                spans = spans_of(asking(cursor), asked, now_unix_us=self._now_unix_us(note))
                if sum(span.to_ns - span.from_ns for span in spans) > LONGEST_S * 1e9:
                    hours = LONGEST_S // 3600
                    raise BadRange(f"a server records at most {hours} hours at once")
                path = incident_path(folder, note)
                remove_leftovers(folder)
                write_record(cursor, path, spans, note, stopped=lambda: self._stopping)
        except duckdb.Error as error:
            raise HistoryUnavailable(one_line(str(error))) from error
        self._bound(folder)
        return path

    def _now_unix_us(self, note: Note) -> int:
        """Return the present as the record has it: the wall clock may have stepped since."""
        run = self._bus.snapshot().run
        if run is None:
            return note.made_unix_us
        return run.started_unix_us + self._watched.now_ns() // 1000

    def _bound(self, folder: Path) -> None:
        config = self._config
        gone = keep_within(
            folder, files_max=config.incidents_max, bytes_max=config.incidents_bytes_max
        )
        if gone:
            self._log.warning("incidents: %d of the oldest files deleted", len(gone))
