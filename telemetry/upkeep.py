"""The upkeep of a history: a second thread that rotates, merges, checks and lets segments go.

Owns the thread and its clock. history.py starts one beside each open store and stops it before the
store closes. Works on a cursor of its own and rests between pieces, so that neither the writer nor
the engine waits for it; never at a lower priority, since a thread that holds Python's lock and does
not get the processor stops the whole server. What fails is logged and tried again.
"""

import logging
import threading
import time
from collections.abc import Callable

import duckdb

from telemetry.archive import Archive
from telemetry.config import TelemetryConfig
from telemetry.segments import Stopped

REST = 3.0
"""A merge rests so many times as long as it worked: it takes a quarter of a core, not all."""
REST_S_MAX = 5.0
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
        self._rotated_at = self._resumed_at = time.monotonic()
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
            self._resumed_at = time.monotonic()
            if not archive.merge(self._now_us(), self._pause) and not archive.check_next():
                return

    def _pause(self) -> bool:
        """Rest after a piece of work; True when it is time to stop."""
        self._stop.wait(min(REST * (time.monotonic() - self._resumed_at), REST_S_MAX))
        self._resumed_at = time.monotonic()
        return self._stop.is_set()

    def _tell(self, reason: str) -> None:
        if self._stop.is_set() or reason == self._told:
            return
        self._told = reason
        self._log.error("history upkeep failed and will try again: %s", reason)
