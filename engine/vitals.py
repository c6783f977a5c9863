"""What an engine shows of itself when it cannot be asked: a pulse, and the stacks of its threads.

Owns two files in the engine's private folder. The engine beats while it works, and its stacks are
written by a signal or by a crash, in C, so that both work while it is stuck in native code; the
server reads them. Must never wait, lock, or need the other side to be alive.
"""

import faulthandler
import mmap
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PULSE_FILE = "pulse"
STACKS_FILE = "stacks"
STACKS_SIGNAL = signal.SIGUSR1
STACKS_BYTES_MAX = 64 * 1024
PULSE_BYTES = 8


class Pulse:
    """A count in memory that two processes share: it moves as long as there is progress.

    One writer, the engine: at each layer of a step, and of the model while it is loaded.
    """

    def __init__(self, folder: Path) -> None:
        with (folder / PULSE_FILE).open("a+b") as file:
            file.truncate(PULSE_BYTES)
            self._memory = mmap.mmap(file.fileno(), PULSE_BYTES)
        self._count = memoryview(self._memory).cast("Q")

    def beat(self) -> None:
        """Tell whoever looks that something was done."""
        self._count[0] += 1

    def read(self) -> int:
        """Return how often it has beaten."""
        return self._count[0]


@contextmanager
def stacks_on_demand(folder: Path) -> Iterator[None]:
    """Write every thread's stack into the folder at STACKS_SIGNAL, and at a crash."""
    with (folder / STACKS_FILE).open("wb") as file:
        faulthandler.enable(file, all_threads=True)
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)
            faulthandler.disable()


def read_stacks(folder: Path) -> str:
    """Return what has been written of stacks, STACKS_BYTES_MAX at most; empty if nothing has."""
    try:
        with (folder / STACKS_FILE).open("rb") as file:
            return file.read(STACKS_BYTES_MAX).decode("utf-8", "replace")
    except (
        OSError
    ):  # it never came so far, or no file can be opened: the death is told all the same
        return ""
