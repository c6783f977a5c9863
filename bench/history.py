"""The history measured: slices ingested a second, bytes an hour, explain and post-mortems on a day.

Ingest runs the real writer, with rotation every two seconds, against a ring of the default size.
The day (synthetic_day.py) is asked through the server's own way: sandboxed child, segments
attached, `explain` as GET /v1/requests/{id} has it. Everything happens in a temporary folder.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import StolenTime, describe
from bench.modes import percentile
from bench.synthetic_day import ROWS, RUN_ID, Day, write_day
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.explain_case import case_from_history
from telemetry.explanation import explain
from telemetry.history import History
from telemetry.named import catalogue
from telemetry.records import Iteration

INGEST_S, SEGMENT_S = 15.0, 2.0
EXPLAINED = 60
POST_MORTEMS = (
    "why_waiting",
    "slowest_requests",
    "who_held_the_kv",
    "recompute_tax",
    "neighbour_stalls",
)


def record(step: int, requests: list[int]) -> Iteration:
    """Return a decode step of these requests."""
    ones = [1] * len(requests)
    none: list[Any] = []
    return Iteration(
        step=step,
        begin_at_ns=step * 10**6,
        end_at_ns=(step + 1) * 10**6,
        plan_ns=100_000 + step % 977,
        launch_ns=100_000,
        wait_ns=600_000,
        commit_ns=100_000,
        gap_ns=100_000,
        device_ns=500_000 + step % 991,
        emit_ns=10_000,
        running=len(requests),
        waiting=step % 13,
        admission_stop="seqs",
        admission_blocker=step // 7,
        token_budget=512,
        prefill_tokens=0,
        decode_tokens=len(requests),
        padding_tokens=0,
        idle_rows=0,
        bucket=0,
        graph=False,
        kv_blocks_used=step % 503,
        kv_blocks_cached=0,
        kv_tokens=step % 4999,
        kv_blocks_peak=step % 503,
        allocation_failures=0,
        lost_before=0,
        requests=requests,
        start_positions=[step + row for row in range(len(requests))],
        token_counts=ones,
        kv_block_counts=[(step + row) // 16 for row in range(len(requests))],
        admitted=none,
        admitted_cached_tokens=none,
        passed_over=none,
        passed_over_reasons=none,
        preempted=none,
        preempted_causes=none,
        preempted_blocks=none,
        preempted_lost_tokens=none,
        preempted_beneficiaries=none,
        finished=none,
    )


@contextmanager
def kept(folder: Path, bus: Bus, **settings: Any) -> Iterator[History]:
    """Keep a history in the folder, open and with its query children warm."""
    history = History(bus=bus, config=TelemetryConfig(history=str(folder), **settings))
    history.start()
    while not history.status().kept:
        time.sleep(0.01)
    history.queries.start()
    try:
        yield history
    finally:
        history.close(60.0)


def ingest(folder: Path) -> dict[str, float]:
    """Publish as fast as the writer takes it, never letting the ring overflow; return the rate.

    What was published counts once it is stored; publishing itself is part of the time.
    """
    config = TelemetryConfig()
    bus = Bus(run_id="ingest", capacity=config.ring_records)
    with kept(folder, bus, history_segment_s=SEGMENT_S) as history:
        payload = b"{}"  # the engine's own bytes, in a server
        step, began, cpu = 0, time.monotonic(), time.process_time()
        behind_max = 0
        while time.monotonic() - began < INGEST_S:
            while history.behind < bus.capacity // 2:
                bus.publish(record(step, list(range(step % 7, step % 7 + ROWS))), payload)
                step += 1
            behind_max = max(behind_max, history.behind)
            time.sleep(0.001)
        assert history.flush(60.0), history.status()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        status = history.status()
        assert status.lost == 0
        assert status.segments > 0
    return {
        "ingest_slices_per_s": step * ROWS / seconds,
        "ingest_iterations_per_s": step / seconds,
        "ingest_cpu_us_per_slice": 1e6 * cpu / (step * ROWS),
        "ingest_segments": status.segments,
        "ingest_behind_max": behind_max,
        "ingest_lost": status.lost,
    }


def explained(history: History, day: Day) -> dict[str, float]:
    """Explain requests from all over the day, as the server does; return milliseconds."""
    pick = random.Random(0)
    took = []
    for turn in range(EXPLAINED + 3):
        request_id = f"req-{pick.randrange(ROWS, day.requests)}"
        began = time.perf_counter()
        case = case_from_history(history.queries.run, request_id)
        assert case is not None
        text = json.dumps(explain(case))
        assert len(case.tiles) >= 200, len(case.tiles)
        assert request_id in text
        if turn >= 3:
            took.append(1e3 * (time.perf_counter() - began))
    return {
        "explain_ms_p50": percentile(took, 0.5),
        "explain_ms_p95": percentile(took, 0.95),
        "explain_ms_max": max(took),
    }


def asked(history: History, seconds: float) -> dict[str, float | str]:
    """Run the post-mortems over the last so many seconds; return milliseconds, or what failed."""
    found: dict[str, float | str] = {}
    for name in POST_MORTEMS:
        bound = catalogue()[name].bind({"run_id": RUN_ID, "last_s": seconds})
        began = time.perf_counter()
        try:
            assert history.queries.run(bound.sql, bound.parameters).row_count >= 0
            found[name] = 1e3 * (time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - a query that cannot be answered is a finding
            found[name] = str(error)
    return found


def measure(folder: Path, hours: int) -> dict[str, Any]:
    """Return every figure, ingest first."""
    found: dict[str, Any] = dict(ingest(folder / "ingest"))
    shutil.rmtree(folder / "ingest")
    began = time.monotonic()
    day = write_day(folder / "day", time.time_ns() // 1000 - hours * 3_600 * 10**6, hours=hours)
    found |= {
        "day_slices": day.slices,
        "day_files": day.files,
        "day_write_s": time.monotonic() - began,
        "bytes_an_hour": day.bytes / hours,
        "bytes_a_slice": day.bytes / day.slices,
    }
    began = time.monotonic()
    quiet = {"history_segment_s": 3600.0}
    with kept(folder / "day", Bus(run_id="now", capacity=100), **quiet) as history:
        found["open_s"] = time.monotonic() - began
        found |= explained(history, day)
        found["post_mortem_hour_ms"] = asked(history, 3600.0)
        found["post_mortem_day_ms"] = asked(history, hours * 3600.0)
    return found


def main() -> int:
    """Measure, print, and write what was printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hours", type=int, default=24)
    flags = parser.parse_args()
    with StolenTime() as stolen, tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), flags.hours)
    report = found | describe(stolen)
    print(json.dumps(report, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
