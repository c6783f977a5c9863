"""Histories for tests: a real one for a block of code, a look into its file, a writer that dies.

Owns the start and the orderly end of a history in a test, and the process that is killed while it
writes. Every wait has a deadline.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.source import history_source
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 15.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


@contextmanager
def kept(folder: Path, run_id: str, **settings: Any) -> Iterator[tuple[Bus, History]]:
    """Keep a history of a new run in the folder, until the block ends."""
    bus = Bus(run_id=run_id, capacity=1000)
    history = History(bus=bus, config=TelemetryConfig(history=str(folder), **settings))
    history.start()
    try:
        wait_for(lambda: history.status().kept or history.status().reason is not None)
        yield bus, history
    finally:
        assert history.close(WAIT_S)


def ask(history: History, sql: str) -> list[list[Any]]:
    return history.queries.run(sql).rows


def read(folder: Path, sql: str) -> list[list[Any]]:
    """Ask the folder itself, as `iterscope sql` does once no server holds it."""
    with history_source(folder) as source:
        return source.ask(sql).rows


def aside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".unreadable-" in path.name)


WRITER = """
import sys
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples

bus = Bus(run_id=sys.argv[2], capacity=4096)
history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1]))
history.start()
bus.publish(samples.run())
step = 0
while sys.stdin.readline():
    for _ in range(20):
        step += 1
        bus.publish(samples.iteration(step, [1, 2, 3]))
        bus.publish(samples.start(step))
    assert history.flush(10)
    print(bus.head, flush=True)
"""


def killed_writer(folder: Path, run_id: str, *, batches: int) -> int:
    """Let a process write so many batches, kill it while it is open; return what it had flushed."""
    command = [sys.executable, "-c", WRITER, str(folder), run_id]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(batches):
            print(file=process.stdin, flush=True)
            flushed = int(process.stdout.readline())
        process.kill()
    return flushed
