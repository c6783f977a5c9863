"""How long the device worked on a step: the clock around the calls, or a ring of CUDA events.

Owns device_ns. engine/runner.py calls begin and end around forward and sampling, and reads once
the step's tokens are on the host, so that reading never waits. Knows no plan and no record.
"""

from time import perf_counter_ns
from typing import Protocol

import torch

RING = 8
"""Steps that may be under way before the first of their events is read."""


class DeviceTimer(Protocol):
    """Marks the begin and the end of a step's device work; a mark is read once."""

    def begin(self) -> int:
        """Start a step's time; return its mark."""
        ...

    def end(self, mark: int) -> None:
        """End a step's time."""
        ...

    def read_ns(self, mark: int) -> int:
        """Return the device's own time in ns; the step's results have been awaited before."""
        ...


class CallTimer:
    """The time of the calls themselves: on a CPU they are the work."""

    def __init__(self) -> None:
        self._begun = [0] * RING
        self._spent = [0] * RING
        self._next = 0

    def begin(self) -> int:
        """Start a step's time; return its mark."""
        mark = self._next
        self._next = (mark + 1) % RING
        self._begun[mark] = perf_counter_ns()
        return mark

    def end(self, mark: int) -> None:
        """End a step's time."""
        self._spent[mark] = perf_counter_ns() - self._begun[mark]

    def read_ns(self, mark: int) -> int:
        """Return the ns between begin and end."""
        return self._spent[mark]


class CudaTimer:
    """A ring of event pairs on the current stream."""

    def __init__(self) -> None:
        self._pairs = [(event(), event()) for _ in range(RING)]
        self._next = 0

    def begin(self) -> int:
        """Record the first event of a pair; return its mark."""
        mark = self._next
        self._next = (mark + 1) % RING
        self._pairs[mark][0].record()
        return mark

    def end(self, mark: int) -> None:
        """Record the second event of a pair."""
        self._pairs[mark][1].record()

    def read_ns(self, mark: int) -> int:
        """Return the ns between the events."""
        first, second = self._pairs[mark]
        return int(first.elapsed_time(second) * 1e6)


def event() -> torch.cuda.Event:
    """Return an event that knows when it was reached."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def device_timer(device: str) -> DeviceTimer:
    """Return the timer for a device."""
    return CallTimer() if device == "cpu" else CudaTimer()
