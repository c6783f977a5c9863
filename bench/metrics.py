"""Metrics measured: CPU of folding one iteration into the totals, CPU and bytes of one scrape.

Folds a made-up run as metrics.py's thread does: decode steps that go on, steps whose batch changes
each time, and steps whose every token is late. The fold runs off the engine's path; its CPU is what
it takes from the server's process. CPU time is the stable figure.
"""

import argparse
import json
import sys
import time
from dataclasses import replace

from bench.history import record
from bench.machine import StolenTime, describe
from telemetry.bus import Bus
from telemetry.metrics import Metrics
from telemetry.records import RequestEnd, RequestStart, Run

STEPS = 4000
BATCH = 1000
SCRAPES = 30
PROMPT = 128
OUTPUT = 200


def run_record() -> Run:
    """Return the run that the made-up steps belong to."""
    return Run(
        replica="bench",
        schema_version=1,
        started_unix_us=0,
        model="bench",
        parameters=0,
        dtype="f32",
        device="cpu",
        backend="none",
        backend_refusals="{}",
        policy="fcfs",
        batching="continuous",
        kv_blocks_total=4096,
        block_tokens=16,
        batch_tokens_max=8192,
        seqs_max=256,
        model_len_max=8192,
        buckets=[],
        config="{}",
        revision="bench",
    )


def start_record(request: int, arrived_at_ns: int) -> RequestStart:
    """Return the start of one sequence."""
    return RequestStart(
        request=request,
        request_id=f"cmpl-{request}",
        external_id=None,
        parent_id=None,
        tenant=f"tenant-{request % 40}",
        arrived_at_ns=arrived_at_ns,
        prompt_tokens=PROMPT,
        max_tokens=OUTPUT,
        priority=0,
        slo=None,
        stream=True,
    )


def end_record(request: int, now_ns: int) -> RequestEnd:
    """Return the end of one sequence that was served."""
    began_ns = max(0, now_ns - OUTPUT * 10**6)
    return RequestEnd(
        request=request,
        request_id=f"cmpl-{request}",
        external_id=None,
        parent_id=None,
        tenant=f"tenant-{request % 40}",
        received_at_ns=began_ns,
        arrived_at_ns=began_ns,
        admitted_at_ns=began_ns,
        first_scheduled_at_ns=began_ns,
        prefill_finished_at_ns=began_ns,
        first_token_at_ns=began_ns,
        cancel_requested_at_ns=None,
        decided_at_ns=now_ns,
        freed_at_ns=now_ns,
        released_at_ns=now_ns,
        prompt_tokens=PROMPT,
        cached_tokens=0,
        output_tokens=OUTPUT,
        recomputed_tokens=0,
        dropped_tokens=0,
        wasted_tokens=0,
        preemptions=0,
        iterations=OUTPUT,
        finish="stop",
        cancel_cause=None,
        error=None,
    )


class Made:
    """A bus that a made-up run is published on, and the metrics that fold it."""

    def __init__(self, rows: int) -> None:
        self.bus = Bus(run_id="bench", capacity=8 * BATCH)
        self.metrics = Metrics(bus=self.bus, model_name="bench")
        self.rows = list(range(1, rows + 1))
        self.at = dict.fromkeys(self.rows, PROMPT)
        self.bus.publish(run_record())
        for request in self.rows:
            self.bus.publish(start_record(request, 0))
        self.metrics.exposition()

    def step(self, step: int, *, turnover: bool, ms: int) -> None:
        """Publish one decode step; with turnover one sequence ends and another takes its row."""
        began_ns = step * ms * 10**6
        if turnover:
            gone = self.rows.pop(0)
            fresh = max(self.rows, default=gone) + 1
            self.at.pop(gone)
            self.bus.publish(end_record(gone, began_ns))
            self.bus.publish(start_record(fresh, began_ns))
            self.rows.append(fresh)
            self.at[fresh] = PROMPT
        iteration = replace(
            record(step, list(self.rows)),
            begin_at_ns=began_ns,
            end_at_ns=began_ns + ms * 10**6,
            start_positions=[self.at[request] for request in self.rows],
            decode_tokens=len(self.rows),
            prefill_tokens=0,
            admitted=self.rows[-1:] if turnover else [],
            admitted_cached_tokens=[0] if turnover else [],
        )
        for request in self.rows:
            self.at[request] += 1
        self.bus.publish(iteration)


def fold_us(rows: int, *, turnover: bool, ms: int) -> float:
    """Return the CPU time of folding one iteration, us, with what comes and goes between two."""
    made = Made(rows)
    spent = 0.0
    for first in range(1, STEPS, BATCH):
        for step in range(first, first + BATCH):
            made.step(step, turnover=turnover, ms=ms)
        began = time.thread_time()
        made.metrics._fold.advance()
        spent += time.thread_time() - began
    return 1e6 * spent / STEPS


def scrape() -> dict[str, float]:
    """Return CPU and size of a scrape in the plain format and in OpenMetrics."""
    made = Made(64)
    for step in range(1, BATCH):
        made.step(step, turnover=True, ms=1)
    found: dict[str, float] = {}
    for name, accept in (("plain", ""), ("openmetrics", "application/openmetrics-text")):
        body, _ = made.metrics.exposition(accept)
        began = time.thread_time()
        for _ in range(SCRAPES):
            made.metrics.exposition(accept)
        found[f"{name}_cpu_ms"] = 1e3 * (time.thread_time() - began) / SCRAPES
        found[f"{name}_bytes"] = len(body)
        found[f"{name}_lines"] = body.count(b"\n")
    return found


def main() -> int:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64, 256])
    flags = parser.parse_args()
    with StolenTime() as stolen:
        folds = {
            f"{rows}_rows": {
                "steady_us": fold_us(rows, turnover=False, ms=1),
                "turnover_us": fold_us(rows, turnover=True, ms=1),
                "late_us": fold_us(rows, turnover=False, ms=500),
            }
            for rows in flags.rows
        }
        found = {"fold_cpu_each_iteration": folds, "scrape": scrape()}
    print(json.dumps(found | describe(stolen), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
