"""The SQL sandbox measured: round trips of small queries, refill of a killed child, memory, CPU.

Runs the real history and its two children over a tail of so many iterations with 64 sequences each.
CPU time is the stable figure; wall time is that of the machine in its present state.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.history import record
from bench.machine import StolenTime, describe
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History

SEQUENCES = 64
BATCH = 500
ROUND_TRIPS = 200
FED = 1000
PATIENCE_S = 120.0
ENDLESS = "SELECT count(*) FROM range(1000000000) a, range(1000) b"
QUERIES = {
    "one": "SELECT 1",
    "count": "SELECT count(*), max(end_at_ns) FROM iteration",
    "slices_of_a_request": "SELECT count(*) FROM slice WHERE request = 5",
}


class Measured:
    """A history of one made-up run, and its children as /proc has them."""

    def __init__(self, folder: str) -> None:
        self.bus = Bus(run_id="bench", capacity=2 * BATCH)
        self.history = History(
            bus=self.bus, config=TelemetryConfig(history=folder, history_segment_s=3600.0)
        )
        self.history.start()

    def publish(self, first: int, count: int) -> None:
        """Publish iterations and wait until they are committed."""
        for step in range(first, first + count):
            self.bus.publish(record(step, list(range(SEQUENCES))))
            if step % BATCH == 0:
                self.history.flush(PATIENCE_S)
        self.history.flush(PATIENCE_S)

    def children(self) -> list[int]:
        """Return the process ids of both children once they serve."""
        self.history.queries.start()
        _wait(lambda: len(self.history.queries.children()) == 2)
        return self.history.queries.children()

    def round_trip_ms(self, sql: str) -> dict[str, float]:
        """Return how long an answer takes, JSON and all."""
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            self.history.queries.run(sql)
            times.append(1e3 * (time.perf_counter() - began))
        times.sort()
        return {"p50": times[len(times) // 2], "p95": times[len(times) * 95 // 100]}

    def refill_s(self) -> dict[str, float]:
        """Leave two queries without end; return how long until children serve, and their CPU."""
        queries, old = self.history.queries, self.children()
        with queries.submit(ENDLESS), queries.submit(ENDLESS):
            before = [_cpu_s(child) for child in old]
            _wait(lambda: all(_cpu_s(c) > was for c, was in zip(old, before, strict=True)))
        began = time.monotonic()
        _wait(lambda: not set(queries.children()) & set(old))
        fresh = self.children()
        return {"wall": time.monotonic() - began, "cpu_each": max(map(_cpu_s, fresh))}

    def feed_us(self, first: int) -> float:
        """Return the CPU that one iteration costs one child when somebody asks."""
        children = self.children()
        before = [_cpu_s(child) for child in children]
        self.publish(first, FED)
        for _ in range(10):
            self.history.queries.run(QUERIES["one"])
        took = [_cpu_s(child) - was for child, was in zip(children, before, strict=True)]
        return 1e6 * max(took) / FED


def measure(iterations: int) -> dict[str, Any]:
    """Return every figure for a tail of so many iterations."""
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(folder)
        try:
            measured.publish(1, iterations)
            measured.children()
            found = {
                "slices": iterations * SEQUENCES,
                "round_trip_ms": {
                    name: measured.round_trip_ms(sql) for name, sql in QUERIES.items()
                },
                "refill_s": measured.refill_s(),
                "resident_mb": [_status_kb(child, "VmRSS") / 1024 for child in measured.children()],
                "private_mb": [
                    _status_kb(child, "RssAnon") / 1024 for child in measured.children()
                ],
                "feed_us_an_iteration": measured.feed_us(iterations + 1),
            }
        finally:
            measured.history.close()
    return found


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, "the children do not serve"
        time.sleep(0.002)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_kb(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(text.split(f"{name}:")[1].split()[0])


def main() -> int:
    """Measure tails of a minute at 20 iterations a second, and of five."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--iterations", type=int, nargs="*", default=[1200, 6000])
    flags = parser.parse_args()
    with StolenTime() as stolen:
        found = {str(count): measure(count) for count in flags.iterations}
    for count, figures in found.items():
        print(count, json.dumps(figures))
    if flags.json:
        flags.json.write_text(json.dumps({"tails": found} | describe(stolen), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
