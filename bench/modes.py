"""Batching modes and policies on one real trace, one engine, one model: what each buys and costs.

Replays a sample of the Azure conversation trace in real time against the engine in this process (no
HTTP), lengths scaled to the model, greedy. First table: continuous, static, dynamic at a rate the
engine holds. Second: every policy at overload, three tenants, goodput under a stated SLO. Run it
alone on the machine, with OMP_WAIT_POLICY=PASSIVE, as the server runs its engine.
"""

import argparse
import csv
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from typing import Any

from bench.machine import StolenTime, describe
from bench.workload import DEMO_MODEL
from engine.build import build
from engine.config import BATCHING_MODES, POLICY_NAMES, EngineConfig
from engine.core import Core
from engine.messages import Gains, SamplingParams, Submit
from engine.plan import Clock
from telemetry.records import Fault, Iteration, RequestEnd, RequestStart, StepModel

TRACE = Path(__file__).parent / "data" / "azure_conv_200.csv"
SCALE = 4
PROMPT_MAX, OUTPUT_MAX = 400, 96


class WallClock:
    """Nanoseconds of CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        """Return the present instant."""
        return monotonic_ns()


@dataclass
class Recorder:
    """Keeps what the core emits, with the instant of every token."""

    clock: Clock
    lost: int = 0
    iterations: list[Iteration] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    instants: dict[int, list[int]] = field(default_factory=dict)

    def start(self, record: RequestStart) -> None:
        """Open a sequence's lists."""
        self.tokens[record.request], self.instants[record.request] = [], []

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Take a step's news."""
        now = self.clock.now_ns()
        for delta in gains.each():
            self.tokens[delta.request] += delta.tokens
            self.instants[delta.request] += [now] * len(delta.tokens)
        self.iterations.append(iteration)
        self.ends += ends

    def step_model(self, record: StepModel) -> None:
        """Ignore a fit."""

    def fault(self, record: Fault) -> None:
        """Stop: a measurement with a fault is none."""
        raise SystemExit(record.traceback)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request of the trace."""

    arrival_s: float
    submit: Submit


def workload(count: int, rate: float) -> list[Work]:
    """Return `count` requests of the trace, arrivals stretched to `rate` requests a second."""
    with TRACE.open() as file:
        rows = list(csv.DictReader(file))[:count]
    span = float(rows[-1]["arrival_s"])
    works = []
    for number, row in enumerate(rows, 1):
        pick = random.Random(number)
        prompt = max(8, min(PROMPT_MAX, int(row["context_tokens"]) // SCALE))
        output = max(4, min(OUTPUT_MAX, int(row["generated_tokens"]) // SCALE))
        submit = Submit(
            request=number,
            request_id=f"trace-{number}",
            # One tenant sends half of everything, two share the rest.
            tenant=("loud", "loud", "quiet", "calm")[number % 4],
            priority=number % 2,
            prompt=[pick.randrange(300, 49_000) for _ in range(prompt)],
            max_tokens=output,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            received_at_ns=0,
        )
        works.append(Work(arrival_s=float(row["arrival_s"]) / span * count / rate, submit=submit))
    return works


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[tuple[Core, Recorder]]:
    """Yield a warm engine over the demo model."""
    clock = WallClock()
    recorder = Recorder(clock)
    config = EngineConfig(
        model=str(model),
        max_num_batched_tokens=256,
        max_model_len=1024,
        enable_prefix_caching=False,
        **settings,
    )
    core, _ = build(config, emit=recorder, clock=clock, progress=lambda *_: None)
    yield core, recorder


def replay(core: Core, works: list[Work]) -> float:
    """Feed the requests at their instants, step until all are done; return seconds."""
    began = time.monotonic()
    pending = list(works)
    while pending or core.has_work:
        now = time.monotonic() - began
        while pending and pending[0].arrival_s <= now:
            core.add(pending.pop(0).submit)
        if delay_ns := core.opens_in_ns():
            time.sleep(min(delay_ns / 1e9, 0.002))
            core.rest()
        elif core.has_work:
            core.step()
        elif pending:
            time.sleep(max(0.0, min(0.002, pending[0].arrival_s - now)))
            core.wake()
    return time.monotonic() - began


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile, 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(
    recorder: Recorder, seconds: float, *, ttft_ms: float, tpot_ms: float
) -> dict[str, Any]:
    """Return a run's figures; times in ms, from arrival in the engine."""
    ttft, gaps, met, waits = [], [], 0, []
    served: dict[str, list[float]] = {}
    for end in recorder.ends:
        instants = recorder.instants[end.request]
        first = (instants[0] - end.arrived_at_ns) / 1e6
        own = [(b - a) / 1e6 for a, b in pairwise(instants)]
        ttft.append(first)
        gaps += own
        due = [first <= ttft_ms] + [
            (at - end.arrived_at_ns) / 1e6 <= ttft_ms + j * tpot_ms
            for j, at in enumerate(instants[1:], 1)
        ]
        met += all(due)
        assert end.admitted_at_ns is not None
        waits.append((end.admitted_at_ns - end.arrived_at_ns) / 1e6)
        served.setdefault(end.tenant, []).append((instants[-1] - end.arrived_at_ns) / 1e6)
    output = sum(map(len, recorder.tokens.values()))
    # Jain's index of the tenants' mean speed of a request (1 / time in the engine).
    speeds = [len(times) / sum(times) for times in served.values()]
    jain = sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds))
    held = [(e.freed_at_ns - e.decided_at_ns) / 1e6 for e in recorder.ends if e.freed_at_ns]
    return {
        "output_tok_s": output / seconds,
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "goodput": met / len(recorder.ends),
        "jain": jain,
        "worst_wait_ms": max(waits),
        "idle_rows": sum(record.idle_rows for record in recorder.iterations),
        "held_ms_mean": sum(held) / max(1, len(held)),
        "rows_mean": sum(len(r.requests) for r in recorder.iterations)
        / max(1, sum(bool(r.requests) for r in recorder.iterations)),
        "preemptions": sum(len(record.preempted) for record in recorder.iterations),
        "seconds": seconds,
    }


