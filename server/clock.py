"""The server's clock: nanoseconds since the server's start, the zero of every instant on record.

Owns the zero, which every engine that the server spawns is told, and the one pair of readings that
ties it to wall time. Used by everything in server/ that stamps an instant. Must never read the
wall clock for a duration: wall time is for display only and may step.
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """CLOCK_MONOTONIC from `zero_ns`; `started_unix_us` is the wall clock at that instant."""

    zero_ns: int
    started_unix_us: int

    @staticmethod
    def start() -> "Clock":
        """Return a clock whose zero is now."""
        return Clock(time.monotonic_ns(), time.time_ns() // 1000)

    def now_ns(self) -> int:
        """Return nanoseconds since the zero."""
        return time.monotonic_ns() - self.zero_ns
