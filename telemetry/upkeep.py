"""The upkeep of a history: a second thread that rotates, merges, checks and lets segments go.

Owns the thread and its clock. history.py starts one beside each open store and stops it before the
store closes. Works at a low priority, on a cursor of its own, so that neither the writer nor
the engine waits for it. Whatever fails here is logged and tried again: no record depends on it.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import duckdb

from telemetry.archive import Archive
from telemetry.config import TelemetryConfig
from telemetry.segments import Stopped

NICENESS = 10
"""Enough to stay behind the engine, and not so much that an engine that never rests starves it."""
STOP_S = 5.0


def wall_us() -> int:
    """Return the wall clock [us since 1970]."""
    return time.time_ns() // 1000


class Upkeep:
    """The upkeep thread of one open archive."""

    def __init__(
        self,
        archive: Archive,
        config: TelemetryConfig,
        log: logging.Logger,
        now_us: Callable[[], int] = wall_us,
    ) -> None:
        self._archive = archive
        self._config = config
        self._log = log
        self._now_us = now_us
        self._stop = threading.Event()
        self._told: str | None = None
        self._rotated_at = time.monotonic()
        self._thread = threading.Thread(target=self._live, name="history upkeep", daemon=True)

    @property
    def lag_s(self) -> float:
        """Seconds since the last rotation: how much of the record stands in the live file alone."""
        return time.monotonic() - self._rotated_at

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> bool:
        """End in the middle of whatever is at work; False when it does not end in time."""
        self._stop.set()
        deadline = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._archive.interrupt()  # one that falls between two statements is forgotten
            self._thread.join(0.02)
        return not self._thread.is_alive()

    def _live(self) -> None:
        if sys.platform == "linux":  # elsewhere this would slow the whole process down
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stop.wait(self._config.history_segment_s):
            try:
                self._turn()
                self._told = None
            except Stopped:
                return
            except (duckdb.Error, OSError) as error:
                self._tell(" ".join(str(error).split()))
            except Exception:  # noqa: BLE001 - the top of a thread: it must go on
                self._log.exception("history upkeep met a fault of its own")

    def _turn(self) -> None:
        """Rotate, let go what is old, then merge and check until it is time to rotate again."""
        archive, stopped = self._archive, self._stop.is_set
        archive.rotate()
        self._rotated_at = time.monotonic()
        archive.retire(
            self._now_us(),
            days=self._config.history_days,
            bytes_max=self._config.history_bytes_max,
        )
        while not stopped() and self.lag_s < self._config.history_segment_s:
            if not archive.merge(self._now_us(), stopped) and not archive.check_next():
                return

    def _tell(self, reason: str) -> None:
        if self._stop.is_set() or reason == self._told:
            return
        self._told = reason
        self._log.error("history upkeep failed and will try again: %s", reason)