def table(found: dict[str, dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Print one line a run."""
    print("".join(f"{name:>15}" for name in ("", *columns)))
    for name, figures in found.items():
        print(f"{name:>15}" + "".join(f"{figures[column]:15.2f}" for column in columns))


def main() -> int:
    """Run both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s of the mode table")
    parser.add_argument("--overload", type=float, default=6.0, help="of the policy table")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=200.0)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    goals = {"ttft_ms": flags.ttft_ms, "tpot_ms": flags.tpot_ms}
    modes: dict[str, dict[str, Any]] = {}
    policies: dict[str, dict[str, Any]] = {}
    tokens: list[dict[int, list[int]]] = []
    with StolenTime() as stolen:
        for mode in BATCHING_MODES:
            with engine(flags.model, batching=mode, max_num_seqs=16) as (core, recorder):
                seconds = replay(core, workload(flags.requests, flags.rate))
                modes[mode] = summary(recorder, seconds, **goals)
                tokens.append(recorder.tokens)
        for policy in POLICY_NAMES:
            settings = {"scheduling_policy": policy, "max_num_seqs": 16, **goals}
            with engine(flags.model, **settings) as (core, recorder):
                seconds = replay(core, workload(flags.requests, flags.overload))
                policies[policy] = summary(recorder, seconds, **goals)
                tokens.append(recorder.tokens)
    same = all(found == tokens[0] for found in tokens)
    print(f"modes at {flags.rate} requests/s, {flags.requests} requests")
    table(
        modes,
        ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "rows_mean",
         "idle_rows", "held_ms_mean"),
    )  # fmt: skip
    print(f"\npolicies at {flags.overload} requests/s; SLO {goals}")
    table(
        policies,
        ("goodput", "jain", "worst_wait_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms",
         "output_tok_s", "preemptions"),
    )  # fmt: skip
    print(f"\nsame tokens in every run: {same}; stolen CPU {stolen.share:.1%}")
    if flags.json:
        report = {"modes": modes, "policies": policies, "same_tokens": same, **goals}
        flags.json.write_text(json.dumps(report | describe(stolen), indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
