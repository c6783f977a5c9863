"""What telemetry costs: CPU of a step's record on its way, over CPU of the step itself.

Runs the real core at batch 64 of the demo model with the engine's own outbox, whose sockets end
here; then gives what came to a server's parts at the pace at which it came: decoded, published,
folded for metrics and for causes, written by the history's thread with its rotation. The engine's
part is the record's `emit_ns`, tokens' news included; the server's is this process's CPU time, all
threads. Delivery of tokens to clients, pages and queries are others' costs. Prints the shares.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bench.engine import Bench
from bench.machine import StolenTime, describe
from engine.loop import Outbox
from engine.messages import News, Report
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.explain_fold import CauseFold
from telemetry.history import History
from telemetry.metrics import Metrics
from telemetry.records import Iteration, Run

ROWS = 64
CAUSES_S = 0.5
"""How often the server folds causes."""
SETTLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A measured run: the payload of each step as it was sent, reports by the step they follow.

    step_cpu_us is the engine's CPU time for each step, all threads; emit_us what of it was spent on
    its record and news.
    """

    run: Run
    payloads: list[bytes]
    reports: list[Report]
    step_us: float
    step_cpu_us: float
    emit_us: float


def record(tokens: int) -> Recorded:
    """Let 64 streams decode so many tokens; return what the engine sent."""
    context = zmq.Context()
    ends = []
    for name in ("control", "records"):
        here, there = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (here, there):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        here.bind(f"inproc://{name}")
        there.connect(f"inproc://{name}")
        ends.append((here, there))
    (control, control_end), (records, records_end) = ends
    bench = Bench("auto", "auto", None, Outbox(control_end, records_end))
    for _ in range(ROWS):
        bench.add(16, tokens)
    bench.core.wake()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while bench.core.has_work:
        bench.core.step()
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    news = map(msgspec.msgpack.Decoder(News).decode, _drained(control))
    payloads = _drained(records)
    iterations = [msgspec.json.decode(payload, type=Iteration) for payload in payloads]
    context.destroy(linger=0)
    return Recorded(
        run=bench.run,
        payloads=payloads,
        reports=[one for one in news if isinstance(one, Report)],
        step_us=1e6 * seconds / len(payloads),
        step_cpu_us=1e6 * cpu_s / len(payloads),
        emit_us=statistics.fmean(one.emit_ns for one in iterations) / 1e3,
    )


def _drained(socket: "zmq.Socket[bytes]") -> list[bytes]:
    found = []
    while int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
        found.append(socket.recv())
    return found


def kept_us(recorded: Recorded, folder: Path) -> float:
    """Return the CPU time of a server's parts for each step, us, at the pace of the run."""
    bus = Bus(run_id="telemetry-share", capacity=8192)
    bus.publish(recorded.run)
    history = History(bus=bus, config=TelemetryConfig(history=str(folder)))
    metrics, causes = Metrics(bus=bus, model_name="bench"), CauseFold(bus)
    history.start()
    metrics.start()
    time.sleep(SETTLE_S)
    gc.collect()
    gc.freeze()  # as a server does once it is ready
    decode = msgspec.json.Decoder(Iteration).decode
    reports = iter(recorded.reports)
    report = next(reports, None)
    began_s, folded_s = time.perf_counter(), 0.0
    began_cpu_s = time.process_time()
    for number, payload in enumerate(recorded.payloads):
        due_s = number * recorded.step_us / 1e6
        time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        iteration = decode(payload)
        while report is not None and report.after_step < iteration.step:
            for start in report.starts:
                bus.publish(start)
            report = next(reports, None)
        bus.publish(iteration, payload)
        if due_s > folded_s + CAUSES_S:
            folded_s = due_s
            causes.advance()
    history.flush()
    spent_s = time.process_time() - began_cpu_s
    metrics.stop()
    history.close()
    return 1e6 * spent_s / len(recorded.payloads)


def main() -> int:
    """Measure; print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=300, help="steps that are measured")
    flags = parser.parse_args()
    logging.disable(logging.INFO)
    with StolenTime() as stolen, tempfile.TemporaryDirectory() as folder:
        recorded = record(flags.tokens)
        kept = kept_us(recorded, Path(folder))
    found: dict[str, Any] = {
        "rows": ROWS,
        "steps": len(recorded.payloads),
        "step_cpu_us": recorded.step_cpu_us,
        "emit_us": recorded.emit_us,
        "kept_cpu_us": kept,
        "telemetry_cpu_share": (recorded.emit_us + kept) / recorded.step_cpu_us,
    }
    for name, value in found.items():
        print(f"{name:22}{value:12.4f}" if value < 1 else f"{name:22}{value:12.0f}")
    if flags.json:
        flags.json.write_text(json.dumps(found | describe(stolen)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
