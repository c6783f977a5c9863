"""The children that answer SQL, as a test sees them: which there are, what they use, what they do.

Owns a history that is asked, looks into /proc, and the waits for a child to serve, to compute or to
end. Every wait has a deadline.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telemetry.queries import Queries
from tests import samples
from tests.histories import WAIT_S, kept, wait_for

ENDLESS = "SELECT count(*) FROM range(1000000000) a, range(1000) b"


@contextmanager
def answering(folder: Path, *, deadline_s: float) -> Iterator[Queries]:
    """Answer from a history of 50 steps with two requests each, until the block ends."""
    with kept(folder, "r", sql_deadline_s=deadline_s) as (bus, history):
        bus.publish(samples.run())
        for step in range(1, 51):
            bus.publish(samples.iteration(step, [1, 2]))
        assert history.flush(WAIT_S)
        yield history.queries


def status_kb(pid: int | str, name: str) -> int:
    """Return a memory figure of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(text.split(f"{name}:")[1].split()[0])


def pids(queries: Queries) -> list[int]:
    return queries.children()


def warm(queries: Queries) -> list[int]:
    """Wait until both children serve; return their process ids."""
    queries.start()
    wait_for(lambda: len(pids(queries)) == 2)
    return pids(queries)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken itself."""
    ticks = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def at_work(children: list[int], count: int) -> list[int]:
    """Wait until so many children compute, which only a query makes them do; return those."""
    before = {pid: cpu_s(pid) for pid in children}
    busy: list[int] = []

    def enough() -> bool:
        busy[:] = [pid for pid in children if cpu_s(pid) - before[pid] > 0.1]
        return len(busy) >= count

    wait_for(enough)
    return busy


def ended(pid: int) -> bool:
    """Tell whether a process has ended, if only nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] == "Z"
    except OSError:
        return True
