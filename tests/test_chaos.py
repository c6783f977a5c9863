"""Chaos: everything goes wrong at once, and afterwards everything is as before.

GIVEN clients that come, leave, dawdle and break off, WHEN the engine is killed, crashes and stops,
the disk fills and the clock steps, THEN every request has one end, every client got an answer or an
error, and blocks, queue, memory and file handles are back. 20 seconds here, half an hour in soak.
"""

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.api import in_flight, still_answers
from tests.chaos import Chaos, fill_disk, kill_engine, pause_engine, resident_mb
from tests.servers import Server, serving
from tests.stepped_clock import SteppedClock

DISK_BYTES = 160 * 2**20
"""More than the 64 MiB that must be free before a history that stopped begins again."""
BOUNDS_MB = 250
"""What ring, queries and allocator may hold beyond a fresh server: 65,536 records are 170 MB."""
GROWTH_MB_MAX = 25
LONG_S = 100
FLAGS = (
    *("--kv-blocks", "200", "--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
    *("--max-queue-requests", "16", "--client-stall-s", "5", "--engine-hang-s", "20"),
    *("--header-deadline-s", "2", "--body-deadline-s", "2", "--ring-records", "65536"),
)
"""Deadlines short enough that half-open connections of the run are gone soon after it."""


class Witness:
    """A reader of the telemetry stream that counts starts and ends, and what it was not told."""

    def __init__(self, server: Server) -> None:
        self.starts: Counter[int] = Counter()
        self.ends: Counter[int] = Counter()
        self.lost: list[str] = []
        self.live: set[int] = set()
        self._url = f"{server.url}/telemetry/stream?kinds=request_start,request_end&hz=10"
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(20), "the stream does not begin"

    def _read(self) -> None:
        event = ""
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("GET", self._url, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("event:"):
                    event = line.removeprefix("event:").strip()
                elif line.startswith("data:"):
                    self._take(event, line.removeprefix("data:").strip())

    def _take(self, event: str, data: str) -> None:
        if event == "request_start":
            self.starts[json.loads(data)["request"]] += 1
        elif event == "request_end":
            self.ends[json.loads(data)["request"]] += 1
        elif event == "lost":
            self.lost.append(data)
        elif event == "hello":
            self._begun.set()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make the folder a disk of its own, of DISK_BYTES; False where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def handles(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def chaos(tmp_path: Path, *, seconds: float, seed: int, pause_s: float) -> str:
    """Run it, hold the server to what it was before, and return the table."""
    model = tiny.write(tmp_path / "tiny")
    disk = tmp_path / "disk"
    clock = SteppedClock(tmp_path)
    with small_disk(disk) as small:
        breaks: dict[str, Callable[[], None]] = {}
        flags = (*FLAGS, "--history", str(disk / "history"), "--history-segment-s", "20")
        with serving(tmp_path, model, *flags, env=clock.env) as server:
            breaks["engine killed (SIGKILL)"] = lambda: kill_engine(server, signal.SIGKILL)
            breaks["engine crashed (SIGSEGV)"] = lambda: kill_engine(server, signal.SIGSEGV)
            breaks[f"engine stopped for {pause_s:g} s"] = lambda: pause_engine(server, pause_s)
            if seconds > LONG_S:  # each takes --engine-hang-s to be noticed
                breaks["engine stopped for good"] = lambda: kill_engine(server, signal.SIGSTOP)
            if small:
                breaks["disk full for 2 s"] = lambda: fill_disk(disk, 2)
            if clock.env:
                offsets = itertools.cycle((3600, 0, -3600, 0))
                breaks["clock stepped by an hour"] = lambda: clock.step(next(offsets))
            still_answers(server)
            server.wait_idle()
            before = handles(server), resident_mb(server)
            witness = Witness(server)
            run = Chaos(server, seconds=seconds, seed=seed, breaks=breaks)
            asyncio.run(run.run())
            # Before anything is held against it, so that a failure tells the whole story.
            sys.stdout.write(f"\n{run.story.table()}\n")
            assert run.story.odd == []
            assert run.story.grown_mb() < GROWTH_MB_MAX
            assert_as_before(server, witness, before)
            left_out = {"disk full": not small, "clock steps": not clock.env}
            missing = [name for name, out in left_out.items() if out]
            assert server.stop() == 0, server.log[-2000:]
        _, trace, told = server.log.partition("Traceback")
        assert not trace, told[:6000]
        return run.story.table() + (f"\nleft out: {missing}" if missing else "")


def assert_as_before(server: Server, witness: Witness, before: tuple[int, float]) -> None:
    """Everything is back: requests, blocks, queue, handles, memory; each start has one end."""
    server.wait(lambda: not in_flight(server), 30)
    server.wait_idle(30)
    assert server.get("/health").status_code == 200
    still_answers(server)
    server.wait(lambda: witness.starts.keys() == witness.ends.keys(), 20)
    assert witness.lost == [], "the stream lost records: nothing is proven"
    assert set(witness.ends.values()) == {1}
    assert sum(witness.starts.values()) > 20
    ended = server.metric("iterscope_requests_ended_total")
    assert server.metric("iterscope_requests_accepted_total") == ended
    # A stream, a query child's pipes and a segment may be open now that were not before.
    server.wait(lambda: handles(server) <= before[0] + 8, 30)
    assert resident_mb(server) < before[1] + BOUNDS_MB
    server.wait(lambda: server.get("/health").json()["history"]["kept"], 30)
    assert not server.get("/health").json()["history"]["degraded"]
    body = {"sql": "SELECT count(*) FROM run"}
    server.wait(lambda: server.post("/telemetry/sql", body).status_code == 200, 30)


def test_twenty_seconds_of_chaos(tmp_path: Path) -> None:
    chaos(tmp_path, seconds=20, seed=1, pause_s=2)


@pytest.mark.soak
def test_half_an_hour_of_chaos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = chaos(tmp_path, seconds=1800, seed=2, pause_s=5)
    with capsys.disabled():
        sys.stdout.write(f"\n{table}\n")
