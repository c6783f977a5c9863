"""Every policy at several rates on a modelled device: the same arrivals, repeatable to the token.

Replays the Azure sample of bench/modes.py through the real scheduler and core in virtual time: a
step takes what the modelled costs and a little noise say. Minutes of traffic take a second, so many
rates and seeds can be compared where real runs drown in noise. No model, no real clock.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from bench.machine import StolenTime, describe
from bench.modes import Recorder, Work, percentile, summary, table, workload
from engine.config import POLICY_NAMES, EngineConfig
from engine.core import Core
from engine.kv import KVPool
from engine.plan import Plan, StepOutput
from engine.policies import POLICIES
from engine.scheduler import Scheduler
from engine.step_model import StepTimes

FIXED_NS, PREFILL_NS, DECODE_NS, CONTEXT_NS = 25e6, 1.2e6, 3.0e6, 2e3
"""Costs of a step, a prefill token, a decode, a context token read: about the demo model in f32 on
two CPU cores. How policies compare depends on their proportions alone."""
NOISE = (0.95, 1.1)


class VirtualClock:
    """Time that only steps and waiting for arrivals move."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        """Return the present instant."""
        return self.ns


class ModelledStep:
    """A step whose end is known from its begin."""

    def __init__(self, clock: VirtualClock, output: StepOutput) -> None:
        self._clock = clock
        self._output = output

    def wait(self) -> StepOutput:
        """Let the step's time pass."""
        self._clock.ns += self._output.device_ns
        return self._output


class ModelledDevice:
    """Implements engine.plan.Runner: every token is the same, only its time counts."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self._clock = clock
        self._noise = random.Random(seed)

    def run(self, plan: Plan) -> ModelledStep:
        """Launch a step."""
        context = sum(plan.start_positions) + len(plan.token_ids)
        cost = PREFILL_NS * plan.prefill_tokens + DECODE_NS * plan.decode_tokens
        device_ns = (FIXED_NS + cost + CONTEXT_NS * context) * self._noise.uniform(*NOISE)
        output = StepOutput(tokens=[5] * sum(plan.samples), device_ns=int(device_ns))
        return ModelledStep(self._clock, output)

    def forget(self, request: int) -> None:
        """Nothing is kept of a sequence."""


def replay(policy: str, works: list[Work], *, seed: int, goals: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one policy over one list of arrivals."""
    clock = VirtualClock()
    recorder = Recorder(clock)
    config = EngineConfig(
        max_num_batched_tokens=256,
        max_model_len=1024,
        max_num_seqs=16,
        kv_blocks=640,
        enable_prefix_caching=False,
        dtype="f32",
        device="cpu",
        scheduling_policy=policy,
        **goals,
    )
    times = StepTimes()
    scheduler = Scheduler(
        config=config,
        pool=KVPool(blocks=640, block_tokens=config.block_size),
        policy=POLICIES[policy](config, times),
        eos_ids=(2,),
    )
    core = Core(
        scheduler=scheduler,
        runner=ModelledDevice(clock, seed),
        clock=clock,
        emit=recorder,
        times=times,
    )
    pending = list(works)
    while pending or core.has_work:
        while pending and pending[0].arrival_s * 1e9 <= clock.ns:
            core.add(pending.pop(0).submit)
        if core.has_work:
            core.step()
        else:
            clock.ns = int(pending[0].arrival_s * 1e9) + 1
            core.wake()
    return summary(recorder, clock.ns / 1e9, **goals)


def main() -> int:
    """Print one table a rate: medians over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 1.5, 2.0, 2.5, 4.0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft-ms", type=float, default=3000.0)
    parser.add_argument("--tpot-ms", type=float, default=200.0)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    goals: dict[str, Any] = {"ttft_ms": flags.ttft_ms, "tpot_ms": flags.tpot_ms}
    found: dict[str, dict[str, dict[str, float]]] = {}
    with StolenTime() as stolen:
        for rate in flags.rates:
            works = workload(flags.requests, rate)
            found[str(rate)] = rows = {}
            for policy in POLICY_NAMES:
                runs = [
                    replay(policy, works, seed=seed, goals=goals) for seed in range(flags.seeds)
                ]
                rows[policy] = {
                    name: percentile([run[name] for run in runs], 0.5) for name in runs[0]
                }
            print(f"\n{rate} requests/s, SLO {goals}, median of {flags.seeds} seeds")
            table(
                rows,
                ("goodput", "jain", "worst_wait_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms",
                 "output_tok_s"),
            )  # fmt: skip
    if flags.json:
        flags.json.write_text(json.dumps({"rates": found, **goals} | describe(stolen), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
