"""What a step costs in the scheduler alone: plan and commit, by policy, with and without a queue.

Drives engine/scheduler.py directly with outputs made up on the spot: no model, no records. 100
tenants, mixed lengths, the queue held at its length while 20 requests arrive and 4 leave each step
(1,000 and 200 a second at 20 ms a step). Prints microseconds, p50 and p99; --json writes them.
"""

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path

from bench.machine import StolenTime, describe
from engine.config import POLICY_NAMES, EngineConfig
from engine.kv import KVPool
from engine.messages import Abort, SamplingParams, Submit
from engine.plan import StepOutput
from engine.policies import POLICIES
from engine.scheduler import Scheduler
from engine.step_model import StepTimes

RUNNING = (1, 16, 64, 256, 1024)
WAITING = (0, 10_000)
STEPS = 400
WARM_STEPS = 60
STEP_NS = 20_000_000
ARRIVALS = 20
ABORTS = 4
SAMPLING = SamplingParams(temperature=0.0)


class Traffic:
    """A scheduler with `running` slots and a line held at `waiting`."""

    def __init__(self, policy: str, running: int, waiting: int) -> None:
        self._random = random.Random(3)
        self._waiting = waiting
        self._running = running
        self._now_ns = 0
        self._number = 0
        config = EngineConfig(
            max_model_len=2048,
            max_num_seqs=running,
            max_num_batched_tokens=max(512, running + 256),
            kv_blocks=running * 60 + 200,
            dtype="f32",
            scheduling_policy=policy,
        )
        assert config.kv_blocks is not None
        self.scheduler = Scheduler(
            config=config,
            pool=KVPool(blocks=config.kv_blocks, block_tokens=config.block_size),
            policy=POLICIES[policy](config, StepTimes()),
            eos_ids=(2,),
        )
        self._fill()

    def _add(self) -> None:
        self._number += 1
        pick = self._random
        self.scheduler.add(
            Submit(
                request=self._number,
                request_id=str(self._number),
                tenant=f"tenant-{pick.randrange(100)}",
                priority=pick.randrange(3),
                prompt=[5] * pick.choice((8, 40, 100, 300)),
                max_tokens=pick.randrange(20, 400),
                sampling=SAMPLING,
                received_at_ns=self._now_ns,
            ),
            self._now_ns,
        )

    def _fill(self) -> None:
        scheduler = self.scheduler
        while (
            len(scheduler.roster.running) + len(scheduler.roster.waiting)
            < self._running + self._waiting
        ):
            self._add()

    def churn(self) -> None:
        """Let some of the line leave and as many arrive; keep its length."""
        line = self.scheduler.roster.waiting
        if len(line) > ARRIVALS:
            for _ in range(ABORTS):
                number = self._random.randrange(max(1, self._number - 5000), self._number)
                self.scheduler.abort(Abort(request=number, finish="cancelled"), self._now_ns)
            for _ in range(ARRIVALS):
                self._add()
            for _ in range(len(line) - self._waiting):
                number = self._number - self._random.randrange(ARRIVALS * 2)
                self.scheduler.abort(Abort(request=number, finish="cancelled"), self._now_ns)
        self._fill()

    def step(self) -> int:
        """Plan and commit one step; return the ns that took."""
        self._now_ns += STEP_NS
        began = time.perf_counter_ns()
        plan = self.scheduler.plan(self._now_ns)
        planned = time.perf_counter_ns()
        output = StepOutput(tokens=[7] * sum(plan.samples), device_ns=STEP_NS)
        resumed = time.perf_counter_ns()
        self.scheduler.commit(plan, output, self._now_ns)
        ended = time.perf_counter_ns()
        self.scheduler.roster.take_gains()
        self.scheduler.roster.take_ended()
        return planned - began + ended - resumed


def measure(policy: str, running: int, waiting: int) -> dict[str, float]:
    """Return p50 and p99 of a step in microseconds."""
    traffic = Traffic(policy, running, waiting)
    times: list[int] = []
    for step in range(STEPS):
        taken = traffic.step()
        if step >= WARM_STEPS:
            times.append(taken)
        traffic.churn()
    times.sort()
    return {
        "p50_us": times[len(times) // 2] / 1e3,
        "p99_us": times[len(times) * 99 // 100] / 1e3,
    }


def main() -> int:
    """Measure every policy at every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    flags = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with StolenTime() as stolen:
        for policy in POLICY_NAMES:
            for running in flags.running:
                for waiting in WAITING:
                    key = f"{policy} {running} {waiting}"
                    found[key] = measure(policy, running, waiting)
                    line = found[key]
                    print(
                        f"{policy:14}{running:6} running{waiting:7} waiting  "
                        f"p50 {line['p50_us']:8.1f} us  p99 {line['p99_us']:8.1f} us",
                        flush=True,
                    )
    summary = {
        f"step_us_256_running_{waiting}_waiting": max(
            (found[f"{policy} 256 {waiting}"]["p50_us"] for policy in POLICY_NAMES), default=0.0
        )
        for waiting in WAITING
        if f"{POLICY_NAMES[0]} 256 {waiting}" in found
    }
    print(json.dumps(summary))
    if flags.json:
        report = summary | {"all": found, "python": platform.python_version()}
        flags.json.write_text(json.dumps(report | describe(stolen), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
